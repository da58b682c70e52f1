package ebpf

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

var web, db, client = policytest.Behind[0], policytest.Behind[1], policytest.Behind[2]

// node is a node whose plane cuts connections.
type node struct {
	*testing.T
	*policytest.Network
	*Plane
	objects map[string][]source.Object
	held    map[Key]Fact
}

func newNode(t *testing.T) *node {
	n := &node{T: t, Network: policytest.NewNetwork(t), held: map[Key]Fact{}}
	_, n.objects = policytest.Worlds(t)
	n.Plane = n.reopen(Options{Sizes: small.Sizes})
	n.Network.Cleanup(func() { n.Must(n.Clean(context.Background())) })
	if inFastPath {
		newDevicePath(n.Network)
		n.Network.Cleanup(func() { redirected += n.count(policy.Redirected) })
	}
	return n
}

// reopen opens a plane of the node.
func (n *node) reopen(o Options) (p *Plane) {
	n.Must(n.Node.Do(func() (err error) {
		p, err = Open(o)
		return err
	}))
	n.Network.Cleanup(func() { p.Close() })
	return p
}

// decide returns what a world comes to where connections are cut.
func (n *node) decide(world string) *policytest.Decided {
	d := policytest.Decide(n.objects[world])
	cut := *d.Now.Node
	cut.CutMark = 1
	d.Now.Node = &cut
	return d
}

// hold writes what a world comes to, and returns it.
func (n *node) hold(world string) *policytest.Decided {
	n.T.Helper()
	d := n.decide(world)
	n.holdAll(d)
	return d
}

// holdAll writes all parts.
func (n *node) holdAll(d *policytest.Decided) {
	n.T.Helper()
	wanted := policytest.Facts(n.T, n.Plane, d.Parts())
	policytest.Move(n.T, n.Plane, n.held, wanted)
	n.held = wanted
}

// open opens a flow and has it answered.
func (n *node) open(src, dst netip.Addr, to echo.Port, o echo.Options) (f *echo.Flow) {
	n.T.Helper()
	ctx, cancel := context.WithTimeout(n.T.Context(), 10*time.Second)
	defer cancel()
	n.Must(n.Of[src].Do(func() (err error) {
		if f, err = echo.Open(ctx, to.Protocol, netip.AddrPortFrom(dst, to.Number), o); err == nil {
			n.Network.Cleanup(func() { f.Close() })
			_, err = f.Request(ctx)
		}
		return err
	}))
	return f
}

// answered reports whether a flow is answered.
func answered(f *echo.Flow, expected bool) bool {
	wait := 200 * time.Millisecond
	if expected {
		wait = 10 * time.Second
	}
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	_, err := f.Request(ctx)
	return err == nil
}

// connect opens a TCP connection and returns its ends.
func (n *node) connect(src, dst netip.Addr) (ends [2]net.Conn) {
	n.T.Helper()
	var l net.Listener
	n.Must(n.Of[dst].Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(dst, 7).String())
		return err
	}))
	defer l.Close()
	n.Must(n.Of[src].Do(func() (err error) {
		ends[0], err = (&net.Dialer{Timeout: 10 * time.Second}).Dial("tcp", l.Addr().String())
		return err
	}))
	var err error
	ends[1], err = l.Accept()
	n.Must(err)
	for _, e := range ends {
		n.Network.Cleanup(func() { e.Close() })
	}
	if !arrives(ends[0], ends[1], true) || !arrives(ends[1], ends[0], true) {
		n.T.Fatal("a connection does not carry data")
	}
	return ends
}

// arrives sends a byte and reports whether the other end gets it.
func arrives(from, to net.Conn, expected bool) bool {
	wait := 200 * time.Millisecond
	if expected {
		wait = 10 * time.Second
	}
	from.Write([]byte{1})
	to.SetReadDeadline(time.Now().Add(wait))
	_, err := to.Read(make([]byte, 1))
	return err == nil
}

func (n *node) count(e policy.Event) uint64 {
	n.T.Helper()
	counts, err := n.PolicyPackets()
	n.Must(err)
	return counts[e.String()]
}

