package policytest

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/nflog"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/verdict"
)

// Suite is what every policy engine must hold to, tried by packets.
type Suite[K dataplane.Key] struct {
	Open func(*Network) Engine[K] // opens the plane of the network's node

	LogGroup uint16 // the nflog group of denials and audits
	// what logged packets begin with
	PrefixDeny, PrefixAudit, PrefixForged string
	// Logged returns a function that returns what was logged since, by those prefixes; nil: LogGroup has it.
	Logged func(*Network, Engine[K]) func() []string

	Cuts         bool         // it cuts connections by model.PolicyNode.CutMark
	EndMidstream func() error // ends the time in which running connections pass; nil: there is no such time
}

// engine is a plane of a network's node, and what it holds.
type engine[K dataplane.Key] struct {
	*testing.T
	*Network
	Engine[K]
	held map[K]dataplane.Fact[K, string]
}

// open returns a node with a plane that holds nothing.
func (s Suite[K]) open(t *testing.T) *engine[K] {
	n := NewNetwork(t)
	return &engine[K]{t, n, s.Open(n), nil}
}

// hold makes the plane hold what a world comes to.
func (e *engine[K]) hold(d *Decided) (facts int) {
	e.T.Helper()
	parts := d.Parts()
	if j, ok := any(e.Engine).(dataplane.Joiner[model.PolicyPart]); ok {
		parts, _ = j.Join()(parts, nil)
	}
	wanted := Facts(e.T, e.Engine, parts)
	Move(e.T, e.Engine, e.held, wanted)
	e.held = wanted
	return len(wanted)
}

// Run runs every test of the suite.
func (s Suite[K]) Run(t *testing.T) {
	t.Run("PacketsAreTreatedAsVerdictSays", s.packets)
	t.Run("OtherProtocolsFollowTheDefault", s.otherProtocols)
	t.Run("EstablishedConnectionsGoOn", s.established)
	t.Run("DenialsAndAuditsAreLogged", s.logged)
	t.Run("ManyPoliciesAreOneRuleset", s.many)
	t.Run("ForgedSourcesAreDropped", s.forged)
	t.Run("PodsDevicesAdmitTheirAddressesAlone", s.Sources)
	t.Run("PodsDevicesAdmitNothingOfOthersConnections", s.Injections)
	t.Run("ForwardedToTheProxyIsDelivered", s.proxied)
	t.Run("AddressOfNodeAndPodIsTheNodes", s.both)
	t.Run("RefusedFactsFailClosed", s.refused)
	t.Run("ChangesOpenNothing", s.changes)
	if s.Cuts {
		t.Run("MarkedConnectionsAreCut", s.cut)
	}
	if s.EndMidstream != nil {
		t.Run("RunningConnectionsSurvive", s.midstream)
	}
}

func (s Suite[K]) packets(t *testing.T) {
	e := s.open(t)
	names, objects := Worlds(t)
	r := rand.New(rand.NewPCG(1, 2))
	for _, name := range names {
		d := Decide(objects[name])
		facts := e.hold(d)
		accepted, dropped := e.judge(name, d.Now, e.Packets(r, 150))
		t.Logf("%s: %d facts, %d packets accepted, %d dropped", name, facts, accepted, dropped)
	}
	e.Must(e.Clean(t.Context()))
	if missing, extra := Read(t, e.Engine, nil); len(missing)+len(extra) > 0 {
		t.Errorf("after clean: %v", extra)
	}
}

// judge sends packets, which are treated as verdict says, and returns how many that accepts and drops.
func (n *Network) judge(name string, s *model.Policies, packets []verdict.Packet) (accepted, dropped int32) {
	var fates [2]atomic.Int32
	var wg sync.WaitGroup
	for _, p := range packets {
		wg.Go(func() {
			o := verdict.Policy(s, p)
			if Untranslated(s.Node, p.Dst.Addr()) && !verdict.Forged(s, p) {
				o.Verdict, o.Reason = model.VerdictAccept, "delivered to the node before its translation"
			}
			fates[o.Verdict].Add(1)
			if expected := o.Verdict == model.VerdictAccept; n.Passes(p, expected) != expected {
				n.Errorf("%s: %v: not so: %s, %s", name, p, o.Verdict, o.Reason)
			}
		})
	}
	wg.Wait()
	return fates[model.VerdictAccept].Load(), fates[model.VerdictDrop].Load()
}

// Untranslated reports whether a is evaluated only after translation. All such addresses here are the node's.
func Untranslated(n *model.PolicyNode, a netip.Addr) bool {
	return slices.ContainsFunc(n.PreDNAT, func(r netip.Prefix) bool { return r.Contains(a) })
}

