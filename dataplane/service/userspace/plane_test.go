package userspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/rule"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

// stage is a client, a node with a plane, and a server, each in a network namespace and wired in a row.
type stage struct {
	testing.TB
	client, node, server *netns.Namespace
	plane                *Plane
	held                 []Fact
}

var (
	serverAddr = netip.MustParseAddr("10.2.0.2")
	nodeAddr   = netip.MustParseAddr("10.1.0.1")
	stages     atomic.Int32
)

// patience is how long something that must come is waited for.
const patience = 10 * time.Second

func newStage(t testing.TB) *stage {
	t.Helper()
	s := &stage{TB: t}
	n := stages.Add(1)
	for i, ns := range []**netns.Namespace{&s.client, &s.node, &s.server} {
		name := fmt.Sprintf("fluser%d-%d-%d", os.Getpid(), n, i)
		var err error
		if *ns, err = netns.New(name); err != nil {
			t.Fatalf("this test needs root, to make network namespaces: %v", err)
		}
		t.Cleanup(func() { s.check((*ns).Close(), netns.Delete(name)) })
		s.check(sysctl.Set(*ns, sysctl.Setting{Name: "net/ipv4/conf/all/rp_filter", Value: "0"},
			sysctl.Setting{Name: "net/ipv4/conf/default/rp_filter", Value: "0"}))
	}
	s.check(sysctl.Set(s.node, sysctl.Setting{Name: "net/ipv4/ip_forward", Value: "1"}))
	s.wire(s.client, "client", "10.1.0.2/24", "10.1.0.1/24")
	s.wire(s.server, "server", "10.2.0.2/24", "10.2.0.1/24")
	s.check(s.node.Do(func() (err error) { s.plane, err = New(); return err }))
	t.Cleanup(func() { s.check(s.plane.Close()) })
	return s
}

func (s *stage) check(errs ...error) {
	s.Helper()
	if err := errors.Join(errs...); err != nil {
		s.Fatal(err)
	}
}

// wire connects a host to the node.
func (s *stage) wire(host *netns.Namespace, name, far, near string) {
	s.Helper()
	c, err := link.Dial(host)
	s.check(err)
	defer c.Close()
	n, err := link.Dial(s.node)
	s.check(err)
	defer n.Close()
	dev, err := n.AddVeth(link.End{Name: name}, link.End{Name: "eth0"}, host)
	s.check(err)
	eth, err := c.Index("eth0")
	a, b := netip.MustParsePrefix(far), netip.MustParsePrefix(near)
	s.check(err, n.Up(1), c.Up(1), c.Up(eth), c.AddAddress(eth, a), n.AddAddress(dev, b))
	s.check(route.PutIn(host, route.Route{To: netip.MustParsePrefix("0.0.0.0/0"), Via: b.Addr(), Dev: eth}),
		c.Await(s.Context(), eth), n.Await(s.Context(), dev))
}

// apply has the plane hold what parts need, and nothing else.
func (s *stage) apply(parts ...model.ServicePart) error {
	put, wanted := []Fact{}, map[Key]string{}
	for _, p := range append([]model.ServicePart{&model.ServiceNode{Node: &model.Node{},
		NodePorts: []model.Range{{First: nodeAddr, Last: nodeAddr}}}}, parts...) {
		for _, f := range s.plane.Render(p) {
			if wanted[f.Key] == "" {
				put = append(put, f)
			}
			wanted[f.Key] = f.Value
		}
	}
	var del []Fact
	for _, f := range s.held {
		if wanted[f.Key] != f.Value {
			del = append(del, f)
		}
	}
	s.held = put
	return s.plane.Write(s.Context(), put, del)
}

// serves returns a frontend at the vip, or with node at every node's port, with its pool at the server's ports.
func serves(protocol model.Protocol, port uint16, ports ...uint16) (*model.Frontend, *model.Pool) {
	p := &model.Pool{ID: uint64(protocol), Name: "web", Protocol: protocol, Scheduler: model.RoundRobin}
	for _, n := range ports {
		p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(serverAddr, n)})
	}
	t := model.Target{Pool: p}
	return &model.Frontend{Service: "web", Via: model.ViaClusterIP,
		Entry:    model.Entry{Addr: vip, Port: port, Protocol: protocol},
		Internal: t, External: t}, p
}

// newServed returns a stage with a listener, to which the vip leads.
func newServed(t testing.TB) (*stage, *net.TCPListener) {
	t.Helper()
	s := newStage(t)
	l := s.listen(8080)
	f, p := serves(model.TCP, 80, 8080)
	s.check(s.apply(p, f))
	return s, l
}

