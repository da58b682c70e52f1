package policy

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
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

// The status page counts what commands are sent, through changes.
func TestStatusCountsWhatIsDecided(t *testing.T) {
	engine, err := mode.EngineOf("nftables")
	if err != nil {
		t.Fatal(err)
	}
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: map[string]string{"app": name}}
	}
	pod := func(name, address string) source.Object {
		return &corev1.Pod{ObjectMeta: meta(name), Spec: corev1.PodSpec{NodeName: "a"},
			Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: address}}}}
	}
	database := metav1.LabelSelector{MatchLabels: map[string]string{"app": "db"}}
	policy := &networkingv1.NetworkPolicy{ObjectMeta: meta("db"), Spec: networkingv1.NetworkPolicySpec{
		PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
		Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{
			{PodSelector: &database}, {IPBlock: &networkingv1.IPBlock{CIDR: "192.0.2.0/24"}}}}}}}
	err = netnstest.New(t).Do(func() error {
		p, err := Open(Options{Engine: engine, Resolve: resolve.Config{Node: "a", ImpliedNamespaces: true}}, false,
			slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		for i, changes := range [][]source.Change{
			{{Object: pod("web", "10.0.0.1")}, {Object: pod("db", "10.0.0.2")}, {Object: policy}},
			{{Object: pod("db", "10.0.0.3")}},
			{{Key: source.KeyOf(policy)}},
		} {
			for j, c := range changes {
				if c.Object != nil {
					changes[j].Key = source.KeyOf(c.Object)
				}
			}
			u, d := subsystem.Update{Batch: true, Changes: changes}, model.Delta{}
			p.Decide(u, &d)
			p.Change(u, d)
			var page subsystem.State
			sent, parts := &inspect.Decided{Services: &model.Snapshot{}}, inspect.NewPolicyParts()
			p.Status(&page)
			p.Decided(sent)
			parts.Apply(model.Change[model.PolicyPart]{Put: sent.Services.Policies.Parts()})
			if !maps.Equal(page.Policies.Parts, parts) {
				t.Errorf("change %d: the page has %v, commands are sent %v", i, page.Policies.Parts, parts)
			}
			if i == 0 && (parts["subjects"] != 2 || parts["rulesets"] == 0 || parts["peers"] < 2) {
				t.Errorf("counted are %v", parts)
			}
		}
		return p.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
}
