package classic

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
)

// small returns n Services of two endpoints each, every third with a node port.
func small(n int) *Cluster {
	c := &Cluster{Pods: netip.MustParsePrefix("10.128.0.0/9"), Node: []netip.Addr{netip.MustParseAddr("172.18.0.2")}}
	for i := range n {
		s := Service{Name: fmt.Sprintf("ns/s%d:http", i), Protocol: model.TCP,
			Address: netip.AddrFrom4([4]byte{10, 96, 0, byte(i)}), Port: 80}
		if i%3 == 0 {
			s.NodePort = uint16(30000 + i)
		}
		for j := range 2 {
			s.Endpoints = append(s.Endpoints, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 128, byte(i), byte(j + 1)}), 8080))
		}
		c.Services = append(c.Services, s)
	}
	return c
}

// Names that kube-proxy gave, from dumps in Kubernetes' issues and documents.
func TestNamesAreKubeProxys(t *testing.T) {
	s := Service{Name: "default/kubernetes:https", Protocol: model.TCP}
	dns := Service{Name: "kube-system/kube-dns:dns", Protocol: model.UDP}
	svc1 := Service{Name: "ns1/svc1:p80", Protocol: model.TCP}
	for got, want := range map[string]string{
		s.chain("SVC"):            "KUBE-SVC-NPX46M4PTMTKRN6Y",
		dns.chain("SVC"):          "KUBE-SVC-TCOU7JCQXEZGVUNU",
		s.nftChain("service"):     "service-2QRHZV4L-default/kubernetes/tcp/https",
		svc1.nftChain("external"): "external-ULMVA6XW-ns1/svc1/tcp/p80",
		svc1.nftEndpoint(netip.MustParseAddrPort("10.180.0.1:80")): "endpoint-5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80",
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

// saved returns the kernel's rules without counters, comments and order of tables.
func saved(t *testing.T, r *Rules) []string {
	t.Helper()
	name, args := "iptables-"+string(r.Variant)+"-save", []string(nil)
	if r.Layout == NFTables {
		name, args = "nft", []string{"-s", "list", "ruleset"}
	}
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v: %s", name, err, out)
	}
	var l []string
	for line := range strings.Lines(string(out)) {
		if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, ":") {
			l = append(l, strings.TrimSpace(line))
		}
	}
	slices.Sort(l)
	return l
}

func TestKernelAcceptsLayouts(t *testing.T) {
	for _, c := range []struct {
		Layout
		Variant
	}{{IPTables19, Legacy}, {IPTables19, NFT}, {IPTables, Legacy}, {IPTables, NFT}, {NFTables, NFT}} {
		t.Run(fmt.Sprint(c.Layout, " ", c.Variant), func(t *testing.T) {
			netnstest.Do(t, func() { live(t, c.Layout, c.Variant) })
		})
	}
}

// twoPods are on one node; each policy lets one client in.
func twoPods() *Calico {
	client := func(i byte) []netip.Addr { return []netip.Addr{netip.AddrFrom4([4]byte{10, 66, 0, i})} }
	return &Calico{Pool: netip.MustParsePrefix("10.64.0.0/10"), Pods: []Pod{
		{Name: "default/a", Addr: netip.MustParseAddr("10.65.0.1"), Port: 80, Policies: [][]netip.Addr{client(1), client(2)}},
		{Name: "default/b", Addr: netip.MustParseAddr("10.65.0.2"), Port: 80}}}
}

func TestKernelAcceptsCalicoRules(t *testing.T) {
	for _, v := range []Variant{Legacy, NFT} {
		t.Run(string(v), func(t *testing.T) {
			netnstest.Do(t, func() {
				if err := twoPods().Install(context.Background(), v); err != nil {
					t.Error(err)
					return
				}
				l := saved(t, &Rules{Variant: v})
				var written int
				for line := range strings.Lines(twoPods().Text()) {
					if strings.HasPrefix(line, "-A ") {
						written++
					}
				}
				l = slices.DeleteFunc(l, func(s string) bool { return !strings.HasPrefix(s, "-A ") })
				if len(l) != written {
					t.Errorf("of %d rules the kernel has %d:\n%s", written, len(l), strings.Join(l, "\n"))
				}
			})
		})
	}
}

// Every pod's chains are come to by one way.
func TestCalicoDispatch(t *testing.T) {
	c := &Calico{Pool: netip.MustParsePrefix("10.64.0.0/10")}
	for i := range 40 {
		c.Pods = append(c.Pods, Pod{Name: fmt.Sprintf("default/pod-%d", i)})
	}
	for _, p := range c.Pods {
		if d := p.Device(); len(d) != 15 || !strings.HasPrefix(d, "cali") {
			t.Errorf("%s has device %s", p.Name, d)
		}
	}
	text := c.Text()
	for _, p := range c.Pods {
		if strings.Count(text, "-i "+p.Device()+" -g cali-fw-"+p.Device()+"\n") != 1 ||
			strings.Count(text, "-o "+p.Device()+" -g cali-tw-"+p.Device()+"\n") != 1 {
			t.Errorf("%s is led to not just once:\n%s", p.Device(), text)
		}
	}
}

// live installs and resyncs, which changes nothing.
func live(t *testing.T, l Layout, v Variant) {
	ctx := context.Background()
	must := func(err error) {
		if err != nil {
			t.Error(err)
			runtime.Goexit()
		}
	}
	r, err := Install(ctx, l, v, small(4))
	must(err)
	before := saved(t, r)
	if !strings.Contains(strings.Join(before, "\n"), "10.128.3.2") {
		t.Errorf("the last endpoint has no rule:\n%s", strings.Join(before, "\n"))
	}
	must(r.Resync(ctx))
	if again := saved(t, r); !slices.Equal(before, again) {
		t.Errorf("a resync changed rules:\n%s\n\n%s", strings.Join(before, "\n"), strings.Join(again, "\n"))
	}
}

func TestFromParts(t *testing.T) {
	pool := &model.Pool{Name: "p", Backends: []model.Backend{{Addr: netip.MustParseAddrPort("10.128.0.1:8080")}}}
	target := model.Target{Pool: pool}
	front := func(name, via, addr string, port uint16) *model.Frontend {
		return &model.Frontend{Service: name, Via: via, Entry: model.Entry{Addr: netip.MustParseAddr(addr), Port: port,
			Protocol: model.TCP}, Internal: target, External: target}
	}
	c := FromParts([]model.ServicePart{
		&model.ServiceNode{Node: &model.Node{Addresses: []netip.Addr{netip.MustParseAddr("172.18.0.2"),
			netip.MustParseAddr("fd00::2")}, Pods: []netip.Prefix{netip.MustParsePrefix("10.128.0.0/24")}}},
		pool, front("ns/b:http", "ClusterIP", "10.96.0.2", 80), front("ns/a:http", "ClusterIP", "10.96.0.1", 80),
		front("ns/a:http", "NodePort", "0.0.0.0", 30080), front("ns/a:http", "ClusterIP", "fd00:96::1", 80)})
	if len(c.Services) != 2 || c.Services[0].Name != "ns/a:http" || c.Services[0].NodePort != 30080 ||
		c.Services[1].NodePort != 0 ||
		len(c.Services[0].Endpoints) != 1 || c.Pods.Bits() != 24 || len(c.Node) != 1 {
		t.Errorf("%+v", c)
	}
}
