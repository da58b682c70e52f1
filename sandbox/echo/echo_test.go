package echo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

var (
	client4, client6 = netip.MustParseAddr("10.7.0.1"), netip.MustParseAddr("fd07::1")
	server4, server6 = netip.MustParseAddr("10.7.0.2"), netip.MustParseAddr("fd07::2")
	second4, second6 = netip.MustParseAddr("10.7.0.3"), netip.MustParseAddr("fd07::3") // the server's, too
	// packets to it vanish in the server's namespace
	nobody4, nobody6 = netip.MustParseAddr("10.7.0.9"), netip.MustParseAddr("fd07::9")
)

// pair makes a client's and a server's namespace with a wire between them.
func pair(t *testing.T) (client, server *netns.Namespace) {
	t.Helper()
	client, server = netnstest.New(t), netnstest.New(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, ns := range []*netns.Namespace{client, server} {
		must(sysctl.Set(ns, sysctl.Setting{Name: "net/ipv4/icmp_ratelimit", Value: "0"},
			sysctl.Setting{Name: "net/ipv6/icmp/ratelimit", Value: "0"}))
	}
	c, err := link.Dial(client)
	must(err)
	defer c.Close()
	s, err := link.Dial(server)
	must(err)
	defer s.Close()
	mac := [6]byte{2, 0, 0, 0, 0, 2}
	near, err := c.AddVeth(link.End{Name: "eth0"}, link.End{Name: "eth0", MAC: mac[:]}, server)
	must(err)
	far, err := s.Index("eth0")
	must(err)
	must(c.Up(1))
	must(s.Up(1))
	must(s.Up(far))
	for _, a := range []netip.Addr{client4, client6} {
		must(c.AddAddress(near, netip.PrefixFrom(a, a.BitLen()-8)))
	}
	for _, a := range []netip.Addr{server4, server6, second4, second6} {
		must(s.AddAddress(far, netip.PrefixFrom(a, a.BitLen()-8)))
	}
	for _, a := range []netip.Addr{nobody4, nobody6} {
		must(c.PutNeighbour(link.Neighbour{Dev: near, Addr: a, MAC: mac}))
	}
	must(c.Await(t.Context(), near, client6))
	must(s.Await(t.Context(), far, server6, second6))
	return client, server
}

// serve opens the ports of pod shop/web in ns.
func serve(t *testing.T, ns *netns.Namespace, ports ...Port) {
	t.Helper()
	err := ns.Do(func() error {
		s, err := Serve("shop/web", ports)
		if err == nil {
			t.Cleanup(func() { s.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// request queries from ns with a generous deadline.
func request(t *testing.T, ns *netns.Namespace, p model.Protocol, to netip.AddrPort, o Options) (a Reply, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err = ns.Do(func() (err error) {
		a, err = Request(ctx, p, to, o)
		return err
	})
	return a, err
}

var protocols = []model.Protocol{model.TCP, model.UDP, model.SCTP}

func TestRequestEveryProtocolAndFamily(t *testing.T) {
	client, server := pair(t)
	serve(t, server, Port{80, model.TCP}, Port{80, model.UDP}, Port{80, model.SCTP})
	for _, p := range protocols {
		for _, c := range []struct{ from, to netip.Addr }{{client4, server4}, {client6, server6}, {client4, second4},
			{client6, second6}} {
			to := netip.AddrPortFrom(c.to, 80)
			a, err := request(t, client, p, to, Options{})
			if err != nil {
				t.Errorf("%s over %s: %v", to, p, err)
				continue
			}
			if a.Pod != "shop/web" || a.Proto != p.String() || a.Client.Addr() != c.from || a.Server != to {
				t.Errorf("%s over %s: %+v, want client %s and server %s", to, p, a, c.from, to)
			}
		}
	}
}

func TestRequestWithinOneNamespace(t *testing.T) {
	_, server := pair(t)
	serve(t, server, Port{80, model.TCP}, Port{80, model.UDP}, Port{80, model.SCTP})
	for _, p := range protocols {
		for _, at := range []string{"127.0.0.1:80", "[::1]:80", "10.7.0.3:80", "[fd07::3]:80"} {
			to := netip.MustParseAddrPort(at)
			if a, err := request(t, server, p, to, Options{}); err != nil || a.Server != to {
				t.Errorf("%s over %s: %+v, %v", to, p, a, err)
			}
		}
	}
}

func TestFrom(t *testing.T) {
	client, server := pair(t)
	serve(t, server, Port{80, model.TCP}, Port{80, model.UDP}, Port{80, model.SCTP})
	for _, p := range protocols {
		for range 3 { // again at once: the port is free each time
			from := netip.AddrPortFrom(client6, 7001)
			a, err := request(t, client, p, netip.AddrPortFrom(server6, 80), Options{From: from})
			if err != nil || a.Client != from {
				t.Errorf("%s: %+v, %v, want client %s", p, a, err, from)
			}
			a, err = request(t, client, p, netip.AddrPortFrom(server4, 80),
				Options{From: netip.AddrPortFrom(netip.Addr{}, 7002)})
			if want := netip.AddrPortFrom(client4, 7002); err != nil || a.Client != want {
				t.Errorf("%s: %+v, %v, want client %s", p, a, err, want)
			}
		}
	}
}

func TestUnconnected(t *testing.T) {
	client, server := pair(t)
	serve(t, server, Port{53, model.UDP})
	for _, to := range []netip.Addr{server4, second4, server6, second6} {
		if a, err := request(t, client, model.UDP, netip.AddrPortFrom(to, 53), Options{Unconnected: true}); err != nil ||
			a.Server.Addr() != to {
			t.Errorf("%s: %+v, %v", to, a, err)
		}
		if _, err := request(t, client, model.UDP, netip.AddrPortFrom(to, 54), Options{Unconnected: true}); !errors.Is(err,
			Refused) {
			t.Errorf("closed port of %s: %v, want Refused", to, err)
		}
	}
}

func TestRefused(t *testing.T) {
	client, server := pair(t)
	bare, _ := pair(t) // no server at all: SCTP draws an ICMP error
	serve(t, server, Port{80, model.TCP}, Port{80, model.UDP}, Port{80, model.SCTP})
	for _, p := range protocols {
		for _, to := range []netip.Addr{server4, server6} {
			for _, ns := range []*netns.Namespace{client, bare} {
				if a, err := request(t, ns, p, netip.AddrPortFrom(to, 81), Options{}); !errors.Is(err, Refused) ||
					errors.Is(err, Timeout) {
					t.Errorf("closed port %s/%s: %+v, %v, want Refused", to, p, a, err)
				}
			}
		}
	}
}

func TestTimeoutAndCancel(t *testing.T) {
	client, _ := pair(t)
	for _, p := range protocols {
		for _, to := range []netip.Addr{nobody4, nobody6} {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			err := client.Do(func() error { _, err := Request(ctx, p, netip.AddrPortFrom(to, 80), Options{}); return err })
			cancel()
			if !errors.Is(err, Timeout) || errors.Is(err, Refused) {
				t.Errorf("silence from %s/%s: %v, want Timeout", to, p, err)
			}
			err = client.Do(func() error { _, err := Request(ctx, p, netip.AddrPortFrom(to, 80), Options{}); return err })
			if !errors.Is(err, Timeout) {
				t.Errorf("with a deadline that is past: %v, want Timeout", err)
			}
			ctx, cancel = context.WithCancel(t.Context())
			cancel()
			err = client.Do(func() error { _, err := Request(ctx, p, netip.AddrPortFrom(to, 80), Options{}); return err })
			if !errors.Is(err, context.Canceled) || errors.Is(err, Timeout) {
				t.Errorf("cancelled: %v, want context.Canceled", err)
			}
		}
	}
}

func TestNoRouteIsNeither(t *testing.T) {
	_, err := request(t, netnstest.New(t), model.TCP, netip.MustParseAddrPort("192.0.2.1:80"), Options{})
	if err == nil || errors.Is(err, Refused) || errors.Is(err, Timeout) {
		t.Errorf("%v, want an error of its own", err)
	}
}

func TestOpen(t *testing.T) {
	client, server := pair(t)
	serve(t, server, Port{80, model.TCP}, Port{80, model.UDP}, Port{80, model.SCTP})
	for _, p := range protocols {
		var h *Flow
		err := client.Do(func() (err error) {
			h, err = Open(t.Context(), p, netip.AddrPortFrom(server4, 80), Options{})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		var first netip.AddrPort
		for i := range 20 {
			a, err := h.Request(t.Context()) // on any thread
			if err != nil {
				t.Fatalf("%s: %v", p, err)
			}
			if i == 0 {
				first = a.Client
			}
			if a.Client != first || a.Client.Port() != h.Local().Port() {
				t.Errorf("%s: question %d came from %s, the first from %s", p, i, a.Client, first)
			}
		}
		h.Close()
	}
}

func TestOpenConnectionIsReset(t *testing.T) {
	client, server := pair(t)
	var s *Server
	if err := server.Do(func() (err error) {
		s, err = Serve("shop/web", []Port{{80, model.TCP}})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	var h *Flow
	if err := client.Do(func() (err error) {
		h, err = Open(t.Context(), model.TCP, netip.AddrPortFrom(server4, 80), Options{})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if _, err := h.Request(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if _, err := h.Request(t.Context()); err == nil {
		t.Error("a closed server still answers")
	}
}

func TestHTTP(t *testing.T) {
	client, server := pair(t)
	serve(t, server, Port{80, model.TCP})
	dials := 0
	web := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, addr string) (c net.Conn,
		err error) {
		dials++
		err = client.Do(func() error { c, err = new(net.Dialer).DialContext(ctx, "tcp", addr); return err })
		return c, err
	}}}
	for _, r := range []struct{ method, body string }{{"GET", ""}, {"POST", "a body"}, {"HEAD", ""}, {"GET", ""},
		{"DELETE", ""}} {
		req, err := http.NewRequestWithContext(t.Context(), r.method, "http://[fd07::2]/path", strings.NewReader(r.body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := web.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 200 || err != nil {
			t.Errorf("%s: %s, %v", r.method, resp.Status, err)
		}
		if r.method == "HEAD" {
			continue
		}
		if a, err := parseReply(body); err != nil || a.Pod != "shop/web" || a.Proto != "http" || a.Client.Addr() != client6 {
			t.Errorf("%s: %s", r.method, body)
		}
	}
	if dials != 1 {
		t.Errorf("%d connections, want one kept", dials)
	}
}

func TestLinesAndHTTPOnOneConnection(t *testing.T) {
	_, server := pair(t)
	serve(t, server, Port{80, model.TCP})
	err := server.Do(func() error {
		c, err := net.Dial("tcp", "127.0.0.1:80")
		if err != nil {
			return err
		}
		defer c.Close()
		in := bufio.NewReader(c)
		for _, said := range []string{"hello", "GET", "GETTING on", "", "DELETED"} {
			fmt.Fprintf(c, "%s\n", said)
			l, err := in.ReadBytes('\n')
			if err != nil {
				return err
			}
			if a, err := parseReply(l); err != nil || a.Said != said || a.Proto != "tcp" {
				t.Errorf("said %q: %s", said, l)
			}
		}
		fmt.Fprint(c, "GET / HTTP/1.0\r\n\r\n")
		rest, err := io.ReadAll(in)
		if !strings.HasPrefix(string(rest), "HTTP/1.1 200 OK\r\n") {
			t.Errorf("HTTP: %s", rest)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestServersDontTalkToEachOther(t *testing.T) {
	s := &Server{pod: "shop/web"}
	if b := s.datagram(replyLine("shop/other", "udp", netip.AddrPort{}, netip.AddrPort{}, nil), netip.AddrPort{},
		netip.AddrPort{}); b != nil {
		t.Errorf("an answer is answered: %s", b)
	}
}

// Raw sockets hear each other's packets.
func TestServersBesideEachOther(t *testing.T) {
	client, server := pair(t)
	serve(t, server, Port{80, model.SCTP})
	serve(t, server, Port{81, model.SCTP})
	for range 8 {
		for _, to := range []netip.AddrPort{netip.AddrPortFrom(server4, 80), netip.AddrPortFrom(server4, 81),
			netip.AddrPortFrom(server6, 80), netip.AddrPortFrom(server6, 81)} {
			if a, err := request(t, client, model.SCTP, to, Options{}); err != nil || a.Server != to {
				t.Errorf("%s: %+v, %v", to, a, err)
			}
		}
	}
	if _, err := request(t, client, model.SCTP, netip.AddrPortFrom(server4, 82), Options{}); !errors.Is(err, Refused) {
		t.Errorf("a port of neither: %v, want a refusal", err)
	}
}

func TestServePortInUse(t *testing.T) {
	ns := netnstest.New(t)
	serve(t, ns, Port{80, model.TCP})
	err := ns.Do(func() error { _, err := Serve("shop/other", []Port{{81, model.TCP}, {80, model.TCP}}); return err })
	if err == nil || !strings.Contains(err.Error(), "shop/other") || !strings.Contains(err.Error(), "80/tcp") {
		t.Errorf("%v, want an error that names pod and port", err)
	}
	serve(t, ns, Port{81, model.TCP}) // was given back
}

// The path for kernels with SCTP sockets is the same for TCP: a stream socket of that protocol number.
func TestStreamSocketsAcceptAnyProtocolNumber(t *testing.T) {
	ns := netnstest.New(t)
	err := ns.Do(func() error {
		l, err := listen(netip.MustParseAddrPort("[::]:80"), model.TCP)
		if err == nil {
			l.Close()
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func TestSegments(t *testing.T) {
	for _, s := range []segment{
		{Src: 1, Dst: 65535, Chunk: chunkInit, Init: 7},
		{Src: 4000, Dst: 80, Tag: 9, Chunk: chunkInitAck, Init: 1, Cookie: []byte("odd")},
		{Src: 4000, Dst: 80, Tag: 9, Chunk: chunkInitAck, Init: 1, Cookie: []byte("even")},
		{Src: 80, Dst: 4000, Tag: 9, Chunk: chunkAbort},
	} {
		b := s.marshal()
		got, err := parseSegment(b)
		if err != nil || fmt.Sprint(got) != fmt.Sprint(s) || len(b)%4 != 0 {
			t.Errorf("%v became %v, %v in %d bytes", s, got, err, len(b))
		}
		b[len(b)-1] ^= 1
		if _, err := parseSegment(b); err == nil {
			t.Errorf("%v: a flipped bit goes unseen", s)
		}
	}
}

func FuzzSegment(f *testing.F) {
	f.Add(segment{Src: 1, Dst: 2, Chunk: chunkInit, Init: 3}.marshal())
	f.Add(segment{Src: 1, Dst: 2, Tag: 3, Chunk: chunkInitAck, Init: 3, Cookie: []byte("cookie")}.marshal())
	f.Add(segment{Src: 1, Dst: 2, Tag: 3, Chunk: chunkAbort}.marshal())
	f.Add([]byte("00000000....\x010\x00\x1e0000000000000000\x00\a\x00\n000000")) // an INIT with a cookie
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= 12 { // let bytes past the checksum in
			sum := crc(b)
			b[8], b[9], b[10], b[11] = byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24)
		}
		s, err := parseSegment(b)
		if err != nil {
			return
		}
		again, err := parseSegment(s.marshal())
		if err != nil || (s.Chunk <= chunkInitAck && s.Chunk > 0 && fmt.Sprint(again) != fmt.Sprint(s)) {
			t.Errorf("%v became %v, %v", s, again, err)
		}
		payload(b, true)
	})
}

func FuzzDestination(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) { destination(b) })
}
