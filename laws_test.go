// Package fairlead_test holds the laws of the house: which package may import which, and that every package says what
// it is.
package fairlead_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "fairlead.dev/fairlead/"

// law returns what packages below a folder may import. Of our own packages: only those below own. Of others': not those
// below never. A package is bound by the law of the smallest folder that holds it.
type law struct {
	folder string
	own    []string
	never  []string
	why    string
}

var kubernetes = []string{"k8s.io/", "sigs.k8s.io/"}
var planes = []string{module + "dataplane/service/", module + "dataplane/policy/"}
var netlinkOnly = []string{"github.com/vishvananda/", "github.com/mdlayher/", "github.com/google/nftables"}
var netlink = append(slices.Clone(netlinkOnly), "github.com/cilium/ebpf")

// labBelow is what experiments and their testbed stand on.
var labBelow = []string{"lab/load", "lab/stats", "lab/result", "lab/kubeproxy", "lab/kuberouter", "agent", "bpf",
	"kernel", "model", "reconcile", "resolve", "sandbox", "source"}

var laws = []law{
	{"model", nil, slices.Concat(kubernetes, netlink), "model holds nouns that know neither Kubernetes nor a kernel"},
	{"verdict", []string{"model"}, slices.Concat(kubernetes, netlink), "verdict is a pure function of the model"},
	{"source", []string{"source"}, netlink, "a source reads objects and decides nothing"},
	{"resolve/service", []string{"model", "source"}, netlink,
		"resolve alone gives Kubernetes objects a meaning, and does no I/O"},
	{"resolve/policy", []string{"model", "source"}, netlink,
		"resolve/policy alone knows what network policies mean, does no I/O and knows no Service"},
	{"resolve/network", []string{"model", "source"}, netlink,
		"resolve/network alone knows what Nodes mean to the pod network, does no I/O and knows no Service"},
	{"flowlog", []string{"model"}, slices.Concat(kubernetes, netlink), "flowlog is the format of a file"},
	{"reachability", []string{"flowlog", "model", "resolve/policy", "resolve/service", "source", "verdict"}, netlink,
		"reachability evaluates objects alone, and touches no kernel"},
	{"kernel", []string{"kernel"}, kubernetes, "kernel wraps system interfaces and knows nothing of their use"},
	{"bpf", []string{"kernel/bpf"}, slices.Concat(kubernetes, netlinkOnly),
		"a room has the Go side of its C: maps and attachments, and no decision; programs know none of each other"},
	{"bpf/device", []string{"bpf/policy", "bpf/service", "kernel/bpf"}, slices.Concat(kubernetes, netlinkOnly),
		"the program at devices has Services' maps and calls that of policies: it knows both, and they don't know it"},
	{"reconcile", []string{"dataplane", "model"}, slices.Concat(kubernetes, netlink),
		"the loop knows neither networks nor Kubernetes"},
	{"dataplane/service", []string{"bpf/device", "bpf/service", "dataplane", "kernel", "model"},
		slices.Concat(kubernetes, netlink), "a data plane renders finished decisions"},
	{"dataplane/policy", []string{"bpf/device", "bpf/policy", "dataplane", "kernel", "model"},
		slices.Concat(kubernetes, netlink, planes), "a policy engine renders finished decisions, and knows no Service"},
	{"dataplane/policy/policytest",
		[]string{"dataplane", "kernel", "model", "reconcile", "resolve/policy", "sandbox", "source", "verdict"},
		slices.Concat(netlink, planes), "policytest judges policy engines by packets against verdict"},
	{"dataplane/network", []string{"bpf/device", "dataplane/network", "dataplane", "kernel", "model"},
		slices.Concat(kubernetes, netlink, planes), "the pod network renders finished decisions, and knows no Service"},
	{"dataplane/dns", []string{"dataplane", "kernel"}, slices.Concat(kubernetes, netlink, planes),
		"which messages are queued to the agent is decided above"},
	{"dataplane/nft", []string{"kernel", "dataplane", "model"},
		slices.Concat(kubernetes, netlink, []string{module + "dataplane/service"}), "a declared table knows no plane"},
	{"dataplane/xt", []string{"kernel", "dataplane", "model"},
		slices.Concat(kubernetes, netlink, []string{module + "dataplane/service"}), "what planes share knows no plane"},
	{"dataplane/flows", []string{"dataplane", "kernel", "model"}, slices.Concat(kubernetes, netlink),
		"a data plane renders finished decisions"},
	{"dataplane/device", []string{"bpf/device", "dataplane", "kernel", "model"}, slices.Concat(kubernetes, netlink),
		"a data plane renders finished decisions"},
	{"dataplane/health", []string{"dataplane", "model"}, slices.Concat(kubernetes, netlink),
		"a data plane renders finished decisions"},
	{"inspect", []string{"agent/mode", "agent/network/attach", "dataplane/service", "ipam", "model", "reachability",
		"reconcile", "resolve", "source", "verdict"},
		netlink, "inspect compares what was decided with what the kernel holds, as values"},
	{"agent", []string{"agent", "inspect", "source", "resolve", "model", "reconcile", "dataplane"},
		slices.Concat(kubernetes, netlink, planes), "the agent only joins the line, and knows no plane by name"},
	{"agent/subsystem", []string{"dataplane/service", "inspect", "model", "reconcile", "source"},
		slices.Concat(kubernetes, netlink, planes), "subsystem is an interface and its values"},
	{"agent/service",
		[]string{"agent/mode", "agent/subsystem", "dataplane", "inspect", "model", "reconcile", "resolve/service",
			"source", "verdict"},
		slices.Concat(kubernetes, netlink, planes), "Services know no other subsystem, and no plane by name"},
	{"agent/policy", []string{"agent/mode", "agent/policy", "agent/subsystem", "inspect", "model", "reconcile",
		"resolve/policy", "source"},
		slices.Concat(kubernetes, netlink, planes), "policies know no other subsystem, and no plane by name"},
	{"agent/network", []string{"agent/mode", "agent/network", "agent/node", "agent/subsystem", "cni", "inspect",
		"ipam", "model", "resolve/network", "source"},
		slices.Concat(kubernetes, netlink, planes), "the pod network knows no other subsystem, and no plane by name"},
	{"agent/memory", []string{"kernel/cgroup"}, slices.Concat(kubernetes, netlink), "memory is about any process"},
	{"agent/mode", []string{"agent/link", "model", "resolve", "reconcile", "dataplane"},
		slices.Concat(kubernetes, netlink),
		"modes are made of planes, and decide nothing of packets"},
	{"agent/config", []string{"agent/mode", "agent/node", "model", "resolve"}, slices.Concat(netlink, planes),
		"config says what an agent is told, and touches no kernel"},
	{"agent/policy/denial", []string{"agent/policy/packet", "kernel/netns", "kernel/nflog", "model", "verdict"},
		slices.Concat(kubernetes, netlink), "denial has verdict name what an engine logs, and knows no engine"},
	{"agent/policy/packet", nil, slices.Concat(kubernetes, netlink), "packet reads headers alone"},
	{"agent/policy/names", []string{"agent/policy/packet", "dataplane/dns", "kernel/conntrack", "kernel/nflog",
		"kernel/netns", "kernel/nfqueue", "model", "reconcile", "source"},
		slices.Concat(kubernetes, netlink), "names learns addresses from DNS, and knows no engine and no policy's meaning"},
	{"agent/policy/revoke",
		[]string{"agent/subsystem", "kernel/conntrack", "kernel/netlink", "model", "reconcile", "verdict"},
		slices.Concat(kubernetes, netlink), "revoke cuts what verdict denies, and knows no engine"},
	{"flowlog/record",
		[]string{"bpf/policy", "flowlog", "kernel/conntrack", "kernel/nftables", "kernel/sysctl", "model", "source"},
		netlink, "record counts what the kernel reports, and decides nothing"},
	{"agent/link", []string{"kernel", "model"}, slices.Concat(kubernetes, netlink), "link is the source of devices"},
	{"agent/event", []string{"source"}, netlink, "event only tells people of problems"},
	{"agent/node", []string{"kernel"}, slices.Concat(kubernetes, netlink),
		"agent/node makes settings and decides nothing"},
	{"agent/network/attach", []string{"cni", "ipam", "kernel", "model"}, slices.Concat(kubernetes, netlink),
		"attach serves the CNI plugin, and knows no plane by name"},
	{"agent/local", []string{"cni", "kernel/netns"}, slices.Concat(kubernetes, netlink),
		"local sends bytes to root, and knows no configuration"},
	{"cni", []string{"cni"}, slices.Concat(kubernetes, netlink), "the plugin is small: the standard library alone"},
	{"cmd/fairlead/cli", []string{"agent/escape"}, slices.Concat([]string{"k8s.io/"}, netlink),
		"what commands share knows none of them"},
	{"cmd/fairlead/text", []string{"agent/escape", "cmd/fairlead/cli", "inspect", "model", "source", "verdict"},
		slices.Concat(kubernetes, netlink), "text prints what inspect found, and finds nothing"},
	{"cmd/fairlead-cni", []string{"cni"}, slices.Concat(kubernetes, netlink), "the plugin is small"},
	{"ipam", []string{"cni"}, slices.Concat(kubernetes, netlink), "addresses are numbers and files"},
	{"agent/migrate", []string{"kernel"}, slices.Concat(kubernetes, netlink),
		"migrate knows a kube-proxy's traces in the kernel, and no Service"},
	{"sandbox", []string{"bpf/policy", "sandbox", "source", "model", "kernel", "cni"}, netlink,
		"the sandbox builds namespaces through kernel, and is no part of the product's line"},
	{"conformance", []string{"conformance", "source", "resolve", "model", "verdict", "dataplane", "sandbox", "kernel"},
		slices.Concat(netlink, planes), "conformance judges planes by packets against verdict, and knows none by name"},
	{"sandbox/vm", []string{"sandbox/vm", "kernel/child"}, slices.Concat(kubernetes, netlink),
		"the second kernel knows nothing of what runs in it"},
	{"lab", nil, nil, ""},
	{"lab/experiment", slices.Concat(labBelow, []string{"lab/experiment", "lab/testbed", "lab/classic", "lab/rules",
		"lab/progress", "lab/instructions", "lab/floor", "dataplane"}), netlink,
		"an experiment measures on a testbed; others compute and draw"},
	{"lab/testbed", labBelow, netlink, "a testbed knows no experiment"},
	{"lab/result", []string{"lab/load"}, slices.Concat(kubernetes, netlink), "result is the format of a run's files"},
	{"lab/floor", []string{}, slices.Concat(kubernetes, netlinkOnly),
		"a floor is a program of a few instructions, and no more"},
	{"lab/instructions", nil, slices.Concat(kubernetes, netlink), "instructions is a pure function of a trace"},
	{"lab/analysis", []string{"lab/result", "lab/load", "lab/stats"}, slices.Concat(kubernetes, netlink),
		"analysis is a pure function of a result"},
	{"lab/report", []string{"lab/analysis", "lab/result", "lab/stats", "lab/chart"}, slices.Concat(kubernetes, netlink),
		"report draws what analysis found, and measures nothing"},
}

