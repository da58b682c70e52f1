package conformance

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	resolve "fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/verdict"
)

// forgedPort is where every host of the cast receives what this sends.
const forgedPort = 7654

// Forged has pods, and the one outside, send packets with sources that are drawn: their own and others', bare and
// inside the overlay's encapsulation, whole and in fragments, to pods and nodes. What arrives must be what
// verdict.Sources admits.
func Forged(t *testing.T, s Implementation, packets int) {
	seed := seedOf(t)
	w, err := newTestbed(t.Context(), s, Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.close(); err != nil {
			t.Error(err)
		}
	})
	f := &forger{generator: newGenerator(seed), w: w, sources: map[string]verdict.Sources{}}
	for _, n := range nodes {
		f.sources[n] = f.sourcesOf(n)
	}
	if err := errors.Join(w.sync(t.Context()), f.listen()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.close)
	counts := map[string]int{}
	for i := range packets {
		d := f.draw(fmt.Sprint("packet ", i))
		counts[fmt.Sprint(d.why)]++
		if err := f.send(d); err != nil {
			t.Fatalf("%s: %v", d, err)
		}
		if err := f.settle(t.Context(), d); err != nil {
			t.Fatalf("%s=%d: after %s: %v", SeedVariable, seed, d, err)
		}
		if arrived := f.arrived(d.text); arrived != (d.why == "") {
			t.Errorf("%s=%d: %s: arrived %t\n%s", SeedVariable, seed, d, arrived, w.dump(d.enters))
		}
	}
	t.Logf("%s=%d: %d packets, by the reason why they are dropped: %v", SeedVariable, seed, packets, counts)
	if counts[""] < packets/20 || packets-counts[""] < packets/20 {
		t.Errorf("of %d packets %d should arrive: the test tells nothing", packets, counts[""])
	}
}

// forger draws and sends packets.
type forger struct {
	generator
	w       *testbed
	sources map[string]verdict.Sources // by node
	ended   sync.WaitGroup
	conns   []net.PacketConn

	mu   sync.Mutex
	here map[string]bool // texts that arrived
}

// sourcesOf returns who may send what by which device on a node.
func (f *forger) sourcesOf(node string) verdict.Sources {
	s := verdict.Sources{Own: f.w.addresses[node]}
	for _, d := range f.w.devices[node] {
		if d.Name != uplink {
			s.Pods = append(s.Pods, d.Hosts...)
		}
	}
	if f.w.network != nil {
		s.Network = f.w.network.nodes[slices.Index(nodes, node)].Decided()
	}
	return s
}

// forged is one packet.
type forged struct {
	text     string
	from     *member
	enters   string // the node
	src, dst netip.Addr
	inner    *forged // in the overlay's encapsulation; nil: none
	vni      uint32
	pieces   int    // 1: whole
	why      string // it must not arrive; "": it must
}

// String returns text such as `client-a sends fd00::1 → fd00::2`.
func (d *forged) String() string {
	s := fmt.Sprintf("%s → %s", d.src, d.dst)
	if d.inner != nil {
		s += fmt.Sprintf(" in %d pieces, VNI %d, with %s", d.pieces, d.vni, d.inner)
	}
	if d.from != nil {
		s = fmt.Sprintf("%s sends by node %s %s", d.from.Name, d.enters, s)
	}
	if d.why != "" {
		s += ": " + d.why
	}
	return s
}

// receiver returns the final destination.
func (d *forged) receiver() netip.Addr {
	if d.inner != nil {
		return d.inner.dst
	}
	return d.dst
}

// draw draws a packet and says whether it arrives.
func (f *forger) draw(text string) *forged {
	six := f.chance(40)
	senders := []*member{memberNamed("outside")}
	var pods []*member
	for i := range topology {
		if m := &topology[i]; m.Node != "" && !m.isNode() && !m.Host {
			pods, senders = append(pods, m), append(senders, m)
		}
	}
	d := &forged{text: text, from: one(f.generator, senders...), pieces: 1, vni: resolve.DefaultVNI}
	to := one(f.generator, slices.DeleteFunc(pods, func(m *member) bool { return m == d.from })...) // not to itself
	if d.enters = d.from.Node; d.enters == "" {
		d.enters = to.Node // what a node passes on of others is another matter
	}
	if f.sources[d.enters].Network != nil && f.chance(50) {
		f.encapsulate(d, to, six)
	} else {
		if d.dst = to.addr(six); f.chance(25) {
			d.dst = memberNamed("node-" + to.Node).addr(six)
		}
		d.src = f.source(d, six)
	}
	d.why = f.judge(d)
	return d
}

// source draws a source: the sender's own as often as not.
func (f *forger) source(d *forged, six bool) netip.Addr {
	if f.chance(40) {
		return d.from.addr(six)
	}
	l := []netip.Addr{netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("10.244.1.200"),
		netip.MustParseAddr("2001:db8:7::9"), netip.MustParseAddr("fd00:10:244:2::200")}
	if d.from.Node != "" {
		l = append(l, netip.MustParseAddr("fe80::9"))
	}
	for i := range topology {
		if m := &topology[i]; m.Node != d.enters || !m.isNode() && !m.Host { // a node drops its own as martian
			l = append(l, m.Addrs...)
		}
	}
	return one(f.generator, slices.DeleteFunc(l, func(a netip.Addr) bool { return a.Is6() != six })...)
}

