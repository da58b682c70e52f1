package advise

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/labtest"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/stats"
	"fairlead.dev/fairlead/lab/testbed"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// option returns a measured candidate: times in µs of a new connection and of one into a pod (0: none), the verdict on
// both against the current one, and ms of a change.
func option(c Candidate, crr, in float64, v stats.Verdict, change float64) Option {
	near := func(x float64) stats.Estimate {
		return stats.Estimate{Value: x, CI: stats.Interval{Low: 0.95 * x, High: 1.05 * x}, N: 20, Sure: true}
	}
	o := Option{Candidate: c, Current: v == "", Figures: []Figure{
		{ID: connection, Title: titles[connection], Unit: "µs", Value: near(crr * 1e3)},
		{ID: upkeep, Title: titles[upkeep], Unit: "ms", Value: near(change * 1e6)}}}
	if in > 0 {
		o.Figures = append(o.Figures, Figure{ID: incoming, Title: titles[incoming], Unit: "µs", Value: near(in * 1e3)})
	}
	for i, f := range o.Figures {
		if v != "" && f.ID != upkeep {
			over := near(f.Value.Value / 100e3)
			o.Figures[i].Over, o.Figures[i].Verdict = &over, v
		}
	}
	return o
}

func TestDecide(t *testing.T) {
	nft, ebpf, ipt := Candidate{Mode: "nftables"}, Candidate{Mode: "ebpf"}, Candidate{Mode: "iptables"}
	both, mixed, tables := Candidate{"nftables", "nftables"}, Candidate{"ebpf", "ebpf"}, Candidate{"iptables", "iptables"}
	lacking := func(o Option) Option {
		o.Lacks = []string{"Service a/b: SCTP"}
		return o
	}
	for _, tt := range []struct {
		name      string
		perSecond float64
		options   []Option
		want      Candidate
		outcome   Outcome
	}{
		{"10 Services without policies: nothing tells them apart", 0.1, []Option{option(ipt, 100, 0, "", 3),
			option(nft, 99, 0, stats.Same, 0.6), option(ebpf, 100.5, 0, stats.Same, 0.5)}, ipt, Same},
		{"10 Services without policies: ebpf is faster", 0.1, []Option{option(nft, 100, 0, "", 0.6),
			option(ipt, 101, 0, stats.Same, 3), option(ebpf, 87, 0, stats.Lower, 0.5)}, ebpf, Better},
		{"5,000 Services with heavy churn: iptables' upkeep", 20, []Option{option(ipt, 100, 0, "", 60),
			option(nft, 100, 0, stats.Same, 0.6), option(ebpf, 101, 0, stats.Same, 0.4)}, ebpf, Better},
		{"5,000 Services at rest: the upkeep is no reason", 0.01, []Option{option(ipt, 100, 0, "", 60),
			option(nft, 100, 0, stats.Same, 0.6)}, ipt, Same},
		{"5,000 Services with heavy churn: faster, but dearer", 20, []Option{option(nft, 100, 0, "", 0.6),
			option(ipt, 90, 0, stats.Lower, 60)}, nft, Same},
		{"500 policies: the engine without connection tracking", 1, []Option{option(both, 100, 100, "", 0.6),
			option(tables, 104, 104, stats.Higher, 20), option(mixed, 88, 92, stats.Lower, 0.5)}, mixed, Better},
		{"500 policies: too wide to tell", 1, []Option{option(both, 100, 100, "", 0.6),
			option(mixed, 90, 95, stats.Unclear, 0.5)}, both, Unclear},
		{"the best lacks what the cluster uses", 1, []Option{option(nft, 100, 0, "", 0.6),
			lacking(option(ebpf, 80, 0, stats.Lower, 0.5))}, nft, Same},
		{"the current one lacks it", 1, []Option{lacking(option(ebpf, 80, 0, "", 0.5)),
			option(nft, 100, 0, stats.Higher, 0.6), option(ipt, 120, 0, stats.Higher, 3)}, nft, Unfit},
		{"the current one can't run here", 1, []Option{{Candidate: ipt, Current: true, Cannot: "no tools"},
			option(nft, 100, 0, stats.Unclear, 0.6)}, nft, Unfit},
		{"none can", 1, []Option{{Candidate: ipt, Current: true, Cannot: "no tools"}}, ipt, None},
	} {
		a := Decide(tt.options, tt.perSecond)
		if a.Recommended != tt.want || a.Outcome != tt.outcome {
			t.Errorf("%s: %v, %s; want %v, %s", tt.name, a.Recommended, a.Outcome, tt.want, tt.outcome)
		}
		if n := len(a.Commands()); (n > 0) != (a.Recommended != a.Current) {
			t.Errorf("%s: %d commands", tt.name, n)
		}
		if l := a.Sentences(); a.Against != nil && len(l) != 4 && tt.outcome != Unfit || l[0] == "" {
			if _, second := a.Against.figure(incoming); second || len(l) != 3 { // none of these has a round trip
				t.Errorf("%s: %q", tt.name, l)
			}
		}
	}
}