// listen listens at the server.
func (s *stage) listen(port int) *net.TCPListener {
	s.Helper()
	var l net.Listener
	s.check(s.server.Do(func() (err error) {
		c := net.ListenConfig{}
		c.SetMultipathTCP(false)
		l, err = c.Listen(s.Context(), "tcp4", fmt.Sprintf("%s:%d", serverAddr, port))
		return err
	}))
	s.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

// dial connects the client.
func (s *stage) dial(network, to string) (c net.Conn, err error) {
	return s.dialFrom(s.client, network, to)
}

// dialFrom connects a process of a network namespace.
func (s *stage) dialFrom(from *netns.Namespace, network, to string) (c net.Conn, err error) {
	ctx, cancel := context.WithTimeout(s.Context(), patience)
	defer cancel()
	err = from.Do(func() (err error) {
		d := net.Dialer{}
		d.SetMultipathTCP(false)
		c, err = d.DialContext(ctx, network, to)
		return err
	})
	if err == nil {
		c.SetDeadline(time.Now().Add(patience))
		s.Cleanup(func() { c.Close() })
	}
	return c, err
}

// pair connects the client by the frontend to a listener of the server.
func (s *stage) pair(l *net.TCPListener) (client, server *net.TCPConn) {
	s.Helper()
	c, err := s.dial("tcp4", vip.String()+":80")
	s.check(err)
	l.SetDeadline(time.Now().Add(patience))
	d, err := l.AcceptTCP()
	s.check(err)
	d.SetDeadline(time.Now().Add(patience))
	s.Cleanup(func() { d.Close() })
	return c.(*net.TCPConn), d
}

// exchange sends text one way.
func (s *stage) exchange(from, to net.Conn, text string) {
	s.Helper()
	_, err := from.Write([]byte(text))
	b := make([]byte, len(text))
	_, err2 := io.ReadFull(to, b)
	if s.check(err, err2); string(b) != text {
		s.Fatalf("%q came as %q", text, b)
	}
}

func TestHalfCloseIsPreserved(t *testing.T) {
	s, l := newServed(t)
	client, server := s.pair(l)
	s.exchange(client, server, "question")
	s.check(client.CloseWrite())
	if b, err := io.ReadAll(server); err != nil || len(b) != 0 {
		t.Fatalf("after the client's end: %q, %v", b, err)
	}
	s.exchange(server, client, "a late answer")
	s.check(server.Close())
	if b, err := io.ReadAll(client); err != nil || len(b) != 0 {
		t.Fatalf("after the server's end: %q, %v", b, err)
	}
	s.settled()
}

// settled waits until the plane proxies nothing.
func (s *stage) settled() {
	s.Helper()
	for end := time.Now().Add(patience); s.plane.open.Load() != 0; {
		if time.Now().After(end) {
			s.Fatalf("%d file descriptors are counted when all has ended", s.plane.open.Load())
		}
		time.Sleep(time.Millisecond)
	}
}

func TestResetIsPassedOn(t *testing.T) {
	s, l := newServed(t)
	for i := range 2 {
		client, server := s.pair(l)
		ends := []*net.TCPConn{client, server}
		s.exchange(client, server, "x")
		s.check(ends[i].SetLinger(0), ends[i].Close())
		if _, err := ends[1-i].Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("one end resets, the other reads: %v", err)
		}
	}
	s.settled()
}

// Who has said much, and that it was all, and then resets, is not left behind by a backend that says nothing.
func TestResetAfterMuchIsPassedOn(t *testing.T) {
	s, l := newServed(t)
	client, server := s.pair(l)
	_, err := client.Write(make([]byte, 1<<20))
	s.check(err, client.CloseWrite())
	if b, err := io.ReadAll(server); err != nil || len(b) != 1<<20 {
		t.Fatalf("%d bytes arrive: %v", len(b), err)
	}
	s.check(client.SetLinger(0), client.Close())
	s.settled()
}

