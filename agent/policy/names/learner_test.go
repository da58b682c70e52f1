package names

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// An answer teaches its addresses, held or copied. One that is held comes when they are in force, or late where that
// takes too long.
func TestLearner(t *testing.T) {
	for _, c := range []struct {
		name         string
		copied, slow bool
	}{{"held", false, false}, {"copied", true, false}, {"slow", false, true}} {
		t.Run(c.name, func(t *testing.T) { inNode(t, func() error { return learn(t, c.copied, c.slow) }) })
	}
}

// inNode runs a test in a namespace that has the addresses of a pod and a resolver.
func inNode(t *testing.T, test func() error) {
	netnstest.Do(t, func() {
		for _, args := range [][]string{{"link", "set", "lo", "up"}, {"address", "add", "10.0.0.1", "dev", "lo"},
			{"address", "add", "10.0.0.2", "dev", "lo"}} {
			if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		}
		if err := test(); err != nil {
			t.Error(err)
		}
	})
}

var (
	pod      = netip.MustParseAddr("10.0.0.1")
	resolver = netip.MustParseAddrPort("10.0.0.2:53")
	subject  = func() []model.PolicyPart {
		table := &model.PeerTable{Rules: []model.Rule{{Peers: []*model.Peers{{Domain: "*.example.com"}}}}}
		rules := &model.Ruleset{Default: model.PortEntry{PeerTable: table}}
		return []model.PolicyPart{&model.Subject{Addr: pod, Out: [model.PolicyStages]*model.Ruleset{rules}}}
	}()
)

// node is a pod and a resolver, both in the calling thread's namespace, and the Learner there.
type node struct {
	*Learner
	server, client *net.UDPConn
	ended          chan error
}

// open opens a Learner that runs until ctx ends.
func open(ctx context.Context, o Options) (n *node, err error) {
	n = &node{ended: make(chan error, 1)}
	o.Log = slog.New(slog.DiscardHandler)
	if n.Learner, err = Open(o); err != nil {
		return nil, err
	}
	n.SetResolvers([]netip.AddrPort{resolver})
	n.Follow(model.Change[model.PolicyPart]{Put: subject})
	shared := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) { // with who sends answers again
		return errors.Join(c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		}), err)
	}}
	server, err := shared.ListenPacket(ctx, "udp4", resolver.String())
	if err != nil {
		return nil, errors.Join(err, n.Learner.Close())
	}
	n.server = server.(*net.UDPConn)
	n.client, err = net.DialUDP("udp4", &net.UDPAddr{IP: pod.AsSlice()}, net.UDPAddrFromAddrPort(resolver))
	if err != nil {
		return nil, errors.Join(err, n.server.Close(), n.Learner.Close())
	}
	go func() { n.ended <- n.Run(ctx) }()
	return n, errors.Join(n.Sync(ctx), n.client.SetDeadline(time.Now().Add(10*time.Second)))
}

func (n *node) close() error {
	return errors.Join(n.client.Close(), n.server.Close(), n.Learner.Close())
}

// exchange has the pod send a query for a name, which is answered.
func (n *node) exchange(t *testing.T, name string) (client netip.AddrPort, err error) {
	if _, err := n.client.Write(built(t, dnsmessage.Header{ID: 7}, name, 0)); err != nil {
		return client, err
	}
	_, client, err = n.server.ReadFromUDPAddrPort(make([]byte, 512))
	if err == nil {
		_, err = n.server.WriteToUDPAddrPort(built(t, dnsmessage.Header{ID: 7, Response: true}, name, 30, name,
			"192.0.2.1"), client)
	}
	return client, err
}