type listed struct {
	ImportPath, Dir, Doc                        string
	GoFiles, Imports, TestImports, XTestImports []string
}

// packages lists this module's packages.
func packages(t *testing.T) (l []listed) {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Dir,Doc,GoFiles,Imports,TestImports,XTestImports",
		"./...").Output()
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

// below reports whether a path is in a folder.
func below(path, folder string) bool { return path == folder || strings.HasPrefix(path, folder+"/") }

// nearer reports whether another law is about a smaller folder that holds path.
func nearer(path string, l law) bool {
	return slices.ContainsFunc(laws, func(o law) bool { return below(path, o.folder) && len(o.folder) > len(l.folder) })
}

func TestImportDirection(t *testing.T) {
	used := map[string]bool{}
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module)
		for _, l := range laws {
			if !below(path, l.folder) || l.why == "" || nearer(path, l) {
				continue
			}
			used[l.folder] = true
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
		if l.why != "" && !used[l.folder] {
			t.Errorf("the law of folder %s binds no package: is the folder gone?", l.folder)
		}
	}
}

func TestNothingImportsTheLab(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module)
		for _, i := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if own, ours := strings.CutPrefix(i, module); ours && below(own, "lab") && !below(path, "lab") &&
				path != "cmd/fairlead" && path != "cmd/fairlead/labcmd" {
				t.Errorf("%s imports %s: the product must not need the lab", path, own)
			}
		}
	}
}