func TestBytesArriveWhateverWaits(t *testing.T) {
	s, l := newServed(t)
	client, server := s.pair(l)
	// The server does not read: the client is held up, since no buffer on the path holds more than a little.
	sent := int64(0)
	block := bytes.Repeat([]byte("0123456789abcdef"), 4096)
	client.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
	for {
		n, err := client.Write(block[sent%16:][:len(block)-16])
		if sent += int64(n); err != nil {
			break
		}
	}
	if sent > 64<<20 {
		t.Errorf("%d MiB are on their way to a server that does not read", sent>>20)
	}
	client.SetDeadline(time.Now().Add(patience))
	s.check(client.CloseWrite())
	all, err := io.ReadAll(server)
	if err != nil || int64(len(all)) != sent {
		t.Fatalf("%d of %d bytes arrive: %v", len(all), sent, err)
	}
	for i, c := range all {
		if c != block[i%16] {
			t.Fatalf("byte %d is %q", i, c)
		}
	}
}

// The node's own clients send in pieces of more than an IP packet's 64 KiB.
func TestLargeSegmentsArrive(t *testing.T) {
	s := newStage(t)
	l := s.listen(8080)
	f, p := serves(model.TCP, 80, 8080)
	six := *f
	six.Entry.Addr = netip.MustParseAddr("fd00:96::1")
	c, err := link.Dial(s.node)
	s.check(err)
	defer c.Close()
	s.check(c.AddAddress(1, netip.MustParsePrefix("fd00:1::1/128")),
		sysctl.Set(s.node, sysctl.Setting{Name: "net/ipv6/conf/all/forwarding", Value: "1"}))
	s.check(s.apply(p, f, &six))
	veth, err := c.Index(Veth)
	s.check(err)
	if n, err := c.GSO(veth); err != nil || n != maxGSOSize {
		t.Errorf("the way into the netns takes pieces of %d bytes, %v: without BIG TCP for IPv4 (Linux 6.3) this "+
			"tests nothing", n, err)
	}
	block := bytes.Repeat([]byte("0123456789abcdefg"), 1<<18) // its length is no power of two
	for _, e := range []model.Entry{f.Entry, six.Entry} {
		var client net.Conn
		s.check(s.node.Do(func() (err error) {
			client, err = net.DialTimeout("tcp", netip.AddrPortFrom(e.Addr, e.Port).String(), patience)
			return err
		}))
		server, err := l.Accept()
		s.check(err, client.SetDeadline(time.Now().Add(patience)))
		go func() {
			for range 8 {
				client.Write(block)
			}
			client.Close()
		}()
		for i := range 8 {
			got := make([]byte, len(block))
			if _, err := io.ReadFull(server, got); err != nil || !bytes.Equal(got, block) {
				t.Fatalf("%s: block %d: %v, equal: %v", e, i, err, bytes.Equal(got, block))
			}
		}
		if n, err := server.Read(make([]byte, 1)); n > 0 || err != io.EOF {
			t.Errorf("%s: in the end: %d, %v", e, n, err)
		}
		server.Close()
	}
}

// Whatever is gathered is moved in the end, with a fine clock and without.
func TestTheLastOfMuchArrives(t *testing.T) {
	for _, coarse := range []bool{false, true} {
		s, l := newServed(t)
		for _, o := range s.plane.loops {
			o.do(func() { o.coarse = o.coarse || coarse })
		}
		client, server := s.pair(l)
		client.SetDeadline(time.Now().Add(patience))
		go func() {
			for much := make([]byte, 3<<20); ; {
				if _, err := io.ReadFull(server, much); err != nil {
					server.Close()
					return
				}
				server.Write(much[:1])
			}
		}()
		for much, i := bytes.Repeat([]byte("m"), 3<<20), 0; i < 20; i++ {
			go client.Write(much)
			if _, err := io.ReadFull(client, make([]byte, 1)); err != nil {
				t.Fatalf("coarse: %v: after %d answers: %v", coarse, i, err)
			}
		}
		s.check(client.Close())
		s.settled()
	}
}

func TestRefusingBackendIsSkipped(t *testing.T) {
	s := newStage(t)
	l := s.listen(8080)
	f, p := serves(model.TCP, 80, 8079, 8080, 8081)
	s.check(s.apply(p, f))
	for range 6 {
		client, server := s.pair(l)
		s.exchange(client, server, "x")
	}
	f, p = serves(model.TCP, 80, 8079, 8081)
	s.check(s.apply(p, f))
	c, err := s.dial("tcp4", vip.String()+":80")
	if err == nil {
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("all backends refuse, and the client is told: %v", err)
	}
}