func (s Suite[K]) otherProtocols(t *testing.T) {
	e := s.open(t)
	_, objects := Worlds(t)
	for _, world := range []string{"none.yaml", "selector-on-port.yaml", "ip-block.yaml"} {
		d := Decide(objects[world])
		e.hold(d)
		for i, web := range Behind[0] {
			for _, src := range []netip.Addr{Own[i], Behind[1][i], Behind[2][i], Addresses("198.51.100.7", "2001:db8::7")[i]} {
				p := verdict.Packet{Src: netip.AddrPortFrom(src, 0), Dst: netip.AddrPortFrom(web, 0), Protocol: 1}
				expected, wait := verdict.Policy(d.Now, p).Verdict == model.VerdictAccept, 150*time.Millisecond
				if expected {
					wait = 5 * time.Second
				}
				if e.Ping(src, web, wait) != expected {
					t.Errorf("%s: ping %s > %s: expected %v", world, src, web, expected)
				}
			}
		}
	}
}

func (s Suite[K]) established(t *testing.T) {
	e := s.open(t)
	_, objects := Worlds(t)
	e.hold(Decide(objects["audit.yaml"])) // which drops nothing
	client, web := Behind[2], Behind[0]
	var flows []*echo.Flow
	for i := range client {
		for _, to := range []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 80, Protocol: model.UDP}} {
			e.Must(e.Of[client[i]].Do(func() error {
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
			if _, err := f.Request(ctx); err != nil {
				t.Error(err)
			}
			cancel()
		}
	}
	request()
	e.hold(Decide(objects["deny-ingress.yaml"]))
	request()
	for _, f := range flows {
		f.Close()
	}
	if e.Passes(e.Packet(client[0], web[0], Served[0]), false) {
		t.Error("a new connection passes")
	}
}

// both has a pod's address be one of the node's: what goes there is not evaluated, what the pod sends is.
func (s Suite[K]) both(t *testing.T) {
	e := s.open(t)
	_, objects := Worlds(t)
	d := Decide(objects["admin-and-default.yaml"])
	node := *d.Now.Node
	node.Addresses = slices.Concat(node.Addresses, Behind[0])
	d.Now.Node = &node
	e.hold(d)
	packets := e.Packets(rand.New(rand.NewPCG(9, 10)), 40)
	for i, web := range Behind[0] {
		packets = append(packets, e.Packet(Behind[2][i], web, Served[3]), e.Packet(web, Behind[2][i], Served[3]),
			e.Packet(unlisted[2*i], web, Served[3]))
	}
	e.judge("web's addresses are the node's", d.Now, packets)
}

func (s Suite[K]) logged(t *testing.T) {
	e := s.open(t)
	_, objects := Worlds(t)
	since, _ := s.log(e)
	for world, want := range map[string][]string{"none.yaml": nil, "deny-ingress.yaml": {s.PrefixDeny},
		"audit.yaml": {s.PrefixAudit, s.PrefixAudit}} {
		d := Decide(objects[world])
		e.hold(d)
		p := e.Packet(Behind[2][1], Behind[0][1], Served[0])
		e.Passes(p, verdict.Policy(d.Now, p).Verdict == model.VerdictAccept)
		if got := since(); !slices.Equal(got, want) {
			t.Errorf("%s: logged %q, want %q", world, got, want)
		}
	}
}

// log returns what returns what was logged since, by its prefixes, and what does once there is something, or after five
// seconds.
func (s Suite[K]) log(e *engine[K]) (since, await func() []string) {
	logged := s.Logged
	if logged == nil {
		logged = s.nflog
	}
	since = logged(e.Network, e.Engine)
	return since, func() (l []string) {
		for end := time.Now().Add(5 * time.Second); len(l) == 0 && time.Now().Before(end); l = since() {
			time.Sleep(time.Millisecond)
		}
		return l
	}
}

// nflog returns a function that returns the prefixes of what LogGroup has.
func (s Suite[K]) nflog(n *Network, _ Engine[K]) func() []string {
	var log *nflog.Log
	n.Must(n.Node.Do(func() (err error) {
		log, err = nflog.Listen(s.LogGroup, nflog.Headers)
		return err
	}))
	n.Cleanup(func() { log.Close() })
	return func() (got []string) {
		entries, err := log.Receive()
		n.Must(err)
		for _, e := range entries {
			got = append(got, e.Prefix)
		}
		return got
	}
}
