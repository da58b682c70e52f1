package policy

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	resolve "fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/source"
)

// Before a source has said what is listed, nothing is decided of policies, whatever else changes: an empty state would
// open what an agent before has closed.
func TestNothingIsDecidedBeforeTheFirstList(t *testing.T) {
	engine, err := mode.EngineOf("nftables")
	if err != nil {
		t.Fatal(err)
	}
	err = netnstest.New(t).Do(func() error {
		p, err := Open(Options{Engine: engine, Resolve: resolve.Config{Node: "a"}}, false, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		learned := []source.Change{source.Resolved("example.com", []netip.Addr{netip.MustParseAddr("192.0.2.1")})}
		var d model.Delta
		if p.Decide(subsystem.Update{Names: learned}, &d); !d.Empty() || p.undecided() == "" {
			t.Errorf("decided before the first list: %d parts", len(d.Policies.Put))
		}
		unlisted := subsystem.Update{Batch: true, Unlisted: []source.Kind{source.Pod}}
		if p.Decide(unlisted, &d); !d.Empty() || !p.Readiness().Undecided {
			t.Errorf("decided without Pods: %d parts, %+v", len(d.Policies.Put), p.Readiness())
		}
		sent := &inspect.Decided{Services: &model.Snapshot{}}
		if p.Decided(sent); sent.Services.Policies != nil || sent.Undecided != "not read yet: Pod" {
			t.Errorf("commands are sent %+v, and that it is undecided by %q", sent.Services.Policies, sent.Undecided)
		}
		if p.Decide(subsystem.Update{Batch: true}, &d); d.Empty() || p.Readiness().Undecided {
			t.Errorf("not decided with all listed: %d parts, %+v", len(d.Policies.Put), p.Readiness())
		}
		return p.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// routes are the devices that lead to pods, as they come.
type routes chan []resolve.Device

// Follow implements Devices.
func (r routes) Follow(ctx context.Context, notify func([]resolve.Device)) error {
	for {
		select {
		case l := <-r:
			notify(l)
		case <-ctx.Done():
			return nil
		}
	}
}

// agent is a subsystem.Host of one subsystem.
type agent struct {
	p     *Policies
	ctx   context.Context
	ended *sync.WaitGroup
	done  chan model.Delta
}

func (a agent) Go(_ string, run func(context.Context) error) { a.ended.Go(func() { run(a.ctx) }) }
func (a agent) LogProblems()                                 {}
func (a agent) Report()                                      {}
func (a agent) Apply(u subsystem.Update) {
	var d model.Delta
	a.p.Decide(u, &d)
	a.done <- d
}

// An agent that starts decides no policies before it knows by which devices pods are reached, however late: any source
// would pass meanwhile, and what an agent before has written would be rewritten twice.
func TestSourcesAreCheckedFromTheFirst(t *testing.T) {
	engine, err := mode.EngineOf("nftables")
	if err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec: corev1.PodSpec{NodeName: "a"}, Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}}}
	at := netip.MustParseAddr("10.0.0.1")
	devices := make(routes)
	err = netnstest.New(t).Do(func() error {
		p, err := Open(Options{Engine: engine, Devices: devices,
			Resolve: resolve.Config{Node: "a", ImpliedNamespaces: true}}, false,
			slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		ctx, stop := context.WithCancel(t.Context())
		var ended sync.WaitGroup
		host := agent{p, ctx, &ended, make(chan model.Delta)}
		began := make(chan struct{})
		go func() { p.Start(host); close(began) }()
		var d model.Delta
		changes := []source.Change{{Key: source.KeyOf(pod), Object: pod}}
		if p.Decide(subsystem.Update{Batch: true, Changes: changes}, &d); !d.Empty() || !p.Readiness().Undecided ||
			p.undecided() != "not read yet: the routes to pods" {
			t.Errorf("without devices, %d parts are decided, and undecided is %q", len(d.Policies.Put), p.undecided())
		}
		select {
		case <-began:
			t.Error("the source is read before devices are known")
		case <-time.After(100 * time.Millisecond): // no more can be seen of what doesn't happen
		}
		devices <- []resolve.Device{{Name: "veth0", Peer: true, Hosts: []netip.Addr{at}}}
		d = <-host.done
		<-began
		checked := slices.ContainsFunc(d.Policies.Put, func(x model.PolicyPart) bool {
			s, ok := x.(*model.Subject)
			return ok && s.Addr == at && s.Device == "veth0"
		})
		if !checked || p.Readiness().Undecided {
			t.Errorf("with devices: %d parts, the pod's source is checked: %v", len(d.Policies.Put), checked)
		}
		stop()
		ended.Wait()
		return p.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// rejected is a loop that can't write what all parts need: the kernel rejects it.
type rejected struct {
	reconcile.Runner[model.PolicyPart]
}

func (rejected) Serving() (bool, string) { return false, "refused" }

// Policies that are not enforced cut no pod off that runs.
func TestPodsRunWithoutPolicies(t *testing.T) {
	p := &Policies{plane: &mode.PolicyPlane{Runner: rejected{}}, awaited: awaited{known: make(chan struct{})}}
	close(p.known)
	if r := p.Readiness(); r != (subsystem.Readiness{Why: "policies are not enforced: refused"}) {
		t.Errorf("%+v", r)
	}
}