// TestFlowsFollowVerdict opens flows while all is allowed, and has one world follow another: a flow goes on exactly
// while its first packet is allowed, and it is not more than cut: allowed again, it goes on.
func TestFlowsFollowVerdict(t *testing.T) {
	n := newNode(t)
	names := slices.DeleteFunc(slices.Collect(maps.Keys(n.objects)), func(s string) bool { return s == "none.yaml" })
	slices.Sort(names)
	r := rand.New(rand.NewPCG(3, 4))
	n.hold("audit.yaml")
	services := n.decide("admin-and-default.yaml").Now.Node
	type flow struct {
		*echo.Flow
		first verdict.Packet
	}
	var flows []flow
	for len(flows) < 60 {
		p := n.Packets(r, 1)[0]
		if p.Protocol == model.SCTP || netip.MustParsePrefix("10.96.0.0/12").Contains(p.Src.Addr()) ||
			netip.MustParsePrefix("fd96::/112").Contains(p.Src.Addr()) ||
			policytest.Untranslated(services, p.Dst.Addr()) {
			continue // echo opens SCTP anew each time; what is translated later has no answers of its own
		}
		f := n.open(p.Src.Addr(), p.Dst.Addr(), echo.Port{Number: p.Dst.Port(), Protocol: p.Protocol},
			echo.Options{From: p.Src})
		flows = append(flows, flow{f, p})
	}
	for round := range 3 {
		r.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		for _, name := range names {
			d := n.hold(name)
			var wg sync.WaitGroup
			for _, f := range flows {
				if f.first.Protocol == model.TCP { // a stream with a lost request isn't in step any more
					continue
				}
				o := verdict.Policy(d.Now, f.first)
				wg.Go(func() {
					if expected := o.Verdict == model.VerdictAccept; answered(f.Flow, expected) != expected {
						t.Errorf("round %d, %s: %v: not so: %s, %s", round, name, f.first, o.Verdict, o.Reason)
					}
				})
			}
			wg.Wait()
		}
	}
	n.hold("audit.yaml")
	for _, f := range flows {
		if !answered(f.Flow, true) {
			t.Errorf("%v does not go on", f.first)
		}
	}
	if n.count(policy.CutFlow) == 0 {
		t.Error("nothing was cut")
	}
}

// TestWithdrawnPermissionCuts: whichever end speaks first. What is allowed stays.
func TestWithdrawnPermissionCuts(t *testing.T) {
	n := newNode(t)
	n.hold("audit.yaml")
	for i := range web {
		byClient, byServer := n.connect(client[i], web[i]), n.connect(client[i], web[i])
		stays := n.connect(web[i], client[i])
		n.hold("deny-ingress.yaml")
		for _, c := range []struct {
			ends [2]net.Conn
			from int
		}{{byClient, 0}, {byClient, 1}, {byServer, 1}, {byServer, 0}} {
			if arrives(c.ends[c.from], c.ends[1-c.from], false) {
				t.Errorf("%s > %s: end %d is still heard", client[i], web[i], c.from)
			}
		}
		if !arrives(stays[0], stays[1], true) || !arrives(stays[1], stays[0], true) {
			t.Error("a connection that is allowed was cut")
		}
		n.hold("audit.yaml")
		if !arrives(byServer[0], byServer[1], true) || !arrives(byServer[1], byServer[0], true) {
			t.Error("a connection that is allowed again does not go on")
		}
	}
}

// TestRunningConnectionsAreNotCutByInstallation: for a minute; then those that are denied are.
func TestRunningConnectionsAreNotCutByInstallation(t *testing.T) {
	n := newNode(t)
	var denied, allowed [][2]net.Conn
	for i := range web {
		denied = append(denied, n.connect(client[i], web[i]), n.connect(client[i], web[i]))
		allowed = append(allowed, n.connect(web[i], client[i]), n.connect(web[i], client[i]))
	}
	n.hold("deny-ingress.yaml")
	for i, ends := range slices.Concat(denied, allowed) {
		if from := i % 2; !arrives(ends[from], ends[1-from], true) || !arrives(ends[1-from], ends[from], true) {
			t.Errorf("connection %d ends", i)
		}
	}
	for i := range web {
		if n.Passes(n.Packet(client[i], web[i], policytest.Served[0]), false) {
			t.Error("a new connection passes")
		}
	}
	n.maps.Install(0)
	for i, ends := range denied {
		if from := i % 2; arrives(ends[from], ends[1-from], false) || arrives(ends[1-from], ends[from], false) {
			t.Errorf("connection %d is not cut after the minute", i)
		}
	}
	for i, ends := range allowed {
		if from := i % 2; !arrives(ends[from], ends[1-from], true) || !arrives(ends[1-from], ends[from], true) {
			t.Errorf("connection %d is cut after the minute", i)
		}
	}
}