// maxCommands is how many lines the commands of a node and a cluster may have: they parse flags and call packages.
const maxCommands = 3500

func TestCommandsStayThin(t *testing.T) {
	lines := 0
	paths, err := filepath.Glob("cmd/fairlead/*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(path, "_test.go") {
			lines += strings.Count(string(text), "\n")
		}
	}
	if lines == 0 || lines > maxCommands {
		t.Errorf("cmd/fairlead has %d lines, at most are %d: what a node holds belongs to inspect, how it is printed to "+
			"cmd/fairlead/text", lines, maxCommands)
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

func TestOnlyModesKnowPlanesByName(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module)
		if below(path, "agent/mode") || below(path, "dataplane") || below(path, "lab") {
			continue
		}
		for _, i := range p.Imports {
			if slices.ContainsFunc(planes, func(f string) bool { return strings.HasPrefix(i, f) }) {
				t.Errorf("%s imports %s: above the planes only agent/mode knows them by name", path, strings.TrimPrefix(i, module))
			}
		}
	}
}

// subsystems are the packages that the agent lists.
var subsystems = []string{"agent/service", "agent/policy", "agent/network"}

// TestOnlyTheAgentKnowsSubsystems: what one needs of another is in the model's Delta. What stands below a subsystem is
// its own: nothing of the agent's beside it imports that.
func TestOnlyTheAgentKnowsSubsystems(t *testing.T) {
	found := 0
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module)
		if slices.Contains(subsystems, path) {
			found++
		}
		if !below(path, "agent") {
			continue
		}
		for _, i := range p.Imports {
			own := strings.TrimPrefix(i, module)
			if path != "agent" && (own == "agent" || slices.Contains(subsystems, own)) {
				t.Errorf("%s imports %s: subsystems are listed by the agent, and know neither it nor each other", path, own)
			}
			if s := filepath.Dir(own); slices.Contains(subsystems, s) && !below(path, s) {
				t.Errorf("%s imports %s, which is of %s alone", path, own, s)
			}
		}
	}
	if found != len(subsystems) {
		t.Errorf("%d subsystems, want %d: are they elsewhere?", found, len(subsystems))
	}
}