func TestConnectionsOutliveBackendAndFrontend(t *testing.T) {
	s := newStage(t)
	l, m := s.listen(8080), s.listen(8081)
	f, p := serves(model.TCP, 80, 8080)
	s.check(s.apply(p, f))
	client, server := s.pair(l)
	s.exchange(client, server, "first")
	f, p = serves(model.TCP, 80, 8081)
	s.check(s.apply(p, f))
	other, another := s.pair(m)
	s.exchange(client, server, "its backend has gone")
	s.check(s.apply())
	s.exchange(client, server, "its frontend has gone")
	s.exchange(another, other, "and so has that of this one")
	if n := s.detainRules(); n != 2 {
		t.Errorf("%d rules keep 2 connections", n)
	}
	if _, err := s.dial("tcp4", vip.String()+":80"); err == nil {
		t.Error("a frontend that has gone takes connections")
	}
	s.check(client.Close(), server.Close(), other.Close(), another.Close())
	s.settled()
	if n := s.detainRules(); n != 0 {
		t.Errorf("%d rules keep no connection", n)
	}
}

// detainRules counts the rules of connections without a frontend.
func (s *stage) detainRules() int {
	rules, err := rule.List(s.plane.netlink, ownerDetained)
	s.check(err)
	return len(rules)
}

// udp answers each datagram at the server's port with the port and what it said.
func (s *stage) udp(port int) {
	s.Helper()
	var c *net.UDPConn
	s.check(s.server.Do(func() (err error) {
		c, err = net.ListenUDP("udp4", &net.UDPAddr{IP: serverAddr.AsSlice(), Port: port})
		return err
	}))
	s.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			c.WriteToUDPAddrPort(append([]byte(fmt.Sprint(port, " ")), b[:n]...), from)
		}
	}()
}

// roundTrip sends datagrams until one is answered.
func (s *stage) roundTrip(c net.Conn, text string) (reply string, err error) {
	b := make([]byte, 1<<16)
	for range 20 {
		if _, err = c.Write([]byte(text)); err != nil {
			return "", err
		}
		c.SetReadDeadline(time.Now().Add(patience / 20))
		n, e := c.Read(b)
		if err = e; err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
			return string(b[:n]), err
		}
	}
	return "", err
}

func TestFlowsEndWithTheirBackend(t *testing.T) {
	s := newStage(t)
	s.udp(53)
	s.udp(54)
	f, p := serves(model.UDP, 80, 53)
	s.check(s.apply(p, f))
	c, err := s.dial("udp4", vip.String()+":80")
	s.check(err)
	want := func(text string) {
		t.Helper()
		long := strings.Repeat(text, 700) // in two fragments
		for _, q := range []string{text, long} {
			if a, err := s.roundTrip(c, q); err != nil || a != text+" "+q {
				t.Fatalf("%s, %d bytes: %.20q, %v", text, len(q), a, err)
			}
		}
	}
	want("53")
	if n := s.plane.open.Load(); n != 1 {
		t.Errorf("%d file descriptors are counted for one flow", n)
	}
	f, p = serves(model.UDP, 80, 54)
	s.check(s.apply(p, f))
	want("54")
	f, p = serves(model.UDP, 80, 55)
	s.check(s.apply(p, f))
	if _, err := s.roundTrip(c, "x"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("the backend refuses, and the client is told: %v", err)
	}
	f, p = serves(model.UDP, 80)
	s.check(s.apply(p, f))
	if _, err := s.roundTrip(c, "x"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("there is no backend, and the client is told: %v", err)
	}
	f.Sources = []netip.Prefix{netip.MustParsePrefix("10.1.0.2/32")}
	s.check(s.apply(p, f))
	if _, err := s.roundTrip(c, "x"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("there is no backend for those let in, and the client is told: %v", err)
	}
	s.settled()
}