// TestForgottenFlows: a flow that the map has forgotten is picked up by a packet whose own direction is allowed, and
// not in the direction that is left when the other was denied.
func TestForgottenFlows(t *testing.T) {
	n := newNode(t)
	n.hold("audit.yaml")
	n.maps.Install(0)
	denied, allowed := n.connect(client[0], web[0]), n.connect(web[0], client[0])
	n.hold("deny-ingress.yaml")
	n.Must(n.maps.ForgetFlows())
	if arrives(denied[1], denied[0], false) {
		t.Error("the server picks a denied connection up in the other direction")
	}
	if arrives(denied[0], denied[1], false) {
		t.Error("a denied connection is picked up")
	}
	if !arrives(allowed[0], allowed[1], true) || !arrives(allowed[1], allowed[0], true) {
		t.Error("an allowed connection is not picked up")
	}
}

// TestRecordsConnections: new ones while they are recorded, accepted and denied, by client, server and port.
func TestRecordsConnections(t *testing.T) {
	n := newNode(t)
	open := func() (r *policy.Recorder, err error) {
		err = n.Node.Do(func() (err error) {
			r, err = policy.OpenRecorder()
			return err
		})
		return r, err
	}
	if _, err := open(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a program: %v", err)
	}
	n.hold("audit.yaml")
	r, err := open()
	n.Must(err)
	defer r.Close()
	n.connect(db[0], web[0])
	n.Must(r.Renew(time.Hour))
	if _, err := open(); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a second recorder: %v", err)
	}
	for range 3 {
		n.connect(client[0], web[0])
	}
	n.connect(client[1], web[1])
	n.hold("deny-ingress.yaml")
	n.connect(web[0], client[0])
	for range 2 {
		if n.Passes(n.Packet(client[0], web[0], policytest.Served[3]), false) {
			t.Error("a denied packet passes")
		}
	}
	n.Must(r.End())
	n.connect(web[0], client[0])
	got, want := map[policy.Recorded]bool{}, map[policy.Recorded]bool{}
	n.Must(r.Read(func(f policy.Recorded) { got[f] = true }))
	for _, f := range []policy.Recorded{
		{Client: client[0], Server: netip.AddrPortFrom(web[0], 7), Protocol: unix.IPPROTO_TCP, Count: 3},
		{Client: client[1], Server: netip.AddrPortFrom(web[1], 7), Protocol: unix.IPPROTO_TCP, Count: 1},
		{Client: web[0], Server: netip.AddrPortFrom(client[0], 7), Protocol: unix.IPPROTO_TCP, Count: 1},
		{Client: client[0], Server: netip.AddrPortFrom(web[0], 53), Protocol: unix.IPPROTO_UDP, Denied: true, Count: 2},
	} {
		want[f] = true
	}
	if !maps.Equal(got, want) {
		t.Errorf("recorded %v, want %v", got, want)
	}
	n.Must(r.Read(func(f policy.Recorded) { t.Errorf("read twice: %v", f) }))
	before := false
	n.Must(r.Established(func(f policy.Recorded) {
		before = before || f == policy.Recorded{Client: db[0], Server: netip.AddrPortFrom(web[0], 7),
			Protocol: unix.IPPROTO_TCP}
	}))
	if lost, err := r.Lost(); !before || lost > 0 || err != nil {
		t.Errorf("the connection from before is there: %t; %d lost, %v", before, lost, err)
	}
	for _, gone := range []bool{true, false} { // without a program, then with another one
		if gone {
			n.Must(n.Write(t.Context(), nil, slices.Collect(maps.Values(n.held))))
			n.held = map[Key]Fact{}
		} else {
			n.hold("audit.yaml")
		}
		if err := r.Renew(time.Hour); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("gone %t: connections are recorded: %v", gone, err)
		}
	}
}

