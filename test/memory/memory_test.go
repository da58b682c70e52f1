// Package memory_test holds what an agent's line has in memory to a table, by what made it: the source that reads the
// API, the resolvers and the loops, of two clusters. The kernel and the planes' handles are not part of it.
package memory_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net/http/httptest"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	policyplane "fairlead.dev/fairlead/dataplane/policy/nftables"
	serviceplane "fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

var accept = flag.Bool("accept", false, "write the table, and that of the documentation, as measured: "+
	"make memory-accept")

// The table, and the page with the same between two marks.
const (
	table = "testdata/memory.json"
	page  = "../../docs/measurements/memory.md"
	begin = "<!-- make memory-accept -->\n"
	end   = "<!-- end -->\n"
)

// The share of a kind, and of the whole, that a kind may have more than the table says. The second is for maps, whose
// size depends on a random seed.
const (
	tolerance = 0.03
	noise     = 0.005
)

func init() { runtime.MemProfileRate = 1 } // before anything is allocated that counts

// cluster is one of those that are measured.
type cluster struct {
	name    string
	objects func() []source.Object
	options kube.Options
}

var clusters = []cluster{
	{"10,000 Services × 10 endpoints", func() []source.Object { return generate.Cluster(10_000, 10) },
		kube.Options{Node: "a"}},
	{"10,000 pods × 7,500 NetworkPolicies", func() []source.Object {
		return generate.NewPolicyCluster(generate.PolicySize{Pods: 10_000, Namespaces: 2_500, Here: 110,
			Cluster: 20}).Objects
	}, kube.Options{Node: generate.PolicyNode, Nodes: true, Kinds: []source.Kind{source.Namespace, source.Pod,
		source.NetworkPolicy, source.ClusterNetworkPolicy}}},
}

// kinds are bytes of the live heap, by what made them.
type kinds map[string]int

// TestLiveHeap fails where the line has more of a kind of memory than the table says.
func TestLiveHeap(t *testing.T) {
	want, got := map[string]kinds{}, map[string]kinds{}
	if b, err := os.ReadFile(table); err == nil {
		if err := json.Unmarshal(b, &want); err != nil {
			t.Fatal(err)
		}
	} else if !*accept {
		t.Fatal(err)
	}
	for _, c := range clusters {
		k := measure(t, c)
		if got[c.name] = k.folded(); *accept {
			continue
		}
		for _, of := range compare(want[c.name], k) {
			t.Errorf("%s: %s; where it must be, make memory-accept writes the table", c.name, of)
		}
	}
	if *accept {
		write(t, got)
	}
}

// rest is the kind of all that the table doesn't name.
const rest = "all else"

// compare returns what is beyond the table.
func compare(want, got kinds) (beyond []string) {
	whole, others, largest := want.sum(), 0, ""
	check := func(kind string, bytes int, remark string) {
		if most := float64(want[kind])*(1+tolerance) + noise*float64(whole); float64(bytes) > most {
			beyond = append(beyond, fmt.Sprintf("%s has %d bytes, %d in the table%s", kind, bytes, want[kind], remark))
		}
	}
	for _, k := range slices.Sorted(maps.Keys(got)) {
		if _, there := want[k]; there {
			check(k, got[k], "")
			continue
		}
		if others += got[k]; got[k] > got[largest] {
			largest = k
		}
	}
	check(rest, others, ", of which "+largest+" has most")
	if n := got.sum(); float64(n) > float64(whole)*(1+tolerance) {
		beyond = append(beyond, fmt.Sprintf("all have %d bytes, %d in the table", n, whole))
	}
	return beyond
}

func (k kinds) sum() (n int) {
	for _, bytes := range k {
		n += bytes
	}
	return n
}

func TestCompareNamesTheKind(t *testing.T) {
	want := kinds{"a": 1_000_000, "b": 1_000_000}
	for _, c := range []struct {
		got    kinds
		beyond []string
	}{
		{kinds{"a": 1_030_000, "b": 900_000}, nil},
		{kinds{"a": 1_050_000, "b": 900_000}, []string{"a has 1050000 bytes, 1000000 in the table"}},
		{kinds{"a": 900_000, "c": 4_000, "d": 6_000}, nil},
		{kinds{"a": 900_000, "c": 4_000, "d": 7_000},
			[]string{"all else has 11000 bytes, 0 in the table, of which d has most"}},
		{kinds{"a": 1_035_000, "b": 1_035_000}, []string{"all have 2070000 bytes, 2000000 in the table"}},
	} {
		if got := compare(want, c.got); !slices.Equal(got, c.beyond) {
			t.Errorf("%v: %q, want %q", c.got, got, c.beyond)
		}
	}
}

// line is what an agent has in memory: its resolvers and loops, without a kernel.
type line struct {
	services *service.Resolver
	policies *policy.Resolver
	serves   *reconcile.Loop[model.ServicePart, serviceplane.Key, string]
	enforces *reconcile.Loop[model.PolicyPart, policyplane.Key, string]
}

// apply passes a batch down the line.
func (l *line) apply(b source.Batch) {
	if b.Waiting {
		l.services.Observe(b.Changes)
		if l.policies != nil {
			l.policies.Observe(b.Changes)
		}
		return
	}
	d := l.services.Apply(b.Changes)
	l.serves.Change(d.Services.Put, d.Services.Del)
	if l.policies == nil {
		l.enforces.Change(nil, nil)
		return
	}
	if len(b.Unlisted) > 0 {
		l.policies.Observe(b.Changes)
		return
	}
	c := l.policies.Apply(b.Changes)
	l.enforces.Change(c.Put, c.Del)
}