// encapsulate draws a packet of the overlay to a pod: mostly to an address of the node that it enters, or of another.
func (f *forger) encapsulate(d *forged, to *member, six bool) {
	far := map[string]string{"a": "b", "b": "a"}[d.enters]
	at := d.enters
	if d.from.Node != "" && f.chance(50) {
		at = far
	}
	d.dst = one(f.generator, slices.DeleteFunc(slices.Clone(f.w.addresses[at]), netip.Addr.Is6)...)
	if n := f.sources[at].Network.Network; n.Tunnel != nil && f.chance(60) {
		d.dst = n.Tunnel.Local
	}
	d.src = d.from.addr(false)
	if d.from.Node == "" && f.chance(60) {
		d.src = memberNamed("node-" + far).addr(false) // as a host on the wire may
	}
	if d.pieces = one(f.generator, 1, 1, 3); f.chance(10) {
		d.vni++
	}
	for _, m := range topology {
		if m.Node == at && !m.isNode() && !m.Host && f.chance(50) {
			to = &m
		}
	}
	d.inner = &forged{text: d.text, dst: to.addr(six)}
	d.inner.src = one(f.generator, memberNamed("node-"+far).addr(six), memberNamed("node-"+at).addr(six),
		memberNamed("outside").addr(six), memberNamed("client-"+far).addr(six), memberNamed("client-"+far).addr(six),
		memberNamed("client-"+far).addr(six), memberNamed("web-1").addr(six))
}

// judge returns why a packet doesn't arrive.
func (f *forger) judge(d *forged) string {
	s := f.sources[d.enters]
	a := verdict.Arrival{Src: d.src, Dst: d.dst, Overlay: d.inner != nil && d.vni == resolve.DefaultVNI}
	if d.inner != nil {
		a.Inner = d.inner.src
	}
	if d.from.Node != "" {
		for _, x := range d.from.Addrs {
			a.Pod = append(a.Pod, netip.PrefixFrom(x, x.BitLen()))
		}
	}
	why := s.Admit(a)
	if why == "" && d.inner != nil {
		switch local := slices.Contains(s.Own, d.dst); {
		case d.vni != resolve.DefaultVNI:
			return "no device has the VNI"
		case !local:
			return "it enters no tunnel here"
		case s.Network.Network.Tunnel == nil || d.dst != s.Network.Network.Tunnel.Local:
			return "no tunnel has that end"
		}
	}
	return why
}

// listen has every host of the cast receive.
func (f *forger) listen() error {
	f.here = map[string]bool{}
	for i := range topology {
		m := &topology[i]
		if m.Node == "" || m.Host {
			continue
		}
		host, err := f.w.host(m)
		if err != nil {
			return err
		}
		err = host.Do(func() error {
			for _, network := range []string{"udp4", "udp6"} {
				c, err := net.ListenPacket(network, fmt.Sprint(":", forgedPort))
				if err != nil {
					return err
				}
				f.conns = append(f.conns, c)
				f.ended.Go(func() { f.receive(c) })
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (f *forger) receive(c net.PacketConn) {
	for b := make([]byte, 4096); ; {
		n, _, err := c.ReadFrom(b)
		if err != nil {
			return // closed
		}
		text, _, _ := strings.Cut(string(b[:n]), "\n")
		f.mu.Lock()
		f.here[text] = true
		f.mu.Unlock()
	}
}

func (f *forger) close() {
	for _, c := range f.conns {
		c.Close()
	}
	f.ended.Wait()
}

func (f *forger) arrived(text string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.here[text]
}

// settle waits until a packet that was sent after d to the same receiver, with the sender's own source, has arrived,
// and d if it must: another may be on its way longer.
func (f *forger) settle(ctx context.Context, d *forged) error {
	to := d.receiver()
	honest := &forged{text: d.text + " honest", from: d.from, enters: d.enters, src: d.from.addr(to.Is6()), dst: to,
		pieces: 1}
	for end := time.Now().Add(f.w.implementation.within(patience)); ; {
		if err := f.send(honest); err != nil {
			return err
		}
		for range 20 {
			if f.arrived(honest.text) && (d.why != "" || f.arrived(d.text)) {
				return nil
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Millisecond):
			}
		}
		if time.Now().After(end) {
			if !f.arrived(honest.text) {
				return fmt.Errorf("%s: it didn't arrive", honest)
			}
			return nil // d didn't
		}
	}
}

// send sends a packet by a raw socket of its sender.
func (f *forger) send(d *forged) error {
	host, err := f.w.host(d.from)
	if err != nil {
		return err
	}
	if err := f.lead(d); err != nil {
		return err
	}
	payload := []byte(d.text + "\n" + strings.Repeat(".", 1+len(d.text)%2))
	packet := udpPacket(d.src, d.dst, 5555, forgedPort, payload)
	if d.inner != nil {
		end := f.sources[d.enters].Network.Network.Tunnel
		mac := [6]byte{2, 0x66}
		if end != nil {
			mac = end.MAC
		}
		frame := vxlanFrame(d.vni, mac, udpPacket(d.inner.src, d.inner.dst, 5555, forgedPort, payload))
		packet = udpPacket(d.src, d.dst, 5555, resolve.DefaultPort, frame)
	}
	return host.Do(func() error { return sendRaw(d.dst, fragments(packet, d.pieces)) })
}

// lead has what the one outside sends enter by the packet's node.
func (f *forger) lead(d *forged) error {
	if d.from.Node != "" || nodeOf(d.dst) != "" {
		return nil
	}
	via := memberNamed("node-" + d.enters).addr(d.dst.Is6())
	return f.w.cluster.External().Route(netip.PrefixFrom(d.dst, d.dst.BitLen()), via)
}