// TestReplyPortOpensNothing: an answer may come from an allowed connection's port, a new connection may not.
func TestReplyPortOpensNothing(t *testing.T) {
	n := newNode(t)
	n.hold("deny-ingress.yaml")
	out := n.connect(web[0], client[0]) // from a port of web's to port 7
	at := out[0].LocalAddr().String()
	n.Must(errors.Join(out[1].(*net.TCPConn).SetLinger(0), out[1].Close())) // both ends go; the flow is still known
	out[0].Read(make([]byte, 1))
	out[0].Close()
	n.Must(n.Of[web[0]].Do(func() error {
		l, err := net.Listen("tcp", at)
		if err == nil {
			n.Network.Cleanup(func() { l.Close() })
		}
		return err
	}))
	err := n.Of[client[0]].Do(func() error {
		d := net.Dialer{Timeout: 300 * time.Millisecond, LocalAddr: &net.TCPAddr{IP: client[0].AsSlice(), Port: 7}}
		c, err := d.Dial("tcp", at)
		if err == nil {
			c.Close()
		}
		return err
	})
	if e, ok := errors.AsType[net.Error](err); !ok || !e.Timeout() {
		t.Errorf("a SYN on an answer's ports: %v", err)
	}
}

// TestProgramIsReplacedWithoutAGap attaches the program again and again while denied packets come.
func TestProgramIsReplacedWithoutAGap(t *testing.T) {
	n := newNode(t)
	n.hold("audit.yaml")
	allowed := n.connect(web[0], client[0])
	n.hold("deny-ingress.yaml")
	ctx, end := context.WithCancel(t.Context())
	var senders sync.WaitGroup
	for range 4 {
		senders.Go(func() {
			for ctx.Err() == nil {
				if n.Passes(n.Packet(client[0], web[0], policytest.Served[3]), false) {
					t.Error("a denied packet passes")
				}
			}
		})
	}
	hooks := []Fact{n.hooksFact()}
	for range 10 {
		n.Must(n.Write(t.Context(), hooks, hooks))
	}
	other := n.reopen(Options{Sizes: policy.Sizes{Flows: small.Sizes.Flows, Peers: 4096}}) // of another layout
	d := n.decide("deny-ingress.yaml")
	old, err := other.Read(t.Context())
	n.Must(err)
	n.Must(other.Write(t.Context(), slices.Collect(maps.Values(policytest.Facts(t, other, d.Parts()))), old))
	end()
	senders.Wait()
	if missing, extra := policytest.Read(t, other, policytest.Facts(t, other, d.Parts())); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
	if !arrives(allowed[0], allowed[1], true) || !arrives(allowed[1], allowed[0], true) {
		t.Error("a connection does not outlive the upgrade")
	}
}

// TestFullMapFailsClosed: while a verdict did not fit, pods whose peer table lacks it are closed, and others are as
// verdict says.
func TestFullMapFailsClosed(t *testing.T) {
	n := newNode(t)
	p := n.reopen(Options{Sizes: policy.Sizes{Flows: small.Sizes.Flows, Verdicts: 1}})
	l := reconcile.New(p, reconcile.Options[model.PolicyPart]{Owner: model.PolicyOwnerOf, Label: model.PolicyLabelOf,
		MaxFacts: 1 << 20, StandIns: model.FailClosed})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { l.Run(ctx) })
	defer running.Wait()
	defer cancel()
	d := n.decide("admin-and-default.yaml")
	l.Change(d.Parts(), nil)
	if err := l.Sync(ctx); err == nil || !strings.Contains(err.Error(), "fl_verdicts") {
		t.Fatalf("a full map: %v", err)
	}
	var passed atomic.Int32
	var wg sync.WaitGroup
	for _, x := range n.Packets(rand.New(rand.NewPCG(5, 6)), 200) {
		wg.Go(func() {
			if n.Passes(x, false) {
				passed.Add(1)
				drops := verdict.Policy(d.Now, x).Verdict == model.VerdictDrop
				if drops && !policytest.Untranslated(d.Now.Node, x.Dst.Addr()) {
					t.Errorf("%v passes", x)
				}
			}
		})
	}
	wg.Wait()
	if passed.Load() == 0 {
		t.Error("one peer table that lacks a verdict closes everything")
	}
}