// learn has a pod query a resolver.
func learn(t *testing.T, copied, slow bool) error {
	ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
	defer stop()
	applied, received := make(chan source.Change, 1), make(chan struct{})
	l, err := open(ctx, Options{Copied: copied, Apply: func(ctx context.Context, changes []source.Change) {
		if slow {
			<-received
		}
		applied <- changes[0]
	}})
	if err != nil {
		return err
	}
	defer l.close()
	if _, err := l.exchange(t, "a.example.com."); err != nil {
		return err
	}
	if _, err := l.client.Read(make([]byte, 512)); err != nil {
		return err
	}
	if !copied && !slow && len(applied) == 0 {
		t.Error("the answer has come before its addresses were in force")
	}
	close(received)
	select {
	case c := <-applied:
		if o, ok := c.Object.(*source.ResolvedName); !ok || c.Key.Name != "a.example.com" ||
			!slices.Equal(o.Addresses, []netip.Addr{netip.MustParseAddr("192.0.2.1")}) {
			t.Errorf("%+v", c)
		}
	case <-ctx.Done():
		return errors.New("nothing was learned")
	}
	n := l.Counts().Answers
	if n[taught] != 1 || n[unsolicited] != 0 || (n[late] == 1) != slow {
		t.Errorf("%v", n)
	}
	l.Follow(model.Change[model.PolicyPart]{Del: subject})
	l.SetResolvers([]netip.AddrPort{resolver, netip.MustParseAddrPort("10.0.0.3:53")})
	if err := l.Sync(ctx); err != nil {
		return err
	}
	if tables, err := exec.Command("nft", "list", "tables").CombinedOutput(); err != nil || len(tables) > 0 {
		t.Errorf("no rule names a domain name any more, but there is %s (%v)", tables, err)
	}
	stop()
	return <-l.ended
}

// An answer that waits when another program's hook goes is dropped by the kernel: it is sent again, once.
func TestDroppedAnswerIsSentAgain(t *testing.T) {
	inNode(t, func() error {
		ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
		defer stop()
		const hook = "add table inet other; add chain inet other c { type filter hook input priority 0; }; " +
			"delete table inet other"
		ns, err := netns.Current()
		if err != nil {
			return err
		}
		defer ns.Close()
		l, err := open(ctx, Options{Hold: time.Minute, Apply: func(context.Context, []source.Change) {
			if err := ns.Do(func() error { return exec.Command("nft", hook).Run() }); err != nil {
				t.Error(err)
			}
		}})
		if err != nil {
			return err
		}
		defer l.close()
		client, err := l.exchange(t, "a.example.com.")
		if err != nil {
			return err
		}
		b := make([]byte, 512)
		for _, want := range []string{"answer", "end"} { // which the server sends once the answer has come
			n, err := l.client.Read(b)
			if err != nil {
				return fmt.Errorf("no %s: %w; answers %v", want, err, l.Counts().Answers)
			}
			if (want == "end") != (string(b[:n]) == "end") {
				t.Errorf("%q in place of the %s", b[:n], want)
			}
			if _, err := l.server.WriteToUDPAddrPort([]byte("end"), client); err != nil {
				return err
			}
		}
		for l.Counts().Answers[resent] == 0 && ctx.Err() == nil { // it is counted after it was sent
			time.Sleep(time.Millisecond)
		}
		if n := l.Counts().Answers; n[taught] != 1 || n[resent] != 1 || n[late] != 0 {
			t.Errorf("%v", n)
		}
		stop()
		return <-l.ended
	})
}

