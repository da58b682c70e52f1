// Package fairlead_test holds the laws of the house: who may import whom, and that every package says what it is.
package fairlead_test

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "fairlead.dev/fairlead/"

// law says what packages below a folder may import. Of our own packages: only those below own. Of others': not those below
// never. A package is bound by the law of the smallest folder that holds it.
type law struct {
	folder string
	own    []string
	never  []string
	why    string
}

var kubernetes = []string{"k8s.io/", "sigs.k8s.io/"}
var netlink = []string{"github.com/vishvananda/", "github.com/mdlayher/", "github.com/google/nftables", "github.com/cilium/ebpf"}

var laws = []law{
	{"model", nil, slices.Concat(kubernetes, netlink), "model holds nouns that know neither Kubernetes nor a kernel"},
	{"verdict", []string{"model"}, slices.Concat(kubernetes, netlink), "verdict is a pure function of the model"},
	{"source", []string{"source"}, netlink, "a source reads objects and decides nothing"},
	{"resolve/service", []string{"model", "source"}, netlink, "resolve alone gives Kubernetes objects a meaning, and does no I/O"},
	{"kernel", []string{"kernel"}, kubernetes, "kernel wraps system interfaces and knows nothing of their use"},
	{"reconcile", []string{"dataplane"}, slices.Concat(kubernetes, netlink), "the loop knows neither networks nor Kubernetes"},
	{"dataplane/service", []string{"dataplane", "kernel", "model"}, slices.Concat(kubernetes, netlink), "a data plane renders finished decisions"},
	{"dataplane/flows", []string{"dataplane", "kernel", "model"}, slices.Concat(kubernetes, netlink), "a data plane renders finished decisions"},
	{"dataplane/health", []string{"dataplane", "model"}, slices.Concat(kubernetes, netlink), "a data plane renders finished decisions"},
	{"agent", []string{"agent", "source", "resolve", "model", "reconcile", "dataplane"}, slices.Concat(kubernetes, netlink), "the agent only joins the line"},
	{"agent/config", []string{"agent", "model", "resolve"}, netlink, "config says what an agent is told, and touches no kernel"},
	{"agent/event", []string{"source"}, netlink, "event only tells people of problems"},
	{"agent/node", []string{"kernel"}, slices.Concat(kubernetes, netlink), "agent/node makes settings and decides nothing"},
	{"agent/migrate", []string{"kernel"}, slices.Concat(kubernetes, netlink), "migrate knows a kube-proxy's traces in the kernel, and no Service"},
	{"sandbox", []string{"sandbox", "source", "model", "kernel"}, netlink, "the sandbox builds namespaces through kernel, and is no part of the product's line"},
	{"conformance", []string{"conformance", "source", "resolve", "model", "verdict", "dataplane", "sandbox", "kernel"}, slices.Concat(netlink, []string{module + "dataplane/service/"}), "conformance judges planes by packets against verdict, and knows none by name"},
	{"sandbox/vm", []string{"sandbox/vm", "kernel/child"}, slices.Concat(kubernetes, netlink), "the second kernel knows nothing of what runs in it"},
	{"lab", nil, nil, ""},
}

type listed struct {
	ImportPath, Doc                             string
	GoFiles, Imports, TestImports, XTestImports []string
}

// packages lists this module's packages.
func packages(t *testing.T) (l []listed) {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Doc,GoFiles,Imports,TestImports,XTestImports", "./...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return l
		} else if err != nil {
			t.Fatal(err)
		}
		l = append(l, p)
	}
}

// below says whether a path is in a folder.
func below(path, folder string) bool { return path == folder || strings.HasPrefix(path, folder+"/") }

// nearer reports whether another law is about a smaller folder that holds path.
func nearer(path string, l law) bool {
	return slices.ContainsFunc(laws, func(o law) bool { return below(path, o.folder) && len(o.folder) > len(l.folder) })
}

func TestImportsGoOneWay(t *testing.T) {
	kept := map[string]bool{}
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module)
		for _, l := range laws {
			if !below(path, l.folder) || l.why == "" || nearer(path, l) {
				continue
			}
			kept[l.folder] = true
			for _, i := range p.Imports {
				own, ours := strings.CutPrefix(i, module)
				switch {
				case ours && !slices.ContainsFunc(l.own, func(f string) bool { return below(own, f) }):
					t.Errorf("%s imports %s: %s", path, own, l.why)
				case slices.ContainsFunc(l.never, func(f string) bool { return strings.HasPrefix(i, f) }) && !below(path, "kernel"):
					t.Errorf("%s imports %s: %s", path, i, l.why)
				}
			}
		}
	}
	for _, l := range laws {
		if l.why != "" && !kept[l.folder] {
			t.Errorf("the law of folder %s binds no package: is the folder gone?", l.folder)
		}
	}
}

func TestNothingImportsTheLab(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module)
		for _, i := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if own, ours := strings.CutPrefix(i, module); ours && below(own, "lab") && !below(path, "lab") && path != "cmd/fairlead" {
				t.Errorf("%s imports %s: the product must not need the lab", path, own)
			}
		}
	}
}

func TestPlanesDoNotKnowEachOther(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module)
		rest, isPlane := strings.CutPrefix(path, "dataplane/service/")
		if !isPlane {
			continue
		}
		for _, i := range p.Imports {
			if other, ours := strings.CutPrefix(i, module+"dataplane/service/"); ours && other != rest {
				t.Errorf("%s imports %s: no data plane copies or borrows from another", path, other)
			}
		}
	}
}

func TestOnlyKernelTalksNetlink(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module)
		for _, i := range p.Imports {
			if slices.ContainsFunc(netlink, func(f string) bool { return strings.HasPrefix(i, f) }) && !below(path, "kernel") {
				t.Errorf("%s imports %s: only packages below kernel do", path, i)
			}
		}
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	vague := []string{"util", "utils", "common", "helper", "helpers", "manager", "base", "misc"}
	for _, p := range packages(t) {
		if path := strings.TrimPrefix(p.ImportPath, module); p.Doc == "" && len(p.GoFiles) > 0 {
			t.Errorf("%s has no package comment", path)
		}
		if name := p.ImportPath[strings.LastIndex(p.ImportPath, "/")+1:]; slices.Contains(vague, name) {
			t.Errorf("%s: name packages by nouns of the field", p.ImportPath)
		}
	}
}