// Answers of UDP arrive whose way to the client takes shorter packets than the netns: those of a pod whose device has a
// smaller MTU. The first does, since nothing is sent again.
func TestRepliesArriveAtClientsWithSmallMTU(t *testing.T) {
	s := newStage(t)
	addresses := map[*netns.Namespace][2]string{s.client: {"eth0", "fd00:1::2/64"}, s.server: {"eth0", "fd00:2::2/64"}}
	s.check(sysctl.Set(s.node, sysctl.Setting{Name: "net/ipv6/conf/all/forwarding", Value: "1"}))
	run := func(ns *netns.Namespace, script string) {
		t.Helper()
		s.check(ns.Do(func() error {
			out, err := exec.Command("sh", "-ec", script).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		}))
	}
	run(s.node, "ip addr add fd00:1::1/64 dev client nodad; ip addr add fd00:2::1/64 dev server nodad; ip link set "+
		"client mtu 1400")
	for ns, a := range addresses {
		run(ns, fmt.Sprintf("ip addr add %s dev %s nodad; ip -6 route add default via %s", a[1], a[0],
			strings.Replace(a[1], "::2/64", "::1", 1)))
	}
	run(s.client, "ip link set eth0 mtu 1400")
	six := netip.MustParseAddr("fd00:2::2")
	for _, at := range []netip.Addr{serverAddr, six} {
		s.echo(at, 53)
	}
	f, p := serves(model.UDP, 80, 53)
	f6, p6 := serves(model.UDP, 80)
	p6.ID, p6.Backends = 66, []model.Backend{{Addr: netip.AddrPortFrom(six, 53)}}
	f6.Entry.Addr = netip.MustParseAddr("fd00:96::1")
	s.check(s.apply(p, f, p6, f6))
	for _, to := range []netip.Addr{vip, f6.Entry.Addr} {
		for _, size := range []int{1300, 1500, 2000, 9000} {
			c, err := s.dial("udp", netip.AddrPortFrom(to, 80).String())
			s.check(err)
			if _, err := s.roundTrip(c, "x"); err != nil {
				t.Fatal(err)
			}
			request, reply, n := bytes.Repeat([]byte("x"), size), make([]byte, 1<<16), 1
			c.SetDeadline(time.Now().Add(patience))
			_, err = c.Write(request)
			for n == 1 && err == nil { // or it is a late answer of those above
				n, err = c.Read(reply)
			}
			if err != nil || !bytes.Equal(reply[:n], request) {
				t.Errorf("%s, %d bytes: %d bytes came back, %v", to, size, n, err)
			}
		}
	}
}

// echo answers each datagram at an address and port of the server with what it said.
func (s *stage) echo(at netip.Addr, port uint16) {
	s.Helper()
	var c *net.UDPConn
	s.check(s.server.Do(func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, port)))
		return err
	}))
	s.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			c.WriteToUDPAddrPort(b[:n], from)
		}
	}()
}

func TestSilentFlowsEnd(t *testing.T) {
	defer func(d [2]time.Duration) { silences = d }(silences)
	silences = [2]time.Duration{50 * time.Millisecond, 100 * time.Millisecond}
	s := newStage(t)
	s.udp(53)
	f, p := serves(model.UDP, 80, 53)
	s.check(s.apply(p, f))
	for range 10 {
		c, err := s.dial("udp4", vip.String()+":80")
		s.check(err)
		if _, err := s.roundTrip(c, "x"); err != nil {
			t.Fatal(err)
		}
	}
	s.settled()
}

func TestClientsWaitForFileDescriptors(t *testing.T) {
	s := newStage(t)
	l := s.listen(8080)
	f, p := serves(model.TCP, 80, 8080)
	s.check(s.apply(p, f))
	s.pipes()
	rest := s.plane.limit - 2*perConn - s.plane.steady.Load()
	s.plane.open.Add(rest) // as if others had it
	defer s.plane.open.Add(-rest)
	first, server := s.pair(l)
	s.pair(l)
	waiting, err := s.dial("tcp4", vip.String()+":80") // in the kernel's queue
	s.check(err)
	_, err = waiting.Write([]byte("patient"))
	s.check(err)
	for end := time.Now().Add(patience); ; {
		if err = s.apply(p, f); err != nil || time.Now().After(end) {
			break
		}
	}
	if err == nil || !strings.Contains(err.Error(), "LimitNOFILE") {
		t.Fatalf("clients wait, and a write says %v", err)
	}
	if facts, _ := s.plane.Read(t.Context()); !strings.Contains(fmt.Sprint(facts), "without file descriptors") {
		t.Errorf("clients wait, and all is as wanted: %v", facts)
	}
	s.exchange(first, server, "others go on")
	s.check(first.Close(), server.Close())
	l.SetDeadline(time.Now().Add(patience))
	late, err := l.AcceptTCP()
	s.check(err)
	defer late.Close()
	late.SetDeadline(time.Now().Add(patience))
	b := make([]byte, 7)
	if _, err := io.ReadFull(late, b); err != nil || string(b) != "patient" {
		t.Errorf("who waited says %q, %v", b, err)
	}
	s.check(s.apply(p, f))
}

// pipes has the loops have pipes, so that none is to be made later.
func (s *stage) pipes() {
	for _, l := range s.plane.loops {
		l.do(func() {
			p, err := l.borrow()
			s.check(err)
			q, err := l.borrow()
			s.check(err)
			l.returnPipe(p)
			l.returnPipe(q)
		})
	}
}