func policy(namespace, name, app string, types ...networkingv1.PolicyType) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	p.Spec.PodSelector.MatchLabels = map[string]string{"app": app}
	p.Spec.PolicyTypes = types
	return p
}

func pod(name, app, node, ip string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, Labels: map[string]string{"app": app}}}
	p.Spec.NodeName, p.Status.PodIP = node, ip
	return p
}

func TestTransplant(t *testing.T) {
	here := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Labels: map[string]string{"zone": "z"}}}
	same := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"}}
	same.Spec.ClusterIP = generate.ServiceAddress(generate.MaxServices - 1).String()
	objects := append(generate.Cluster(100, 3)[1:], here, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, same,
		pod("p", "x", "w1", "10.9.0.1"), pod("q", "y", "w1", "10.9.0.2"), pod("r", "y", "a", "10.9.0.3"),
		pod("taken", "y", "w1", testbed.ServerPod.String()),
		policy("n", "one", "y", networkingv1.PolicyTypeIngress), policy("n", "two", "y"), policy("n", "three", "x"),
		policy("other", "four", "y"))
	c := Transplant(objects, "w1", true)
	want := Sizes{Services: 100 - probes, Endpoints: 3 * (100 - probes - 1), Policies: 4, Pods: 3, Local: 2,
		Selecting: 2}
	if c.Sizes != want || len(c.Remarks) > 0 {
		t.Errorf("%+v, want %+v; %q", c.Sizes, want, c.Remarks)
	}
	served := map[string]int{}
	for _, o := range c.Objects {
		if s, ok := o.(*corev1.Service); ok {
			served[s.Spec.ClusterIP]++
		}
	}
	for _, e := range c.entries {
		if served[e.Addr().String()] != 1 {
			t.Errorf("%d Services have the address %s, to which one connects", served[e.Addr().String()], e)
		}
	}
	if served[same.Spec.ClusterIP] != 1 || len(c.entries) != probes {
		t.Errorf("%d Services are connected to, %d have %s", len(c.entries), served[same.Spec.ClusterIP], same.Spec.ClusterIP)
	}
	keys := map[source.Key]source.Object{}
	for _, o := range c.Objects {
		if keys[source.KeyOf(o)] != nil {
			t.Errorf("%s is there twice", source.KeyOf(o))
		}
		keys[source.KeyOf(o)] = o
	}
	n, _ := keys[source.Key{Kind: source.Node, Name: testbed.NodeName}].(*corev1.Node)
	if n == nil || n.Labels["zone"] != "z" || n.Status.Addresses[0].Address != testbed.NodeAddr.String() {
		t.Errorf("the node: %+v", n)
	}
	probe := keys[source.Key{Kind: source.Pod, Namespace: "n", Name: "fairlead-advise"}].(*corev1.Pod)
	if probe.Labels["app"] != "y" || probe.Status.PodIP != testbed.ServerPod.String() {
		t.Errorf("the pod that is measured: %+v", probe)
	}
	r := keys[source.Key{Kind: source.Pod, Namespace: "n", Name: "r"}].(*corev1.Pod)
	if r.Spec.NodeName != others {
		t.Errorf("a pod of another node called as the testbed's is on %s", r.Spec.NodeName)
	}
	rule := keys[source.Key{Kind: source.NetworkPolicy, Namespace: "n", Name: "fairlead-advise"}]
	if p := rule.(*networkingv1.NetworkPolicy); !slices.Equal(p.Spec.PolicyTypes,
		[]networkingv1.PolicyType{networkingv1.PolicyTypeIngress}) {
		t.Errorf("what is measured is allowed in %v: none restricts egress", p.Spec.PolicyTypes)
	}
	if here.Name != "w1" || objects[len(objects)-6].(*corev1.Pod).Spec.NodeName != "a" {
		t.Error("the cluster's own objects were changed")
	}
	if c := Transplant(objects, "w1", false); c.Sizes.Policies+c.Sizes.Pods > 0 {
		t.Errorf("without policies: %+v", c.Sizes)
	}
}