// A pod's messages are held within its share, then copied, then unread: each of them comes. What was copied teaches
// too.
func TestShareOfPod(t *testing.T) {
	inNode(t, func() error {
		ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
		defer stop()
		l, err := open(ctx, Options{Apply: func(context.Context, []source.Change) {}})
		if err != nil {
			return err
		}
		defer l.close()
		exchange := func(name string) error {
			_, err := l.exchange(t, name)
			if err == nil {
				_, err = l.client.Read(make([]byte, 512))
			}
			return err
		}
		n := l.Counts()
		for i := 0; n.Answers[unread] == 0; i++ {
			err := exchange(fmt.Sprintf("n%d.example.com.", i))
			for range 100 { // of no rule's name
				err = errors.Join(err, exchange("example.net."))
			}
			if err != nil {
				return fmt.Errorf("an answer didn't come: %w; %+v", err, l.Counts())
			}
			n = l.Counts()
		}
		for ; n.Answers[copied] == 0 && ctx.Err() == nil; n = l.Counts() { // the answer comes before its copy is read
			time.Sleep(time.Millisecond)
		}
		if n.Answers[copied] == 0 || n.Answers[copied] == n.Answers[taught] || n.Answers[taught] != uint64(n.Names) ||
			n.Answers[late]+n.Answers[lost] > 0 {
			t.Errorf("%+v", n)
		}
		stop()
		return <-l.ended
	})
}

// FuzzLearn has a pod and the network beside it send any two messages: what is learned then is a name that a rule of
// the pod has and that the pod has queried for, with addresses of the answer to that query, and of a resolver's alone.
func FuzzLearn(f *testing.F) {
	answer := dnsmessage.Header{ID: 7, Response: true}
	query := built(f, dnsmessage.Header{ID: 7}, "a.example.com.", 0)
	f.Add(query, built(f, answer, "a.example.com.", 30, "a.example.com.", "192.0.2.1"), uint16(53), uint16(4000), false)
	f.Add(query, built(f, answer, "a.example.com.", 30, "a.example.com.", "b.net.", "b.net.", "192.0.2.1"), uint16(53),
		uint16(4000), true)
	f.Add(query, built(f, answer, "b.example.com.", 30, "b.example.com.", "192.0.2.1"), uint16(53), uint16(4000), false)
	f.Add(query, query, uint16(5353), uint16(4001), false)
	f.Fuzz(func(t *testing.T, query, answer []byte, from, to uint16, tcp bool) {
		const port = 4000
		l := &Learner{options: Options{Floor: time.Minute}, learned: newLearned()}
		l.setResolvers([]netip.AddrPort{resolver})
		l.follow(model.Change[model.PolicyPart]{Put: subject})
		now := time.Now()
		client := netip.AddrPortFrom(pod, port)
		l.receive(packetWith(client, resolver, tcp, query), now)
		if len(l.names) > 0 {
			t.Fatalf("a pod teaches %v", l.names)
		}
		taught := l.receive(packetWith(netip.AddrPortFrom(resolver.Addr(), from), netip.AddrPortFrom(pod, to), tcp, answer),
			now)
		if taught != (len(l.names) == 1) || len(l.names) > 1 {
			t.Errorf("taught %t: %v", taught, l.names)
		}
		for name, e := range l.names {
			b, ok := parse(answer)
			q, queried := parse(query)
			if from != resolver.Port() || to != port || !ok || !queried || q.response || !b.response || q.id != b.id ||
				q.question != b.question || name != q.name || l.domainOf(pod, name) == "" {
				t.Errorf("%s was learned by %+v to %+v, from port %d to %d", name, b, q, from, to)
			}
			for a, until := range e.expires {
				if !slices.Contains(b.addresses, a) || until.Sub(now) > max(b.ttl, time.Minute) {
					t.Errorf("%s until %s of %+v", a, until.Sub(now), b)
				}
			}
		}
	})
}

// packetWith returns a packet with a DNS message, over UDP or in one segment of TCP.
func packetWith(from, to netip.AddrPort, tcp bool, message []byte) []byte {
	if !tcp {
		return netnstest.Datagram(from, to, message)
	}
	b := netnstest.Datagram(from, to, nil)[:20]
	b[9] = unix.IPPROTO_TCP
	b = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, from.Port()), to.Port())
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0, 5<<4, 0, 0, 0, 0, 0, 0, 0)
	return append(binary.BigEndian.AppendUint16(b, uint16(len(message))), message...)
}