func TestKernelReturnsWhatIsWritten(t *testing.T) {
	s := newStage(t)
	f, p := serves(model.TCP, 80, 8080)
	g, q := serves(model.UDP, 53, 53)
	e := *f
	e.Entry.Addr = netip.IPv4Unspecified()
	six := *f
	six.Entry.Addr, six.Sources = netip.MustParseAddr("fd00:96::1"), []netip.Prefix{netip.MustParsePrefix("fd00::/8")}
	for range 2 {
		s.check(s.apply(p, q, f, g, &e, &six))
		s.holds(s.held)
		s.check(s.apply(p, f, q, &six))
		s.holds(s.held)
	}
	c, err := link.Dial(s.node)
	s.check(err)
	defer c.Close()
	s.check(shut(c))
	if err := s.plane.Write(t.Context(), s.held, nil); err != nil {
		t.Errorf("another program removes the route into the netns, and it can't be made again: %v", err)
	}
	s.holds(s.held)
	s.check(s.plane.Clean(t.Context()))
	s.holds(nil)
	if rules, err := rule.List(s.plane.netlink, 0); err != nil || len(rules) != 5 {
		t.Errorf("rules of the kernel's own are left: %v, %v", rules, err)
	}
}

// holds checks that Read gives these facts, each once.
func (s *stage) holds(want []Fact) {
	s.Helper()
	got, err := s.plane.Read(s.Context())
	s.check(err)
	left := map[Key]string{}
	for _, f := range want {
		left[f.Key] = f.Value
	}
	for _, f := range got {
		if v, wanted := left[f.Key]; !wanted || v != f.Value {
			s.Errorf("%v is held as %q", f.Key, f.Value)
		}
		delete(left, f.Key)
	}
	for k, v := range left {
		s.Errorf("%v is not held as %q", k, v)
	}
}

func TestOtherAddressesOfTheNodeAreServed(t *testing.T) {
	s := newStage(t)
	l := s.listen(8080)
	f, p := serves(model.TCP, 80, 8080)
	e := *f
	e.Entry.Addr = netip.IPv4Unspecified()
	s.check(s.apply(p, &e))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	signals, err := s.plane.Watch(ctx)
	s.check(err)
	<-signals // the first comes by itself
	c, err := link.Dial(s.node)
	s.check(err)
	defer c.Close()
	s.check(c.AddAddress(1, netip.PrefixFrom(vip, 32)))
	n := &model.ServiceNode{Node: &model.Node{}, NodePorts: []model.Range{
		{First: netip.MustParseAddr("10.0.0.0"), Last: netip.MustParseAddr("10.255.255.255")}}}
	s.plane.text = nodeText(n)
	s.held[1].Value, s.held[1].Body = s.plane.text, n
	select {
	case <-signals:
	case <-time.After(patience):
		t.Fatal("an address has come, and no notification")
	}
	s.check(s.plane.Write(t.Context(), s.held, nil))
	client, server := s.pair(l)
	s.exchange(client, server, "x")
}