// What a cluster uses and a mode doesn't support is named, and what none supports is not.
func TestLacks(t *testing.T) {
	objects := generate.Cluster(3, 2)
	s := objects[1].(*corev1.Service)
	s.Annotations = map[string]string{"fairlead.dev/scheduler": "least-connections"}
	objects[3].(*corev1.Service).Annotations = map[string]string{"fairlead.dev/scheduler": "Nonsense"}
	l, err := Lacks(objects, resolve.Config{Node: "a"}, mode.Options{}, mode.Names())
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(l["nftables"], " "); !strings.Contains(got, s.Name) {
		t.Errorf("nftables lacks %q", got)
	}
	for name, lacks := range l {
		if text := strings.Join(lacks, " "); strings.Contains(text, "Nonsense") || name == "ipvs" && len(lacks) > 0 {
			t.Errorf("%s lacks %q", name, text)
		}
	}
	if d := Differences(Candidate{Mode: "nftables"}, Candidate{Mode: "userspace"}); !slices.ContainsFunc(d,
		func(c Changed) bool { return strings.HasPrefix(c.Text, "Connections run through the agent") && !c.Goes }) {
		t.Errorf("from nftables to userspace: %+v", d)
	}
}

func TestCandidates(t *testing.T) {
	modes, engines := []string{"nftables", "iptables", "userspace", "ebpf"}, []string{"nftables", "ebpf"}
	got := candidates(modes, engines, Candidate{"iptables", "ebpf"})
	want := []Candidate{{"iptables", "ebpf"}, {"nftables", "nftables"}, {"iptables", "nftables"},
		{"userspace", "nftables"}, {"ebpf", "ebpf"}, {"ebpf", "nftables"}, {"nftables", "ebpf"}}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := candidates(modes, nil, Candidate{Mode: "ipvs"}); len(got) != 4 || got[0].Mode != "nftables" {
		t.Errorf("without policies: %v", got)
	}
}

