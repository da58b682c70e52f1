package nftables

import (
	"context"
	"encoding/binary"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/dataplane/nft"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/nflog"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// inNamespace returns a plane in a namespace without devices.
func inNamespace(t *testing.T) *network {
	n := &network{T: t, of: map[netip.Addr]*netns.Namespace{}}
	n.node = n.namespace(nil)
	n.open()
	return n
}

// everything returns parts of every shape, in both families.
func everything() (l []model.PolicyPart) {
	a, pre := netip.MustParseAddr, netip.MustParsePrefix
	l = append(l, &model.PolicyNode{Addresses: addresses("192.168.0.1", "fd99::1"), Unknown: model.VerdictDrop,
		Pods:    []netip.Prefix{pre("10.0.0.0/9"), pre("10.0.1.0/24"), pre("fd00:1::/64"), pre("fd00:1::/65")},
		PreDNAT: []netip.Prefix{pre("10.96.0.0/12"), pre("0.0.0.0/32"), pre("255.255.255.255/32"), pre("fd96::/112")}})
	id := uint64(1 << 60)
	next := func() uint64 { id++; return id }
	table := func(v model.Verdict, report bool) *model.PeerTable {
		p := &model.PeerTable{ID: next(), Otherwise: model.Decision{Verdict: v, Report: report}}
		l = append(l, p)
		return p
	}
	accept, drop := table(model.VerdictAccept, true), table(model.VerdictDrop, false)
	pass := table(model.VerdictNext, true)
	ports := &model.Ruleset{ID: next(), Default: model.PortEntry{PeerTable: drop}}
	for _, p := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		for _, span := range [][2]uint16{{0, 0}, {1, 79}, {80, 80}, {81, 65534}, {65535, 65535}} {
			ports.Ports = append(ports.Ports, model.PortEntry{Protocol: p, First: span[0], Last: span[1], PeerTable: accept})
		}
	}
	whole := &model.Ruleset{ID: ^uint64(0), Default: model.PortEntry{PeerTable: pass}, Ports: []model.PortEntry{
		{Protocol: model.TCP, Last: 65535, PeerTable: drop}, {Protocol: 255, First: 1, Last: 65535, PeerTable: drop}}}
	l = append(l, ports, whole,
		&model.Subject{Addr: a("10.0.1.2"), Out: [2]*model.Ruleset{ports, whole}, In: [2]*model.Ruleset{whole, nil}},
		&model.Subject{Addr: a("fd00:1::2"), In: [2]*model.Ruleset{nil, ports}}, &model.Subject{Addr: a("fd00:1::3")})
	for _, r := range []string{"0.0.0.0-9.255.255.255", "10.0.0.0-10.0.1.0", "10.0.1.1-10.0.1.7", "10.0.1.2-10.0.1.2",
		"128.0.0.0-255.255.255.255", "::-fcff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fd00:1::2-fd00:1::2",
		"fd00::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"} {
		first, last, _ := strings.Cut(r, "-")
		peer := &model.Peer{Range: model.Range{First: a(first), Last: a(last)}, Identity: &model.Identity{ID: next()}}
		l = append(l, peer, &model.PeerVerdict{PeerTable: drop, Identity: peer.Identity}, &model.PeerVerdict{PeerTable: pass,
			Identity: peer.Identity, Decision: model.Decision{Verdict: model.VerdictNext}})
	}
	return l
}

