package main

import (
	"cmp"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/version"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
)

// release and commit are set by the linker, see Makefile: a tag such as v0.1.0, empty between releases, and what
// git describe --always --dirty --abbrev=40 prints. Without them the Go toolchain's own records count.
var release, commit string

// build returns what a binary was built from, and with what.
type build struct {
	Version  string `json:"version"` // a release such as v0.1.0, else "devel"
	Commit   string `json:"commit"`  // 40 hexadecimal digits, or "unknown"
	Dirty    bool   `json:"dirty"`   // the tree held changes that the commit doesn't
	Time     string `json:"commitTime,omitempty"`
	Go       string `json:"goVersion"`
	Platform string `json:"platform"`
}

// thisBuild returns what this binary was built from: what the linker was given, else what the Go toolchain recorded.
func thisBuild() build {
	b := build{Version: release, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	b.Commit, b.Dirty = strings.CutSuffix(commit, "-dirty")
	info, ok := debug.ReadBuildInfo()
	if ok && b.Version == "" && strings.HasPrefix(info.Main.Version, "v") && !strings.Contains(info.Main.Version, "-") {
		b.Version = info.Main.Version // go install fairlead.dev/fairlead/cmd/fairlead@v0.1.0
	}
	settings := map[string]string{}
	if ok {
		for _, s := range info.Settings {
			settings[s.Key] = s.Value
		}
	}
	if b.Commit == "" {
		b.Commit, b.Dirty = settings["vcs.revision"], settings["vcs.modified"] == "true"
	}
	if b.Commit == settings["vcs.revision"] {
		b.Time = settings["vcs.time"]
	}
	b.Version, b.Commit = cmp.Or(b.Version, "devel"), cmp.Or(b.Commit, "unknown")
	return b
}

// short returns the release, or the commit of a build between releases.
func (b build) short() string {
	name := b.Version
	if name == "devel" {
		name = b.Commit[:min(len(b.Commit), 12)]
	}
	if b.Dirty {
		name += "-dirty"
	}
	return name
}

// String returns the version on one line, as --version prints it.
func (b build) String() string {
	commit := b.Commit
	if len(commit) > 12 {
		commit = commit[:12]
	}
	if b.Dirty {
		commit += ", modified"
	}
	return fmt.Sprintf("%s (commit %s, %s, %s)", b.Version, commit, b.Go, b.Platform)
}

// versionCommand prints what the binary was built from.
func versionCommand() *cobra.Command {
	var o cli.Output
	c := &cobra.Command{
		Use:     "version",
		Short:   "Print the version, the commit and the Go version of this binary",
		Example: "  fairlead version\n  fairlead version -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			b := thisBuild()
			return o.Print(cli.Out(c), b, func(p *cli.Page) error {
				_, err := fmt.Fprintln(p, "fairlead", b)
				return err
			})
		},
	}
	o.Add(c)
	return c
}

// buildInfo describes the binary as Kubernetes' components do: its version is that of the kube-proxy that it replaces.
func buildInfo() version.Info {
	b := thisBuild()
	v := version.Info{GoVersion: b.Go, Compiler: runtime.Compiler, Platform: b.Platform, BuildDate: b.Time,
		GitCommit: b.Commit, GitTreeState: "clean"}
	if b.Dirty {
		v.GitTreeState = "dirty"
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	for _, d := range info.Deps {
		if minor, ok := strings.CutPrefix(d.Version, "v0."); ok && d.Path == "k8s.io/kube-proxy" {
			v.Major, v.GitVersion = "1", "v1."+minor+"+fairlead"
			v.Minor, _, _ = strings.Cut(minor, ".")
		}
	}
	return v
}

// printVersion prints what --version asks for.
func printVersion(w io.Writer, requested config.Version) {
	v := buildInfo()
	if requested == config.RawVersion {
		fmt.Fprintf(w, "%#v\n", v)
		return
	}
	kubernetes, _, _ := strings.Cut(v.GitVersion, "+")
	fmt.Fprintf(w, "Fairlead %s, in place of kube-proxy %s\n", thisBuild(), kubernetes)
}
