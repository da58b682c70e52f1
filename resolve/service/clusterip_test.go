package service

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

func serviceCIDR(name string, cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
}

func TestServiceRanges(t *testing.T) {
	foreign := svc(named("other"), clusterIPs("10.96.0.9"), labelled(proxyNameLabel, "mesh"))
	many := objects(serviceCIDR("a", "10.96.0.0/16"))
	for i := range mostForeign + 1 {
		many = append(many, svc(named(fmt.Sprint("f", i)), clusterIPs(fmt.Sprintf("10.96.1.%d", i+1)),
			labelled(proxyNameLabel, "mesh")))
	}
	wide := make([]string, mostServiceCIDRs+1)
	for i := range wide {
		wide[i] = fmt.Sprintf("10.%d.0.0/24", i)
	}
	for _, c := range []struct {
		name    string
		config  Config
		objects []source.Object
		want    []string
		reasons []string
	}{
		{"none", n1, objects(svc()), nil, nil},
		{"both families", n1, objects(serviceCIDR("a", "10.96.0.0/12", "fd96::/112")),
			lines("10.96.0.0-10.111.255.255", "fd96::-fd96::ffff"), nil},
		{"several, one in another", n1, objects(serviceCIDR("a", "10.96.0.0/24"), serviceCIDR("b", "10.96.0.128/25"),
			serviceCIDR("c", "10.98.0.0/24")),
			lines("10.96.0.0-10.96.0.255", "10.98.0.0-10.98.0.255"), nil},
		{"a Service of another proxy", n1, objects(serviceCIDR("a", "10.96.0.0/24"), foreign),
			lines("10.96.0.0-10.96.0.8", "10.96.0.10-10.96.0.255"), nil},
		{"at the ends", n1, objects(serviceCIDR("a", "10.96.0.8/31", "10.96.0.10/32"), foreign,
			svc(named("third"), clusterIPs("10.96.0.10"),
				labelled(proxyNameLabel, "x"))), lines("10.96.0.8-10.96.0.8"), nil},
		{"this proxy has a name", Config{Node: "n1", ProxyName: "mesh"}, objects(serviceCIDR("a", "10.96.0.0/24")), nil, nil},
		{"too many of other proxies", n1, many, nil, lines("TooManyForeignServices")},
		{"too many", n1, objects(serviceCIDR("a", wide...)), nil, lines("TooManyServiceCIDRs")},
		{"holds pods", Config{Node: "n1", ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.4.0/24")}},
			objects(serviceCIDR("a", "10.96.0.0/16", "10.97.0.0/31")),
			lines("10.97.0.0-10.97.0.1"), lines("ServiceCIDROverlaps")},
		{"holds this node", Config{Node: "n1", Addresses: []netip.Addr{netip.MustParseAddr("10.96.4.1")}},
			objects(serviceCIDR("a", "10.96.0.0/16")),
			nil, lines("ServiceCIDROverlaps")},
		{"unusable", n1, objects(serviceCIDR("a", "0.0.0.0/0", "224.0.0.0/16", "x")),
			nil, lines("UnusableRange", "UnusableRange", "InvalidRange")},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := resolved(c.config, c.objects...)
			var got, reasons []string
			for _, s := range r.Services().ServiceNode.ServiceRanges {
				got = append(got, s.String())
			}
			for _, p := range r.Problems() {
				reasons = append(reasons, p.Reason)
			}
			if c.name == "too many" {
				same(t, "ranges", len(got), mostServiceCIDRs)
			} else {
				same(t, "ranges", got, c.want)
			}
			same(t, "problems", reasons, c.reasons)
		})
	}
}

func TestServiceRangesCostNoService(t *testing.T) {
	r := resolved(n1, node(), svc(), eps(ep("10.0.0.1")), serviceCIDR("a", "10.96.0.0/24"))
	d := r.Apply(puts(serviceCIDR("a", "10.97.0.0/24")))
	same(t, "put", partNames(d.Services.Put), lines("node"))
	d = r.Apply(puts(svc(named("other"), clusterIPs("10.97.0.9"), labelled(proxyNameLabel, "mesh"))))
	same(t, "put", partNames(d.Services.Put), lines("node"))
	d = r.Apply(dels(svc(named("other"))))
	same(t, "put", partNames(d.Services.Put), lines("node"))
	same(t, "ranges", r.Services().ServiceNode.ServiceRanges,
		[]model.Range{rangeOf(netip.MustParsePrefix("10.97.0.0/24"))})
}

func TestClusterIPs(t *testing.T) {
	for _, c := range []struct {
		name    string
		config  Config
		objects []source.Object
		want    []string
	}{
		{"both families", n1, objects(svc(clusterIPs("10.96.0.1", "fd96::1"))),
			lines("10.96.0.1 shop/web", "fd96::1 shop/web")},
		{"no other addresses", n1,
			objects(svc(externalIPs("192.0.2.1"), ingress("192.0.2.2"), nodePort(30080))), lines("10.96.0.1 shop/web")},
		{"of the older", n1, objects(svc(born(2)), svc(named("other"), born(1))), lines("10.96.0.1 shop/other")},
		{"headless", n1, objects(svc(clusterIPs("None"))), nil},
		{"of another proxy", n1, objects(svc(labelled(proxyNameLabel, "mesh"))), nil},
		{"of ours", Config{Node: "n1", ProxyName: "mesh"},
			objects(svc(labelled(proxyNameLabel, "mesh"))), lines("10.96.0.1 shop/web")},
		{"no port served", n1, objects(svc(ports(sport("http", 0)))), nil},
		{"a port that the plane can't serve", Config{Node: "n1",
			Capabilities: model.Capabilities{Unserved: []model.Remark{{Text: "no", About: &model.Packets{}}}}},
			objects(svc()), lines("10.96.0.1 shop/web")},
		{"beyond its bounds", Config{Node: "n1", Limits: Limits{Total: Bounds{Frontends: 1}}},
			objects(svc(ports(sport("a", 1), sport("b", 2)))), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			all := resolved(c.config, c.objects...).Services().ClusterIPs
			for _, a := range slices.SortedFunc(maps.Keys(all), netip.Addr.Compare) {
				got = append(got, fmt.Sprintf("%s %s", all[a].Addr, all[a].Owner))
			}
			same(t, "ClusterIPs", got, c.want)
		})
	}
}

func TestClusterIPGoesWithItsLastService(t *testing.T) {
	a, b := svc(named("a"), born(1)), svc(named("b"), born(2))
	r := resolved(n1, a, b)
	d := r.Apply(dels(b))
	same(t, "put", partNames(d.Services.Put), nil)
	d = r.Apply(puts(svc(named("a"), born(1),
		spec(func(s *corev1.ServiceSpec) { s.Ports[0].Port = 81 }))))
	if slices.Contains(partNames(d.Services.Put), "10.96.0.1") || slices.Contains(partNames(d.Services.Del), "10.96.0.1") {
		t.Errorf("another port changes the ClusterIP: %v, %v", partNames(d.Services.Put), partNames(d.Services.Del))
	}
	d = r.Apply(dels(a))
	same(t, "the first to go", partNames(d.Services.Del)[0], "10.96.0.1")
}
