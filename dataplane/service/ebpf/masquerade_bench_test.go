package ebpf_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"slices"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/network/masquerade"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
)

// arms are what masquerades; direct is nothing, and the server knows a way back to the pod.
type arms struct {
	*testing.B
	tables  *masquerade.Plane
	devices *masquerade.DevicePlane
}

// BenchmarkMasquerade measures new connections of a pod out of the cluster on a node in mode ebpf: masqueraded by
// programs at devices and by nf_tables, against not masqueraded at all, in interleaved blocks of one run.
func BenchmarkMasquerade(b *testing.B) {
	inside(b, func(o ebpf.Options) {
		o.PodNetwork = true
		here, err := netns.Current()
		if err != nil {
			b.Fatal(err)
		}
		defer here.Close()
		client, wire := netnstest.New(b), netnstest.New(b)
		plugBoth(b, here, client, wire)
		p := opened(b, o)
		defer clean(b, p)
		change(b, p, nil, []model.ServicePart{theNode})
		a := &arms{B: b}
		if a.tables, err = masquerade.New(); err != nil {
			b.Fatal(err)
		}
		defer a.tables.Close()
		if a.devices, err = masquerade.NewDevice(); err != nil {
			b.Fatal(err)
		}
		defer a.devices.Close()
		ctx, stop := context.WithCancel(context.Background())
		defer stop()
		if err := wire.Do(func() error { serveAll(b, ctx, 80); return nil }); err != nil {
			b.Fatal(err)
		}
		root, err := cgroup.Root()
		if err != nil {
			b.Fatal(err)
		}
		ratios := map[string][]float64{}
		measure := func(arm string) (ns float64) {
			undo := a.begin(arm)
			defer undo()
			to := func() netip.AddrPort { return addrPort("203.0.113.9:80") }
			if err := client.Do(func() error { block(b, root, 20, to); ns = block(b, root, 300, to); return nil }); err != nil {
				b.Fatal(err)
			}
			return ns
		}
		for range max(21, b.N) {
			ns := map[string]float64{}
			order := []string{"direct", "devices", "nf_tables", "again"}
			rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
			for _, arm := range order {
				ns[arm] = measure(arm)
			}
			for _, arm := range []string{"devices", "nf_tables", "again"} {
				ratios[arm] = append(ratios[arm], ns[arm]/ns["direct"])
			}
		}
		for arm, l := range ratios {
			slices.Sort(l)
			b.ReportMetric(l[len(l)/2], arm+"/direct")
		}
	})
}

// plugBoth connects a pod and what is beyond with the node.
func plugBoth(b *testing.B, node, client, wire *netns.Namespace) {
	l, err := link.Dial(node)
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	for name, ns := range map[string]*netns.Namespace{"a": client, "out": wire} {
		if _, err := l.AddVeth(link.End{Name: name}, link.End{Name: "eth0"}, ns); err != nil {
			b.Fatal(err)
		}
	}
	for ns, script := range map[*netns.Namespace]string{
		node: `sysctl -qw net.ipv4.ip_forward=1; ip link set dev a up; ip link set dev out up; ip route add 10.244.1.1 dev a
			ip addr add 10.244.1.254/32 dev a; ip addr add 192.168.9.1/24 dev out; ip route add default via 192.168.9.2`,
		client: `ip link set lo up; ip link set eth0 up; ip addr add 10.244.1.1/32 dev eth0
			ip route add default via 10.244.1.254 dev eth0 onlink`,
		wire: `ip link set lo up; ip link set eth0 up; ip addr add 192.168.9.2/24 dev eth0
			ip addr add 203.0.113.9/32 dev lo; ip route add 10.244.1.1 via 192.168.9.1`,
	} {
		if err := ns.Do(func() error {
			out, err := exec.Command("sh", "-ec", script).CombinedOutput()
			if err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
			return err
		}); err != nil {
			b.Fatal(err)
		}
	}
}

// begin has an arm masquerade until undo.
func (a *arms) begin(arm string) (undo func()) {
	n := &model.Network{Node: "a", Ranges: prefixes("10.244.1.0/24"), Masquerade: &model.Masquerade{}}
	switch arm {
	case "devices":
		return written(a.B, a.devices, n)
	case "nf_tables":
		return written(a.B, a.tables, n)
	}
	return func() {}
}

// written writes a part's facts, and removes them when it is undone.
func written[K dataplane.Key, V comparable](b *testing.B, p dataplane.Plane[model.NetworkPart, K, V],
	part model.NetworkPart) (undo func()) {
	facts := p.Render(part)
	if err := p.Write(b.Context(), facts, nil); err != nil {
		b.Fatal(err)
	}
	return func() {
		if err := p.Write(b.Context(), nil, facts); err != nil {
			b.Fatal(err)
		}
	}
}
