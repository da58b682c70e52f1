package kube_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// at returns a Service another cluster IP.
func at(s *corev1.Service, ip string) *corev1.Service {
	s.Spec.ClusterIP, s.Spec.ClusterIPs = ip, []string{ip}
	return s
}

// Objects made to harm are refused by name, and the others are served: through the API as well as from a folder.
func TestHarm(t *testing.T) {
	const own = "172.18.0.11"
	big := slice("big-1", "big")
	for i := range 1000 {
		big.Endpoints = append(big.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250)}})
	}
	quic, odd := corev1.Protocol("QUIC"), slice("odd-1", "good", "10.0.0.2")
	odd.Ports[0].Protocol = &quic
	names := slice("names-1", "good", "example.org")
	names.AddressType = discoveryv1.AddressTypeFQDN
	loop := at(service("loop", 80), "10.96.0.3")
	loop.Spec.ExternalIPs = []string{"127.0.0.1"}
	self := at(service("node", 80), "10.96.0.4")
	self.Spec.ExternalIPs = []string{own}
	a := node("a")
	a.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: own}}
	w := newFixture(t)
	w.serve(apiserver.New(a,
		at(service("good", 80), "10.96.0.1"), slice("good-1", "good", "10.0.0.1"), odd, names,
		at(service("twin", 80), "10.96.0.1"), self, loop, slice("loop-1", "loop", "127.0.0.1", "169.254.169.254", "nonsense"),
		at(service("big", 80), "10.96.0.2"), big))
	w.follow(kube.Options{})
	w.until("all is there", func() bool { return len(w.objects) == 11 })
	r := resolve.New(resolve.Config{Node: "a"})
	var changes []source.Change
	w.mu.Lock()
	for k, o := range w.objects {
		changes = append(changes, source.Change{Key: k, Object: o})
	}
	w.mu.Unlock()
	r.Apply(changes)
	var reasons []string
	for _, p := range r.Problems() {
		reasons = append(reasons, p.Object.Name+" "+p.Reason)
		if p.Message == "" || p.Object.Name == "" {
			t.Errorf("%v names no object or says nothing", p)
		}
	}
	for _, want := range []string{"twin EntryTaken", "node NodeAddress", "loop UnusableAddress", "loop-1 UnusableAddress",
		"loop-1 InvalidAddress", "odd-1 UnknownProtocol", "names-1 NameNotAddress"} {
		if !slices.Contains(reasons, want) {
			t.Errorf("%s is missing in %q", want, reasons)
		}
	}
	backends := map[netip.Addr]int{}
	for e, f := range r.Services().Frontends {
		backends[e.Addr] = len(f.Internal.Pool.Backends)
	}
	for ip, n := range map[string]int{"10.96.0.1": 1, "10.96.0.2": 1000, "10.96.0.3": 0} {
		if got, ok := backends[netip.MustParseAddr(ip)]; !ok || got != n {
			t.Errorf("%s is served by %d backends (%v), want %d", ip, got, ok, n)
		}
	}
	if _, ok := backends[netip.MustParseAddr("127.0.0.1")]; ok {
		t.Error("loopback is a Service's address")
	}
}