// mostRootLines is how many lines of Go the agent itself may have: what belongs to one subsystem stands there.
const mostRootLines = 1200

func TestAgentIsAListOfSubsystems(t *testing.T) {
	for _, p := range packages(t) {
		if p.ImportPath != module+"agent" {
			continue
		}
		lines := 0
		for _, name := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			lines += strings.Count(string(text), "\n")
		}
		if lines > mostRootLines {
			t.Errorf("package agent has %d lines, at most are %d", lines, mostRootLines)
		}
		return
	}
	t.Error("there is no package agent")
}

func TestExperimentsDoNotKnowEachOther(t *testing.T) {
	for _, p := range packages(t) {
		one, isExperiment := strings.CutPrefix(p.ImportPath, module+"lab/experiment/")
		for _, i := range p.Imports {
			if other, ours := strings.CutPrefix(i, module+"lab/experiment/"); isExperiment && ours && other != one {
				t.Errorf("lab/experiment/%s imports %s: what experiments share is in lab/experiment and lab/testbed", one, other)
			}
		}
	}
}

func TestOnlyKernelTalksNetlink(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module)
		never := netlink
		if below(path, "bpf") || path == "lab/floor" {
			never = netlinkOnly
		}
		for _, i := range p.Imports {
			if slices.ContainsFunc(never, func(f string) bool { return strings.HasPrefix(i, f) }) && !below(path, "kernel") {
				t.Errorf("%s imports %s: only packages below kernel do, and rooms of bpf and lab/floor load programs", path, i)
			}
		}
	}
}

// libraries are the packages below kernel that use a netlink library where its calls suffice; others use
// kernel/netlink.
var libraries = []string{"kernel/conntrack", "kernel/link", "kernel/netns"}