func TestKernelReturnsWhatIsWritten(t *testing.T) {
	n := inNamespace(t)
	all, none := facts(t, n.Plane, everything()), map[Key]Fact{}
	frame := map[Key]Fact{}
	for k, f := range all {
		if k.Kind != nft.KindElement {
			frame[k] = f
		}
	}
	move(t, n.Plane, none, all)
	list := func(args ...string) string {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var out []byte
		n.must(n.node.Do(func() (err error) {
			out, err = exec.CommandContext(ctx, "nft", args...).CombinedOutput()
			return err
		}))
		return string(out)
	}
	if text := list("list", "table", "inet", Table); !strings.Contains(text, "policy accept") {
		t.Errorf("nft list: %s", text)
	}
	move(t, n.Plane, all, frame) // of ranges that touch, each by itself
	move(t, n.Plane, frame, all)
	again := slices.Collect(maps.Values(all))
	n.must(n.Write(t.Context(), again, again)) // anew, since the table is replaced
	if missing, extra := read(t, n.Plane, all); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
	list("add", "table", "inet", "others")
	n.must(n.Clean(t.Context()))
	n.must(n.Clean(t.Context()))
	if missing, extra := read(t, n.Plane, none); len(missing)+len(extra) > 0 {
		t.Errorf("after clean: %v", extra)
	}
	if rest := list("list", "ruleset"); strings.TrimSpace(rest) != "table inet others {\n}" {
		t.Errorf("after clean: %s", rest)
	}
}

func TestRenderIsPure(t *testing.T) {
	p := &Plane{}
	a, b := facts(t, p, everything()), facts(t, p, everything())
	if d := append(difference(a, b), difference(b, a)...); len(d) > 0 {
		t.Errorf("equal parts differ: %v", d)
	}
	names, objects := worlds(t)
	for _, name := range names {
		a, b := facts(t, p, decide(objects[name]).parts()), facts(t, p, decide(objects[name]).parts())
		if d := append(difference(a, b), difference(b, a)...); len(d) > 0 {
			t.Errorf("%s: equal parts differ: %v", name, d)
		}
	}
}

func TestUnservedIsRefused(t *testing.T) {
	n := inNamespace(t)
	for _, part := range []model.PolicyPart{&model.PolicyNode{CutMark: 1 << 31},
		&model.Subject{Addr: own[0], Device: "veth0"}} {
		err := n.Write(t.Context(), n.Render(part), nil)
		if err == nil || !strings.Contains(err.Error(), "not supported") {
			t.Errorf("%+v: %v", part, err)
		}
		if l, err := n.Read(t.Context()); len(l) > 0 || err != nil {
			t.Errorf("%+v: written: %v, %v", part, l, err)
		}
	}
}

func TestLabelChangeTouchesItsPeerOnly(t *testing.T) {
	n := inNamespace(t)
	_, objects := worlds(t)
	d := decide(objects["selector-on-port.yaml"])
	before := facts(t, n.Plane, d.parts())
	move(t, n.Plane, map[Key]Fact{}, before)
	for _, o := range objects["selector-on-port.yaml"] {
		if source.KeyOf(o).Name == "client" {
			pod := o.(*corev1.Pod).DeepCopy()
			pod.Labels = map[string]string{"app": "other"}
			d.apply(pod)
		}
	}
	after := facts(t, n.Plane, d.parts())
	put, del := difference(after, before), difference(before, after)
	for _, f := range append(slices.Clone(put), del...) {
		switch f.Key.Name {
		case "peer4", "peer6", setDecision:
		default:
			t.Errorf("%v changes", f.Key)
		}
	}
	if len(put) > 0 || len(del) != 3 {
		t.Errorf("put %v, del %v: want two peers and a decision gone", put, del)
	}
	move(t, n.Plane, before, after)
}

func TestEstablishedConnectionsGoOn(t *testing.T) {
	n := newNetwork(t)
	_, objects := worlds(t)
	open := facts(t, n.Plane, decide(objects["none.yaml"]).parts())
	move(t, n.Plane, map[Key]Fact{}, open)
	client, web := behind[2], behind[0]
	var flows []*echo.Flow
	for i := range client {
		for _, to := range []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 80, Protocol: model.UDP}} {
			n.must(n.of[client[i]].Do(func() error {
				f, err := echo.Open(t.Context(), to.Protocol, netip.AddrPortFrom(web[i], to.Number), echo.Options{})
				flows = append(flows, f)
				return err
			}))
		}
	}
	request := func() {
		t.Helper()
		for _, f := range flows {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			if _, err := f.Request(ctx); err != nil {
				t.Error(err)
			}
		}
	}
	request()
	move(t, n.Plane, open, facts(t, n.Plane, decide(objects["deny-ingress.yaml"]).parts()))
	request()
	for _, f := range flows {
		f.Close()
	}
	if n.passes(n.packet(client[0], web[0], served[0]), false) {
		t.Error("a new connection passes")
	}
}