func TestResetEndsWhatCannotMove(t *testing.T) {
	for name, prepare := range map[string]func(s *stage, client, server *net.TCPConn){
		"after its own end": func(s *stage, client, server *net.TCPConn) {
			s.check(client.CloseWrite())
			if _, err := io.ReadAll(server); err != nil {
				s.Error(err)
			}
		},
		"while the other end does not read": func(s *stage, client, _ *net.TCPConn) {
			client.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
			for block := make([]byte, 1<<16); ; {
				if _, err := client.Write(block); err != nil {
					return
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, l := newServed(t)
			client, server := s.pair(l)
			prepare(s, client, server)
			s.check(client.SetLinger(0), client.Close())
			s.settled()
		})
	}
}

func TestManyConnectionsDoNotStarveOthers(t *testing.T) {
	s := newStage(t)
	l := s.listen(8080)
	f, p := serves(model.TCP, 80, 8080)
	s.check(s.apply(p, f))
	rest := s.plane.limit
	s.plane.open.Add(rest) // so that they wait
	const many = 3 * greed
	for range many {
		_, err := s.dial("tcp4", vip.String()+":80")
		s.check(err)
	}
	for i, o := range s.plane.loops {
		o.do(func() {
			if i == 0 {
				s.plane.open.Add(-rest)
			}
			before := len(o.conns)
			s.plane.fronts[f.Entry].sockets[0].listeners[i].accept()
			if n := len(o.conns) - before; n > greed || i == 0 && n == 0 {
				t.Errorf("one turn takes %d connections", n)
			}
		})
	}
	l.SetDeadline(time.Now().Add(patience))
	for range many {
		c, err := l.AcceptTCP()
		s.check(err)
		c.Close()
	}
}

func TestNetnsIsCompleteOrAbsent(t *testing.T) {
	s := newStage(t)
	right := vethSettings
	defer func() { vethSettings = right }()
	vethSettings = append(vethSettings[:len(vethSettings):len(vethSettings)],
		sysctl.Setting{Name: "net/ipv4/conf/" + Veth + "/nothing", Value: "1"})
	f, p := serves(model.TCP, 80, 8080)
	for range 2 {
		if err := s.apply(p, f); err == nil {
			t.Error("a netns that can't be set up is taken for one")
		}
	}
	vethSettings = right
	s.held = nil
	s.check(s.apply(p, f))
	s.holds(s.held)
}

func TestRulesOfAKilledProcessGo(t *testing.T) {
	s := newStage(t)
	r := rule.Rule{Owner: ownerDetained, From: netip.PrefixFrom(nodeAddr, 32), To: netip.PrefixFrom(vip, 32),
		Protocol: uint8(model.TCP), FromPort: 4242,
		ToPort: rule.PortRange{First: 80, Last: 80}, Table: tableDetained}
	b := route.NewBatch()
	rule.Put(b, r)
	s.check(s.plane.netlink.Apply(b))
	f, p := serves(model.TCP, 80, 8080)
	s.check(s.apply(p, f))
	if n := s.detainRules(); n != 0 {
		t.Errorf("%d rules of connections that are proxied no more are left", n)
	}
}

func TestForeignLocalRulesArePreserved(t *testing.T) {
	s := newStage(t)
	ip := func(args ...string) (out string) {
		s.check(s.node.Do(func() error {
			b, err := exec.Command("ip", args...).CombinedOutput()
			out = string(b)
			return err
		}))
		return out
	}
	ip("rule", "add", "fwmark", "0x5", "lookup", "local", "pref", "0")
	for _, port := range []uint16{80, 81, 82} {
		f, p := serves(model.TCP, port, 8080)
		s.check(s.apply(p, f))
		all := ip("rule", "show", "pref", "0")
		if strings.Count(all, "from all lookup local") != 1 || strings.Count(all, "from all fwmark 0x5 lookup local") != 1 {
			t.Fatalf("port %d: rules are\n%s", port, all)
		}
	}
	s.holds(s.held)
	// as by a process that was killed while it moved it
	second := rule.Rule{Owner: unix.RTPROT_KERNEL, Table: unix.RT_TABLE_LOCAL, Again: true}
	b := route.NewBatch()
	rule.Put(b, second)
	s.check(s.plane.netlink.Apply(b))
	f, p := serves(model.TCP, 83, 8080)
	s.check(s.apply(p, f))
	if all := ip("rule", "show", "pref", "0"); strings.Count(all, "from all lookup local") != 1 {
		t.Errorf("rules are\n%s", all)
	}
}

func TestErrandsEndWithTheirLoop(t *testing.T) {
	s := newStage(t)
	o := s.plane.loops[0]
	late := make(chan struct{})
	listener := &listener{loop: o, front: &front{plane: s.plane}}
	o.do(func() { // what the loop's end comes upon
		c := &conn{loop: o, front: listener.front, client: end{fd: -1}, server: end{fd: -1}, undetain: func() {
			go func() { o.do(func() {}); close(late) }()
			for waiting := 0; waiting == 0; {
				o.mu.Lock()
				waiting = len(o.mail)
				o.mu.Unlock()
			}
		}}
		o.conns[c] = struct{}{}
	})
	o.close()
	s.plane.loops = s.plane.loops[1:]
	select {
	case <-late:
	case <-time.After(patience):
		t.Fatal("an errand that came with the end is waited for in vain")
	}
}

// TestChurnLeavesNothing has connections and flows end in each way that there is, and counts what the process still
// has.
func TestChurnLeavesNothing(t *testing.T) {
	defer func(d [2]time.Duration) { silences = d }(silences)
	silences = [2]time.Duration{50 * time.Millisecond, 100 * time.Millisecond}
	s := newStage(t)
	l := s.listen(8080)
	s.udp(53)
	f, p := serves(model.TCP, 80, 8079, 8080) // one of two refuses
	g, q := serves(model.UDP, 80, 53)
	s.check(s.apply(p, f, q, g))
	s.pipes()
	descriptors := func() int {
		all, err := os.ReadDir("/proc/self/fd")
		s.check(err)
		return len(all)
	}
	before, steady := descriptors(), s.plane.steady.Load()
	for i := range 2000 {
		client, server := s.pair(l)
		s.exchange(client, server, "x")
		ends := []*net.TCPConn{client, server}
		if i%4 < 2 {
			s.check(ends[i%2].SetLinger(0)) // a reset
		}
		s.check(ends[i%2].Close(), ends[1-i%2].Close())
		if i%8 == 0 {
			c, err := s.dial("udp4", vip.String()+":80")
			s.check(err)
			if _, err := s.roundTrip(c, "x"); err != nil {
				t.Fatal(err)
			}
			s.check(c.Close())
		}
	}
	s.settled()
	if after, pipes := descriptors(), int(s.plane.steady.Load()-steady); after-before != pipes ||
		pipes > 8*len(s.plane.loops) {
		t.Errorf("%d file descriptors have become %d, of which %d are new pipes'", before, after, pipes)
	}
	for _, o := range s.plane.loops {
		o.do(func() {
			// the bell and two listeners
			if n := len(o.slots) - len(o.free); len(o.conns)+len(o.hungry)+len(o.again)+len(o.late) > 0 || n > 3 {
				t.Errorf("a loop has %d watched sockets, %d connections, %d hungry, %d waiting", n, len(o.conns), len(o.hungry),
					len(o.again)+len(o.late))
			}
		})
	}
	s.plane.pools[p.ID].mu.Lock()
	defer s.plane.pools[p.ID].mu.Unlock()
	for _, b := range s.plane.pools[p.ID].backends {
		if b.active != 0 {
			t.Errorf("%s is counted for %d connections", b.addr, b.active)
		}
	}
}

func TestNoBackendIsTriedForAClientThatHasGone(t *testing.T) {
	s := newStage(t)
	f, p := serves(model.TCP, 80)
	for i := range byte(8) { // nothing answers there, which the node takes some seconds each to find out
		p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, 100 + i}),
			8080)})
	}
	s.check(s.apply(p, f))
	c, err := s.dial("tcp4", vip.String()+":80")
	s.check(err, c.(*net.TCPConn).SetLinger(0), c.Close())
	s.settled()
}