func TestOneNetlinkSocket(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module)
		for _, i := range p.Imports {
			if strings.HasPrefix(i, "github.com/vishvananda/netlink") && !slices.Contains(libraries, path) {
				t.Errorf("%s imports %s: requests, dumps and notifications go through kernel/netlink", path, i)
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

// mostShared is how much of a plane may stand in another one too, in percent.
const mostShared = 5

// run is how many lines in a row make a copy.
const run = 6

// TestPlanesShareFewLines: what two planes have in common belongs to a package that both use.
func TestPlanesShareFewLines(t *testing.T) {
	planes := map[string][][]string{}
	for _, p := range packages(t) {
		if name, is := strings.CutPrefix(p.ImportPath, module+"dataplane/service/"); is && !slices.Contains(kits, name) {
			planes[name] = linesOf(t, p)
		}
	}
	if len(planes) < 5 {
		t.Errorf("%d planes: are they elsewhere?", len(planes))
	}
	for a, of := range planes {
		for b, other := range planes {
			if total, copied := shared(of, other); a != b && copied*100 >= mostShared*total && total <= count(other) {
				t.Errorf("%d of %s's %d lines stand in %s too, in runs of %d", copied, a, total, b, run)
			}
		}
	}
}

// kits are packages below dataplane/service that are no planes.
var kits = []string{"servicetest"}

// linesOf returns the lines of a package's files without tests, imports, and lines that say nothing by themselves.
func linesOf(t *testing.T, p listed) (files [][]string) {
	t.Helper()
	for _, name := range p.GoFiles {
		b, err := os.ReadFile(filepath.Join(p.Dir, name))
		if err != nil {
			t.Fatal(err)
		}
		var l []string
		for line := range strings.Lines(imports.ReplaceAllString(string(b), "")) {
			if line = strings.TrimSpace(line); meaningful.MatchString(line) && !slices.Contains(trivial, line) {
				l = append(l, line)
			}
		}
		files = append(files, l)
	}
	return files
}

var (
	imports    = regexp.MustCompile(`(?s)^.*?\nimport (\(.*?\n\)|[^\n]*")\n`)
	meaningful = regexp.MustCompile(`[A-Za-z0-9]`)
)

var trivial = []string{"return err", "return nil", "return nil, err", "if err != nil {", "default:", "continue"}

func count(files [][]string) (n int) {
	for _, l := range files {
		n += len(l)
	}
	return n
}

// shared returns how many lines there are in files, and how many of them stand in runs that others have too.
func shared(files, others [][]string) (total, copied int) {
	known := map[string]bool{}
	for _, l := range others {
		for i := range max(0, len(l)-run+1) {
			known[strings.Join(l[i:i+run], "\n")] = true
		}
	}
	for _, l := range files {
		behind := 0 // the last line that was counted
		for i := range max(0, len(l)-run+1) {
			if known[strings.Join(l[i:i+run], "\n")] {
				copied += i + run - max(i, behind)
				behind = i + run
			}
		}
	}
	return count(files), copied
}

// TestUnitTestsHaveEveryPurePackage wants each package with tests that don't depend on package kernel in UNIT of the
// Makefile. Those of lab/load make network namespaces by themselves.
func TestUnitTestsHaveEveryPurePackage(t *testing.T) {
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	_, unit, _ := strings.Cut(string(makefile), "\nUNIT := ")
	unit, _, _ = strings.Cut(strings.ReplaceAll(unit, "\\\n", " "), "\n")
	folders := strings.Fields(unit)
	out, err := exec.Command("go", "list", "-test", "-f", `{{.ImportPath}} {{join .Deps " "}}`, "./...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		deps := strings.Fields(line)
		path, isTest := strings.CutSuffix(deps[0], ".test")
		needsKernel := slices.ContainsFunc(deps, func(d string) bool { return below(d, module+"kernel") })
		if !isTest || needsKernel || path+"/" == module || path == module+"lab/load" {
			continue
		}
		folder := "./" + strings.TrimPrefix(path, module)
		if !slices.ContainsFunc(folders, func(f string) bool {
			all, whole := strings.CutSuffix(f, "/...")
			return f == folder || whole && below(folder, all)
		}) {
			t.Errorf("UNIT of the Makefile lacks %s, which needs no kernel: add it", folder)
		}
	}
}