// unwritten is a plane of a kernel that takes everything.
type unwritten[T any, K dataplane.Key] struct {
	dataplane.Plane[T, K, string]
}

func (unwritten[T, K]) Read(context.Context) ([]dataplane.Fact[K, string], error) { return nil, nil }

func (unwritten[T, K]) Write(context.Context, []dataplane.Fact[K, string], []dataplane.Fact[K, string]) error {
	return nil
}

// measure returns the live heap of an agent's line that has read a cluster.
func measure(t *testing.T, c cluster) kinds {
	server := httptest.NewServer(apiserver.New(c.objects()...))
	defer server.Close()
	l := &line{services: service.New(service.Config{Node: c.options.Node, Capabilities: serviceplane.Capabilities}),
		serves: reconcile.New(unwritten[model.ServicePart, serviceplane.Key]{&serviceplane.Plane{}},
			reconcile.Options[model.ServicePart]{Owner: model.OwnerOf, Label: model.LabelOf})}
	if c.options.Kinds != nil {
		l.policies = policy.New(policy.Config{Node: c.options.Node})
	}
	l.enforces = reconcile.New(unwritten[model.PolicyPart, policyplane.Key]{&policyplane.Plane{}},
		reconcile.Options[model.PolicyPart]{Owner: model.PolicyOwnerOf, Label: model.PolicyLabelOf})
	ctx, stop := context.WithCancel(t.Context())
	whole, ended := make(chan struct{}), make(chan error, 3)
	go func() { ended <- l.serves.Run(ctx) }()
	go func() { ended <- l.enforces.Run(ctx) }()
	c.options.Master = server.URL
	go func() {
		ended <- kube.New(c.options).Run(ctx, func(b source.Batch) {
			if l.apply(b); !b.Waiting && len(b.Unlisted) == 0 && whole != nil {
				close(whole)
				whole = nil
			}
		})
	}()
	defer func() {
		stop()
		for range cap(ended) {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	}()
	select {
	case <-whole:
	case <-time.After(5 * time.Minute): // of a machine under load
		t.Fatal("the cluster was not read within five minutes")
	}
	for _, sync := range []func(context.Context) error{l.serves.Sync, l.enforces.Sync} {
		if err := sync(ctx); err != nil {
			t.Fatal(err)
		}
	}
	runtime.GC()
	runtime.GC() // the profile is of the collection before
	k := liveHeap()
	runtime.KeepAlive(l)
	return k
}

// liveHeap returns what is in use of the heap.
func liveHeap() kinds {
	records := make([]runtime.MemProfileRecord, 10_000)
	n, ok := runtime.MemProfile(records, false)
	for !ok {
		records = make([]runtime.MemProfileRecord, 2*n)
		n, ok = runtime.MemProfile(records, false)
	}
	k := kinds{}
	for _, r := range records[:n] {
		if kind := kindOf(r.Stack()); kind != "" {
			k[kind] += int(r.InUseBytes())
		}
	}
	return k
}

// folded returns k with the small kinds as one.
func (k kinds) folded() kinds {
	out, whole := kinds{}, k.sum()
	for kind, bytes := range k {
		if float64(bytes) < noise*float64(whole) {
			kind = rest
		}
		out[kind] += bytes
	}
	return out
}

const module = "fairlead.dev/fairlead/"

var instance = regexp.MustCompile(`\[.*\]|\.func\d.*$|-range\d+$`)

// kindOf returns the function of the line that made what has this stack, "" for what is none's: of the server, and of
// libraries and tests.
func kindOf(stack []uintptr) (kind string) {
	frames := runtime.CallersFrames(stack)
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		name, ours := strings.CutPrefix(f.Function, module)
		switch {
		case strings.HasPrefix(name, "sandbox/"):
			return ""
		case ours && kind == "" && !strings.HasPrefix(name, "test/"):
			kind = instance.ReplaceAllString(name, "")
		case kind == "" && strings.Contains(f.Function, "watch.(*StreamWatcher).receive"):
			kind = "source/kube, as decoded" // of which the resolvers hold strings
		}
	}
	return kind
}

// write writes the table, and that of the documentation.
func write(t *testing.T, got map[string]kinds) {
	b, err := json.MarshalIndent(got, "", "\t")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(table, append(b, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, tail, ok := bytes.Cut(text, []byte(begin))
	_, after, also := bytes.Cut(tail, []byte(end))
	if !ok || !also {
		t.Fatalf("%s has no marks %q and %q", page, begin, end)
	}
	text = slices.Concat(before, []byte(begin+document(got)+end), after)
	if err := os.WriteFile(page, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// named is how many kinds of each cluster the documentation names.
const named = 12

// document returns the table as the documentation has it.
func document(got map[string]kinds) string {
	var b strings.Builder
	for _, c := range clusters {
		k := maps.Clone(got[c.name])
		others := k.sum()
		fmt.Fprintf(&b, "\n%s: %.1f MiB\n\n| MiB | made by |\n|---|---|\n", c.name, mib(others))
		delete(k, rest)
		for _, name := range slices.SortedFunc(maps.Keys(k), func(x, y string) int {
			return cmp.Or(cmp.Compare(k[y], k[x]), cmp.Compare(x, y))
		})[:min(named, len(k))] {
			fmt.Fprintf(&b, "| %.1f | `%s` |\n", mib(k[name]), name)
			others -= k[name]
		}
		fmt.Fprintf(&b, "| %.1f | others |\n", mib(others))
	}
	return b.String() + "\n"
}

func mib(bytes int) float64 { return float64(bytes) / (1 << 20) }
