package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"

	"k8s.io/apimachinery/pkg/version"

	"fairlead.dev/fairlead/config"
)

// buildInfo describes the binary: the commit that it was built from, and as its version Kubernetes' whose kube-proxy it
// replaces.
func buildInfo() version.Info {
	v := version.Info{GoVersion: runtime.Version(), Compiler: runtime.Compiler,
		Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.GitCommit = s.Value
		case "vcs.time":
			v.BuildDate = s.Value
		case "vcs.modified":
			v.GitTreeState = "clean"
			if s.Value == "true" {
				v.GitTreeState = "dirty"
			}
		}
	}
	for _, d := range info.Deps {
		if minor, ok := strings.CutPrefix(d.Version, "v0."); ok && d.Path == "k8s.io/kube-proxy" {
			v.Major, v.GitVersion = "1", "v1."+minor+"+fairlead"
			v.Minor, _, _ = strings.Cut(minor, ".")
		}
	}
	return v
}

// ownVersion names the commit that the binary was built from.
func ownVersion(v version.Info) string {
	switch {
	case v.GitCommit == "":
		return "unknown commit"
	case v.GitTreeState == "dirty":
		return v.GitCommit + ", modified"
	}
	return v.GitCommit
}

// printVersion prints what --version asks for.
func printVersion(w io.Writer, asked config.Version) {
	v := buildInfo()
	if asked == config.RawVersion {
		fmt.Fprintf(w, "%#v\n", v)
		return
	}
	kubernetes, _, _ := strings.Cut(v.GitVersion, "+")
	fmt.Fprintf(w, "Fairlead %s, in place of kube-proxy %s\n", ownVersion(v), kubernetes)
}