func TestForeignHooks(t *testing.T) {
	got := foreign([]device.Hook{{Function: "nft_do_chain_inet", Table: "fairlead", Chain: "prerouting"},
		{Function: "nft_do_chain_ipv4", Table: "filter", Chain: "FORWARD"}, {Function: "ipt_do_table", Table: "raw"}})
	if want := []string{"table ip filter chain FORWARD", "iptables' table raw"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	c := Config{Cluster: &Cluster{}, NoFastPath: true}
	if l := newTrial(c, true).flags(Candidate{Mode: "ebpf"}); !slices.Equal(l, []string{"--ebpf-fast-path", "Never"}) {
		t.Errorf("flags %q", l)
	}
}

// Real agents serve a cluster's objects, real packets are measured, and the page is written.
func TestRun(t *testing.T) {
	objects := generate.Cluster(40, 3)
	q := Request{Config: Config{Cluster: Transplant(objects, "a", false), Current: Candidate{Mode: "nftables"},
		Time: 6 * time.Second}, PerSecond: 1, Objects: objects, Resolve: resolve.Config{Node: "a"}}
	var html bytes.Buffer
	q.Report = func(dir string, a Advice) error {
		return report.WriteAdvice(&html, dir, report.Advice{Title: "T", Answer: a.Sentences(), Rows: a.Table(),
			Sections: []report.Section{{Title: "Changes", List: a.Changed()}}})
	}
	o := experiment.Options{Seed: 1, Agent: []string{os.Args[0]}, Output: io.Discard}
	a, err := Run(t.Context(), q, o)
	if err != nil {
		t.Fatal(err)
	}
	measured := 0
	for _, x := range a.Options {
		if f, ok := x.figure(connection); ok && x.Cannot == "" {
			measured++
			if u, _ := x.figure(upkeep); f.Value.Value < 1e3 || f.Value.Value > 1e8 || u.Value.Value <= 0 {
				t.Errorf("%s: a connection takes %v ns, a change %v ns", x.Candidate, f.Value.Value, u.Value.Value)
			}
			if x.Current == (f.Over != nil) {
				t.Errorf("%s: its ratio to the current one is %v", x.Candidate, f.Over)
			}
		}
	}
	if measured < 3 || len(a.Sentences()) != 4 || a.Outcome == Unfit {
		t.Errorf("%d candidates were measured; %s: %q", measured, a.Outcome, a.Sentences())
	}
	for _, want := range []string{a.Sentences()[1][:20], "<svg", "ebpf", "All numbers"} {
		if !strings.Contains(html.String(), want) {
			t.Errorf("the page doesn't say %q", want)
		}
	}
}

// ending is a progress that ends a run when it says a word.
type ending struct {
	word string
	end  func()
}

// Write implements io.Writer.
func (e ending) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte(e.word)) {
		e.end()
	}
	return len(b), nil
}

// An interrupted run says that it was interrupted, whatever it was doing, and nothing is left.
func TestInterrupted(t *testing.T) {
	objects := generate.Cluster(3, 2)
	q := Request{Config: Config{Cluster: Transplant(objects, "a", false), Current: Candidate{Mode: "nftables"}},
		PerSecond: 1, Objects: objects, Resolve: resolve.Config{Node: "a"}}
	for name, c := range map[string]struct {
		planned, within time.Duration
		word            string // of the progress, which ends the run; "": none does
		want            error
	}{
		"before it begins":  {time.Second, -1, "", context.DeadlineExceeded},
		"too little time":   {time.Hour, 10 * time.Minute, "", experiment.ErrNoTime},
		"at the first step": {time.Second, time.Hour, "writing the cluster", context.Canceled},
		"at a round":        {time.Second, time.Hour, "measuring, round", context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, end := context.WithTimeout(t.Context(), c.within)
			defer end()
			q, o := q, experiment.Options{Seed: 1, Agent: []string{os.Args[0]}, Output: io.Discard}
			q.Time = c.planned
			if c.word != "" {
				o.Output = ending{c.word, end}
			}
			if _, err := Run(ctx, q, o); !errors.Is(err, ErrInterrupted) || !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
			if l, err := testbed.Leftovers(); err != nil || len(l) > 0 {
				t.Errorf("left over: %q, %v", l, err)
			}
		})
	}
}

// A ratio that looks clear and is not said to be has its reason.
func TestUnclearRatioHasItsReason(t *testing.T) {
	now := option(Candidate{Mode: "nftables"}, 100, 0, "", 1)
	other := option(Candidate{Mode: "ebpf"}, 80, 0, stats.Unclear, 1)
	other.Figures[0].Resolution = 0.174
	text := strings.Join(Decide([]Option{now, other}, 1).Sentences(), " ")
	if want := "too little for this run to tell apart, since it resolves ±17 %."; !strings.Contains(text, want) {
		t.Errorf("%q lacks %q", text, want)
	}
}

// What changes between two modes is said once.
func TestDifferencesAreSaidOnce(t *testing.T) {
	for _, a := range mode.Names() {
		for _, b := range mode.Names() {
			seen := map[Changed]bool{}
			for _, c := range Differences(Candidate{Mode: a}, Candidate{Mode: b}) {
				if seen[c] {
					t.Errorf("%s to %s: twice: %s", a, b, c.Text)
				}
				seen[c] = true
			}
		}
	}
}
