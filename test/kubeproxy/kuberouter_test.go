package kubeproxy

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/kuberouter"
	"fairlead.dev/fairlead/lab/testbed"
)

// TestKubeRouter has a kube-router put policies in force for the pod of a pair: it lets through what they allow, and
// nothing else.
func TestKubeRouter(t *testing.T) {
	ctx := patience(t, 2*time.Minute)
	p, err := testbed.NewPodPair(ctx, "fl-kr")
	check(t, err)
	t.Cleanup(func() { check(t, p.Close()) })
	allowed, denied := netip.AddrPortFrom(testbed.ServerPod, experiment.PolicyPort),
		netip.AddrPortFrom(testbed.ServerPod, experiment.PolicyPort+1)
	for _, at := range []netip.AddrPort{allowed, denied} {
		listen(t, p.Pod(), at)
		if err := reach(p.Far, at); err != nil {
			t.Fatalf("without policies, to %s: %v", at, err)
		}
	}
	objects := (&experiment.PolicyGrid{Ports: 1, Peers: true}).Objects(20)
	r, sync, err := kuberouter.Start(ctx, kuberouter.Options{Binary: program(t, "KUBE_ROUTER"), Namespace: p.Near,
		Node: testbed.NodeName, Dir: t.TempDir(), Services: "10.96.0.0/12"}, objects...)
	check(t, err)
	t.Cleanup(func() { check(t, r.Close()) })
	t.Logf("synced in %v", sync)
	if err := reach(p.Far, allowed); err != nil {
		t.Errorf("to %s, which a policy allows: %v", allowed, err)
	}
	if reach(p.Far, denied) == nil {
		t.Errorf("to %s, which no policy allows: connected", denied)
	}
}

// listen accepts connections at an address of a namespace.
func listen(t *testing.T, ns *netns.Namespace, at netip.AddrPort) {
	t.Helper()
	check(t, ns.Do(func() error {
		l, err := net.Listen("tcp", at.String())
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}))
}

// reach connects from a namespace, for a second at most.
func reach(ns *netns.Namespace, to netip.AddrPort) error {
	return ns.Do(func() error {
		c, err := net.DialTimeout("tcp", to.String(), time.Second)
		if err == nil {
			c.Close()
		}
		return err
	})
}