func TestForgedSourceIsDropped(t *testing.T) {
	n := newNode(t)
	for device, expected := range map[string]bool{"pod2": true, "pod1": false, "": true} {
		d := n.decide("audit.yaml")
		for _, s := range d.Now.Subjects {
			if slices.Contains(client, s.Addr) {
				moved := *s
				moved.Device = device
				d.Now.Subjects[s.Addr] = &moved
			}
		}
		wanted := policytest.Facts(t, n.Plane, d.Parts())
		policytest.Move(t, n.Plane, n.held, wanted)
		n.held = wanted
		before := n.count(policy.Forged)
		for i := range client {
			if n.Passes(n.Packet(client[i], web[i], policytest.Served[0]), expected) != expected {
				t.Errorf("device %q: %s > %s: expected %v", device, client[i], web[i], expected)
			}
		}
		if (n.count(policy.Forged) > before) == expected {
			t.Errorf("device %q: %d packets count as forged", device, n.count(policy.Forged)-before)
		}
	}
}

// TestFragments: those of an allowed datagram pass, those of a denied one don't, without connection tracking.
func TestFragments(t *testing.T) {
	n := newNode(t)
	n.hold("selector-on-port.yaml")
	for i := range web {
		big := echo.Options{Size: 5000}
		if f := n.open(client[i], web[i], echo.Port{Number: 53, Protocol: model.UDP}, big); !answered(f, true) {
			t.Error("a fragmented datagram is lost")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		err := n.Of[db[i]].Do(func() error {
			_, err := echo.Request(ctx, model.UDP, netip.AddrPortFrom(web[i], 53), big)
			return err
		})
		cancel()
		if !errors.Is(err, echo.Timeout) {
			t.Errorf("a denied datagram in fragments: %v", err)
		}
	}
}

// TestErrorsPass: an ICMP error about an allowed connection reaches a pod that lets nothing in.
func TestErrorsPass(t *testing.T) {
	n := newNode(t)
	n.hold("deny-ingress.yaml")
	for i := range web {
		n.Must(n.Of[web[i]].Do(func() error {
			c, err := net.Dial("udp", netip.AddrPortFrom(client[i], 9).String())
			if err != nil {
				return err
			}
			defer c.Close()
			c.Write([]byte("?"))
			c.SetReadDeadline(time.Now().Add(10 * time.Second))
			if _, err := c.Read(make([]byte, 9)); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%s: a closed port: %v", web[i], err)
			}
			return nil
		}))
	}
}

// TestRestartFindsEverything: another plane finds what one has written, also when that was killed, and notices hooks
// that are removed.
func TestRestartFindsEverything(t *testing.T) {
	n := newNode(t)
	n.hold("admin-and-default.yaml")
	p := n.reopen(Options{Sizes: small.Sizes})
	if missing, extra := policytest.Read(t, p, n.held); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
	changed, err := p.Watch(t.Context())
	n.Must(err)
	n.Must(os.Remove(p.hooksFolder() + "/forward4"))
	<-changed
	if missing, _ := policytest.Read(t, p, n.held); len(missing) != 1 || missing[0].Key.Kind != KindHooks {
		t.Errorf("missing %v, want the hooks", missing)
	}
	n.Must(p.Write(t.Context(), []Fact{p.hooksFact()}, nil))
	if missing, extra := policytest.Read(t, p, n.held); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
	p.maps.Set(policy.Writing, true) // it was killed
	if _, extra := policytest.Read(t, p, n.held); len(extra) != 1 {
		t.Errorf("extra %v, want that the maps are incomplete", extra)
	} else {
		n.Must(p.Write(t.Context(), nil, extra))
	}
	if _, extra := policytest.Read(t, p, n.held); len(extra) > 0 {
		t.Errorf("extra %v", extra)
	}
}