func TestIPv4IsServedWhereIPv6IsDisabled(t *testing.T) {
	s := newStage(t)
	s.check(sysctl.Set(s.node, sysctl.Setting{Name: "net/ipv6/conf/all/disable_ipv6", Value: "1"},
		sysctl.Setting{Name: "net/ipv6/conf/default/disable_ipv6", Value: "1"}))
	l := s.listen(8080)
	f, p := serves(model.TCP, 80, 8080)
	s.check(s.apply(p, f))
	client, server := s.pair(l)
	s.exchange(client, server, "x")
	s.holds(s.held)
}

// TestBackendsDoNotInheritBBR inspects the algorithm of connections to backends, for each that the kernel lets the node
// have.
func TestBackendsDoNotInheritBBR(t *testing.T) {
	const chosen = "/proc/sys/net/ipv4/tcp_congestion_control"
	algorithms := func(which string) []string {
		b, err := os.ReadFile("/proc/sys/net/ipv4/tcp_" + which + "_congestion_control")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Fields(string(b))
	}
	for _, name := range algorithms("allowed") { // others only the first network namespace may choose
		t.Run(name, func(t *testing.T) {
			s := newStage(t)
			s.check(s.node.Do(func() error { return os.WriteFile(chosen, []byte(name), 0) }))
			l := s.listen(8080)
			f, p := serves(model.TCP, 80, 8080)
			s.check(s.apply(p, f))
			s.pair(l)
			want := name
			if strings.HasPrefix(name, "bbr") && slices.Contains(algorithms("available"), "cubic") {
				want = "cubic"
			}
			seen := 0
			for _, loop := range s.plane.loops {
				loop.do(func() {
					for c := range loop.conns {
						seen++
						if got, err := unix.GetsockoptString(c.server.fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION); err != nil ||
							strings.TrimRight(got, "\x00") != want {
							t.Errorf("the node has %s, the connection to the backend %q, not %s (%v)", name, got, want, err)
						}
					}
				})
			}
			if seen != 1 {
				t.Errorf("%d connections", seen)
			}
		})
	}
}
