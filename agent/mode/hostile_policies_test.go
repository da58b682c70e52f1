package mode

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"runtime"
	"syscall"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/policy/ebpf"
	"fairlead.dev/fairlead/dataplane/policy/iptables"
	"fairlead.dev/fairlead/dataplane/policy/nftables"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

var tenants = flag.Int("tenants", 2, "TestHostilePoliciesAreBounded: how many namespaces have each kind of objects")

// What objects that are made to be expensive may come to: memory in use beside twice the objects' own, and processor
// time, of the resolver, and of an engine's rendering with the loop that holds it.
const (
	mostResolved, mostRendered = 80 << 20, 110 << 20
	mostTime                   = 4 * time.Second
)

// Objects within all bounds, of each kind that is made to be expensive, have neither the resolver nor an engine take
// more than a bound of memory and time; what is beyond a bound is counted, and not made.
func TestHostilePoliciesAreBounded(t *testing.T) {
	for _, s := range generate.HostileShapes {
		for _, n := range []int{1, *tenants} {
			t.Run(fmt.Sprintf("%s/%d", s.Name, n), func(t *testing.T) {
				var changes []source.Change
				bytes := 0
				for i := range n {
					for _, o := range s.Objects(i) {
						text, err := json.Marshal(o)
						if err != nil {
							t.Fatal(err)
						}
						bytes += len(text)
						changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
					}
				}
				var r *policy.Resolver
				var c model.Change[model.PolicyPart]
				u := used(func() {
					r = policy.New(policy.Config{Node: generate.PolicyNode, ImpliedNamespaces: true})
					c = r.Apply(changes)
				})
				t.Logf("%.1f MB of objects, %d parts, %d problems: %s", float64(bytes)/1e6, len(c.Put), len(r.Problems()), u)
				u.within(t, mostResolved+2*bytes)
				hold[nftables.Key](t, "nftables", &nftables.Plane{}, c)
				hold[iptables.Key](t, "iptables", &iptables.Plane{}, c)
				hold[ebpf.Key](t, "ebpf", &ebpf.Plane{}, c)
				runtime.KeepAlive(r)
			})
		}
	}
}

// usage is what something took.
type usage struct {
	live, total int64 // bytes: in use in the end, and allocated
	processor   time.Duration
}

func (u usage) String() string {
	return fmt.Sprintf("%d MB in use, %d MB allocated, %s", u.live>>20, u.total>>20, u.processor.Round(time.Millisecond))
}

func (u usage) within(t *testing.T, bytes int) {
	t.Helper()
	if u.live > int64(bytes) || u.processor > mostTime {
		t.Errorf("%s: want %d MB and %s at most", u, bytes>>20, mostTime)
	}
}

// used returns what body takes.
func used(body func()) usage {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	began := processorTime()
	body()
	processor := processorTime() - began
	runtime.GC()
	runtime.ReadMemStats(&after)
	return usage{int64(after.HeapAlloc) - int64(before.HeapAlloc), int64(after.TotalAlloc - before.TotalAlloc), processor}
}

// processorTime returns how much this process has used.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// onPaper is a plane that writes nothing.
type onPaper[K dataplane.Key] struct {
	dataplane.Plane[model.PolicyPart, K, string]
	wrote func(facts int)
}

func (onPaper[K]) Read(context.Context) ([]dataplane.Fact[K, string], error) { return nil, nil }

func (p onPaper[K]) Write(_ context.Context, put, _ []dataplane.Fact[K, string]) error {
	p.wrote(len(put))
	return nil
}

// hold has a loop hold what an engine makes of a change, and checks what that takes when all of it is being written.
func hold[K dataplane.Key](t *testing.T, name string, p dataplane.Plane[model.PolicyPart, K, string],
	c model.Change[model.PolicyPart]) {
	ctx, stop := context.WithCancel(t.Context())
	writing, resume, ended := make(chan int), make(chan bool), make(chan error)
	l := reconcile.New(onPaper[K]{p, func(facts int) {
		select {
		case writing <- facts:
			<-resume
		case <-resume:
		}
	}}, reconcile.Options[model.PolicyPart]{Owner: model.PolicyOwnerOf, Label: model.PolicyLabelOf, MaxFacts: PolicyFacts,
		StandIns: model.FailClosed, Weight: func(model.PolicyPart) int { return 0 }})
	put, facts := c.Put, 0
	u := used(func() {
		if name == "iptables" {
			put = new(iptables.Join).Apply(c).Put
		}
		l.Change(put, nil)
		go func() { ended <- l.Run(ctx) }()
		facts = <-writing
	})
	close(resume)
	if err := l.Sync(ctx); err != nil {
		t.Error(err)
	}
	stop()
	<-ended
	t.Logf("%s: %d facts: %s", name, facts, u)
	u.within(t, mostRendered)
}