// ping sends an echo request and reports whether it is answered.
func (n *network) ping(src, dst netip.Addr, wait time.Duration) (answered bool) {
	network, kind, reply := "ip4:icmp", byte(8), byte(0)
	if dst.Is6() {
		network, kind, reply = "ip6:ipv6-icmp", 128, 129
	}
	n.must(n.of[src].Do(func() error {
		c, err := net.DialIP(network, &net.IPAddr{IP: src.AsSlice()}, &net.IPAddr{IP: dst.AsSlice()})
		if err != nil {
			return err
		}
		defer c.Close()
		id := uint16(n.port.Add(1)) // not that of a known connection
		request := []byte{kind, 0, 0, 0, byte(id >> 8), byte(id), 0, 0}
		if dst.Is4() {
			binary.BigEndian.PutUint16(request[2:], ^(uint16(kind)<<8 + id))
		}
		if _, err := c.Write(request); err != nil {
			return err
		}
		c.SetReadDeadline(time.Now().Add(wait))
		for b := make([]byte, 200); ; {
			k, _, err := c.ReadFrom(b)
			if err != nil {
				return nil
			}
			if answered = k > 0 && b[0] == reply; answered {
				return nil
			}
		}
	}))
	return answered
}

func TestOtherProtocolsFollowTheDefault(t *testing.T) {
	n := newNetwork(t)
	_, objects := worlds(t)
	held := map[Key]Fact{}
	for _, world := range []string{"none.yaml", "selector-on-port.yaml", "ip-block.yaml"} {
		d := decide(objects[world])
		wanted := facts(t, n.Plane, d.parts())
		move(t, n.Plane, held, wanted)
		held = wanted
		for i, web := range behind[0] {
			for _, src := range []netip.Addr{own[i], behind[1][i], behind[2][i], addresses("198.51.100.7", "2001:db8::7")[i]} {
				p := verdict.Packet{Src: netip.AddrPortFrom(src, 0), Dst: netip.AddrPortFrom(web, 0), Protocol: 1}
				expected, wait := verdict.Policy(d.now, p).Verdict == model.VerdictAccept, 150*time.Millisecond
				if expected {
					wait = 5 * time.Second
				}
				if n.ping(src, web, wait) != expected {
					t.Errorf("%s: ping %s > %s: expected %v", world, src, web, expected)
				}
			}
		}
	}
}

func TestDenialsAndAuditsAreLogged(t *testing.T) {
	n := newNetwork(t)
	_, objects := worlds(t)
	var log *nflog.Log
	n.must(n.node.Do(func() (err error) {
		log, err = nflog.Listen(LogGroup)
		return err
	}))
	defer log.Close()
	held := map[Key]Fact{}
	for world, want := range map[string][]string{"none.yaml": nil, "deny-ingress.yaml": {PrefixDeny},
		"audit.yaml": {PrefixAudit, PrefixAudit}} {
		d := decide(objects[world])
		wanted := facts(t, n.Plane, d.parts())
		move(t, n.Plane, held, wanted)
		held = wanted
		p := n.packet(behind[2][1], behind[0][1], served[0])
		n.passes(p, verdict.Policy(d.now, p).Verdict == model.VerdictAccept)
		entries, err := log.Receive()
		n.must(err)
		var got []string
		for _, e := range entries {
			got = append(got, e.Prefix)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: logged %q, want %q", world, got, want)
		}
	}
}
