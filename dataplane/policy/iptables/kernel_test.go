package iptables

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/verdict"
)

// run returns what a command prints in the node's namespace.
func run(n *policytest.Network, name string, args ...string) string {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.Context(), 30*time.Second)
	defer cancel()
	var out []byte
	n.Must(n.Node.Do(func() (err error) {
		if out, err = exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
			err = fmt.Errorf("%s %v: %w: %s", name, args, err, out)
		}
		return err
	}))
	return string(out)
}

// ruleset returns the rules and sets of a node as the tools print them, without counters and comments.
func ruleset(n *policytest.Network, v Variant) string {
	var l []string
	for _, tool := range []string{"iptables-" + string(v) + "-save", "ip6tables-" + string(v) + "-save"} {
		for line := range strings.Lines(run(n, tool)) {
			if !strings.HasPrefix(line, "#") {
				chain, _, _ := strings.Cut(line, "[")
				l = append(l, strings.TrimSpace(chain))
			}
		}
	}
	return strings.Join(append(l, run(n, "ipset", "save")), "\n")
}

func eachVariant(t *testing.T, test func(t *testing.T, v Variant)) {
	for _, v := range variants {
		t.Run(string(v), func(t *testing.T) { test(t, v) })
	}
}

func TestKernelReturnsWhatIsWritten(t *testing.T) {
	eachVariant(t, func(t *testing.T, v Variant) {
		n := policytest.Bare(t)
		p := open(n, v)
		run(n, "ipset", "create", "others", "hash:net,iface")
		run(n, "ipset", "add", "others", "10.0.0.0/8,eth0")
		for _, tool := range []string{"iptables-", "ip6tables-"} {
			run(n, tool+string(v), "-A", "FORWARD", "-m", "comment", "--comment", "to -j FLPOLICY-FORWARD", "-j", "ACCEPT")
			run(n, tool+string(v), "-N", "OTHERS")
		}
		others := ruleset(n, v)
		all, none := policytest.Facts(t, p, joined(policytest.Everything())), map[Key]Fact{}
		frame := map[Key]Fact{}
		for k, f := range all {
			if k.Kind != KindElement && k.Kind != KindSubject && k.Kind != KindDevice {
				frame[k] = f
			}
		}
		policytest.Move(t, p, none, all)
		policytest.Move(t, p, all, frame)
		policytest.Move(t, p, frame, all)
		again := open(n, v) // as an agent does that starts anew
		if missing, extra := policytest.Read(t, again, all); len(missing)+len(extra) > 0 {
			t.Errorf("another plane: missing %v, extra %v", missing, extra)
		}
		policytest.Move(t, again, all, none)
		if is := ruleset(n, v); is != others {
			t.Errorf("after everything went: %s\nbefore it came: %s", is, others)
		}
		policytest.Move(t, again, none, all)
		n.Must(p.Clean(t.Context()))
		n.Must(p.Clean(t.Context()))
		if is := ruleset(n, v); is != others {
			t.Errorf("after clean: %s\nbefore: %s", is, others)
		}
	})
}

func TestRenderIsPure(t *testing.T) {
	p := &Plane{}
	names, objects := policytest.Worlds(t)
	for _, name := range names {
		one, two := policytest.Decide(objects[name]), policytest.Decide(objects[name])
		a, b := policytest.Facts(t, p, joined(one.Parts())), policytest.Facts(t, p, joined(two.Parts()))
		if d := append(policytest.Difference(a, b), policytest.Difference(b, a)...); len(d) > 0 {
			t.Errorf("%s: equal parts differ: %v", name, d)
		}
	}
}

func TestWhatOthersChangeIsSeenAndRepaired(t *testing.T) {
	_, objects := policytest.Worlds(t)
	d := policytest.Decide(objects["admin-over-allow.yaml"])
	eachVariant(t, func(t *testing.T, v Variant) {
		n := policytest.Bare(t)
		p := open(n, v)
		wanted := policytest.Facts(t, p, joined(d.Parts()))
		policytest.Move(t, p, nil, wanted)
		changes, err := p.Watch(t.Context())
		n.Must(err)
		var element Key
		table := ""
		for k := range wanted {
			if k.Kind == KindElement && k.Family == 4 && strings.HasSuffix(k.Name, "_na") {
				element = k
			}
			if k.Kind == KindChain && k.Family == 4 && strings.HasPrefix(k.Name, Prefix+"T") {
				table = k.Name
			}
		}
		tool := "iptables-" + string(v)
		for _, harm := range [][]string{
			{"ipset", "del", element.Name, element.Prefix.String()},
			{"ipset", "flush"},
			{tool, "-F", table},
			{tool, "-F", Prefix + "I0"},
			{tool, "-I", "FORWARD", "-j", "ACCEPT"},
			{tool, "-D", "INPUT", "-j", Prefix + "INPUT"},
			{tool, "-A", "OUTPUT", "-j", Prefix + "INPUT"},
			{tool, "-F"},
			{"ip6tables-" + string(v), "-N", Prefix + "X"},
		} {
			for len(changes) > 0 {
				<-changes
			}
			run(n, harm[0], harm[1:]...)
			select {
			case <-changes:
			case <-time.After(20 * time.Second):
				t.Errorf("%v is not seen", harm)
			}
			missing, extra := policytest.Read(t, p, wanted)
			if len(missing)+len(extra) == 0 {
				t.Errorf("%v changes no fact", harm)
			}
			n.Must(p.Write(t.Context(), missing, extra))
			if missing, extra := policytest.Read(t, p, wanted); len(missing)+len(extra) > 0 {
				t.Errorf("%v is not repaired: missing %v, extra %v", harm, missing, extra)
			}
		}
	})
}

// Rules of another owner that the commands can't print stop no change of ours, and stay as they are.
func TestUnprintableRulesOfOthers(t *testing.T) {
	n := policytest.NewNetwork(t)
	p := open(n, NFT)
	_, objects := policytest.Worlds(t)
	allowed, closed := policytest.Facts(t, p, joined(policytest.Decide(objects["none.yaml"]).Parts())),
		policytest.Facts(t, p, joined(policytest.Decide(objects["deny-ingress.yaml"]).Parts()))
	policytest.Move(t, p, nil, allowed)
	others := func() string { return run(n, "nft", "list", "chain", "ip", "filter", "INPUT") }
	const states = "ct state vmap { established : accept, invalid : drop }"
	for _, family := range []string{"ip", "ip6"} {
		for _, chain := range []string{"INPUT", "FORWARD"} {
			run(n, "nft", "add rule "+family+" filter "+chain+" "+states)
		}
		run(n, "nft", "add set "+family+" filter others { type inet_service; }")
	}
	before := others()
	passes := func(what string, want bool) {
		t.Helper()
		for i, src := range policytest.Behind[2] {
			packet := n.Packet(src, policytest.Behind[0][i], echo.Port{Number: 80, Protocol: model.TCP})
			if n.Passes(packet, want) != want {
				t.Errorf("%s: %v passes: %v", what, packet, !want)
			}
		}
	}
	p = open(n, NFT) // as an agent does that starts anew
	policytest.Move(t, p, allowed, closed)
	passes("withdrawn", false)
	policytest.Move(t, p, closed, allowed)
	passes("permitted again", true)
	policytest.Move(t, p, allowed, closed)
	for _, harm := range [][]string{
		{"iptables-nft", "-D", "FORWARD", "-j", Prefix + "FORWARD"},
		{"iptables-nft", "-I", "FORWARD", "-j", "ACCEPT"},
		{"nft", "insert rule ip filter " + Prefix + "FORWARD " + states},
	} {
		run(n, harm[0], harm[1:]...)
		missing, extra := policytest.Read(t, p, closed)
		if len(missing)+len(extra) == 0 {
			t.Errorf("%v changes no fact", harm)
		}
		n.Must(p.Write(t.Context(), missing, extra))
		if missing, extra := policytest.Read(t, p, closed); len(missing)+len(extra) > 0 {
			t.Errorf("%v is not repaired: missing %v, extra %v", harm, missing, extra)
		}
		passes(harm[0]+" "+harm[1], false)
	}
	if is := others(); is != before {
		t.Errorf("%s\nbefore: %s", is, before)
	}
	n.Must(p.Clean(t.Context()))
	if left := run(n, "nft", "list", "ruleset"); strings.Contains(left, Prefix) || strings.Count(left, "vmap") != 4 {
		t.Errorf("after clean: %s", left)
	}
}

func TestUnknownSetsAreReplacedOrNamed(t *testing.T) {
	_, objects := policytest.Worlds(t)
	n := policytest.Bare(t)
	p := open(n, NFT)
	wanted := policytest.Facts(t, p, joined(policytest.Decide(objects["deny-ingress.yaml"]).Parts()))
	run(n, "ipset", "create", "fl_policy4_pods", "bitmap:port", "range", "1-10")
	missing, extra := policytest.Read(t, p, wanted)
	n.Must(p.Write(t.Context(), missing, extra))
	if missing, extra := policytest.Read(t, p, wanted); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
}

// flood sends UDP packets of one flow, over and over, until the test of a change ends. It reports a reply: a first
// packet that is dropped leaves no entry of connection tracking, so each is evaluated.
func flood(n *policytest.Network, p verdict.Packet, until <-chan struct{}, passed func(verdict.Packet)) {
	var c *net.UDPConn
	n.Must(n.Of[p.Src.Addr()].Do(func() (err error) {
		c, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(p.Src), net.UDPAddrFromAddrPort(p.Dst))
		return err
	}))
	defer c.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 1500)
		for {
			if _, err := c.Read(b); err == nil {
				passed(p)
				return
			} else if ne, ok := err.(net.Error); ok && ne.Timeout() {
				return
			}
		}
	})
	for {
		c.Write([]byte("x"))
		select {
		case <-until:
			c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			wg.Wait()
			return
		case <-time.After(200 * time.Microsecond):
		}
	}
}

// during calls f while packets are sent that are dropped before and after.
func during(t *testing.T, n *policytest.Network, r *rand.Rand, before, after *policytest.Decided,
	f func()) (count int) {
	ended := make(chan struct{})
	var wg sync.WaitGroup
	for _, p := range n.Packets(r, 400) {
		if p.Protocol != model.UDP || count == 8 || verdict.Policy(before.Now, p).Verdict != model.VerdictDrop ||
			verdict.Policy(after.Now, p).Verdict != model.VerdictDrop ||
			policytest.Untranslated(before.Now.Node, p.Dst.Addr()) || policytest.Untranslated(after.Now.Node, p.Dst.Addr()) {
			continue
		}
		count++
		wg.Go(func() {
			flood(n, p, ended, func(p verdict.Packet) { t.Errorf("%v passes, which nothing allows", p) })
		})
	}
	f()
	close(ended)
	wg.Wait()
	return count
}

func TestNothingForbiddenPassesWhileRulesChange(t *testing.T) {
	eachVariant(t, func(t *testing.T, v Variant) {
		n := policytest.NewNetwork(t)
		p := open(n, v)
		names, objects := policytest.Worlds(t)
		r := rand.New(rand.NewPCG(3, 4))
		now := policytest.Decide(objects["deny-ingress.yaml"])
		held := policytest.Facts(t, p, joined(now.Parts()))
		policytest.Move(t, p, nil, held)
		sent := 0
		for range 30 {
			next := policytest.Decide(objects[names[r.IntN(len(names))]])
			wanted := policytest.Facts(t, p, joined(next.Parts()))
			sent += during(t, n, r, now, next, func() { policytest.Move(t, p, held, wanted) })
			now, held = next, wanted
		}
		if sent < 50 {
			t.Errorf("%d flows only", sent)
		}
	})
}

func TestWriteMayBeKilled(t *testing.T) {
	eachVariant(t, func(t *testing.T, v Variant) {
		n := policytest.NewNetwork(t)
		p := open(n, v)
		_, objects := policytest.Worlds(t)
		r := rand.New(rand.NewPCG(5, 6))
		worlds := []*policytest.Decided{policytest.Decide(objects["admin-and-default.yaml"]),
			policytest.Decide(objects["selector-on-port.yaml"])}
		policytest.Move(t, p, nil, policytest.Facts(t, p, joined(worlds[0].Parts())))
		killed := 0
		for i := range 30 {
			before, after := worlds[i%2], worlds[(i+1)%2]
			wanted := policytest.Facts(t, p, joined(after.Parts()))
			during(t, n, r, before, after, func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.IntN(40))*time.Millisecond)
				defer cancel()
				missing, extra := policytest.Read(t, p, wanted)
				if err := p.Write(ctx, missing, extra); err != nil {
					killed++
				}
				p = open(n, v) // another process
				missing, extra = policytest.Read(t, p, wanted)
				n.Must(p.Write(t.Context(), missing, extra))
			})
			if missing, extra := policytest.Read(t, p, wanted); len(missing)+len(extra) > 0 {
				t.Fatalf("missing %v, extra %v", missing, extra)
			}
		}
		if t.Logf("%d of 30 writes killed", killed); killed == 0 {
			t.Error("no write was killed")
		}
	})
}

// with returns the parts of a world, of which one is changed.
func with[T model.PolicyPart](d *policytest.Decided, change func(T) model.PolicyPart) []model.PolicyPart {
	parts := d.Parts()
	for i, p := range parts {
		if v, ok := p.(T); ok {
			parts[i] = change(v)
		}
	}
	return parts
}

func TestMarkedConnectionsAreCut(t *testing.T) {
	eachVariant(t, func(t *testing.T, v Variant) {
		n := policytest.NewNetwork(t)
		p := open(n, v)
		_, objects := policytest.Worlds(t)
		none := policytest.Decide(objects["none.yaml"])
		held := policytest.Facts(t, p, joined(none.Parts()))
		policytest.Move(t, p, nil, held)
		client, web := policytest.Behind[2], policytest.Behind[0]
		for i, tool := range []string{"iptables-", "ip6tables-"} {
			for _, to := range []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 80, Protocol: model.UDP}} {
				var f *echo.Flow
				n.Must(n.Of[client[i]].Do(func() (err error) {
					f, err = echo.Open(t.Context(), to.Protocol, netip.AddrPortFrom(web[i], to.Number), echo.Options{})
					return err
				}))
				request := func(wait time.Duration) error {
					ctx, cancel := context.WithTimeout(t.Context(), wait)
					defer cancel()
					_, err := f.Request(ctx)
					return err
				}
				n.Must(request(5 * time.Second))
				cut := policytest.Facts(t, p, joined(with(none, func(v *model.PolicyNode) model.PolicyPart {
					c := *v
					c.CutMark = 1 << 31
					return &c
				})))
				policytest.Move(t, p, held, cut)
				n.Must(request(5 * time.Second))
				rule := []string{"-t", "mangle", "-A", "PREROUTING", "-j", "CONNMARK", "--set-xmark", "0x80000000/0x80000000"}
				run(n, tool+string(v), rule...)
				wait := 150 * time.Millisecond
				if to.Protocol == model.TCP {
					wait = 5 * time.Second
				}
				err, tcp := request(wait), to.Protocol == model.TCP
				if err == nil || strings.Contains(err.Error(), "reset") != tcp {
					t.Errorf("%s %s: %v", web[i], to.Protocol, err)
				}
				run(n, tool+string(v), "-t", "mangle", "-F")
				f.Close()
				policytest.Move(t, p, cut, held)
			}
		}
	})
}

func TestRunningConnectionsSurviveInstallation(t *testing.T) {
	eachVariant(t, func(t *testing.T, v Variant) {
		n := policytest.NewNetwork(t)
		p := open(n, v)
		_, objects := policytest.Worlds(t)
		client, web := policytest.Behind[2], policytest.Behind[0]
		var flows []*echo.Flow
		request := func(f *echo.Flow) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			if _, err := f.Request(ctx); err != nil {
				t.Error(err)
			}
		}
		for i := range client {
			n.Must(n.Of[client[i]].Do(func() error {
				f, err := echo.Open(t.Context(), model.TCP, netip.AddrPortFrom(web[i], 80), echo.Options{})
				flows = append(flows, f)
				return err
			}))
			request(flows[i])
		}
		held := policytest.Facts(t, p, joined(policytest.Decide(objects["deny-ingress.yaml"]).Parts()))
		policytest.Move(t, p, nil, held)
		for i, f := range flows {
			request(f)
			f.Close()
			if n.Passes(n.Packet(client[i], web[i], echo.Port{Number: 80, Protocol: model.TCP}), false) {
				t.Error("a new connection passes")
			}
		}
		q := open(n, v)
		moved := maps.Clone(held)
		if missing, extra := policytest.Read(t, q, moved); len(missing)+len(extra) > 0 {
			t.Errorf("missing %v, extra %v", missing, extra)
		}
	})
}

// swap returns two states of a node. In both the client may not send to web: in the first web uses a peer table that
// doesn't have the client, in the second one that never had it, while the first table has it for db.
func swap() (states [2][]model.PolicyPart) {
	addr := func(i int) netip.Addr { return policytest.Behind[i][0] }
	var tables []*model.PeerTable
	var rulesets []*model.Ruleset
	for i := range 2 {
		t := &model.PeerTable{ID: uint64(i + 1), Default: model.VerdictDrop,
			Otherwise: model.Decision{Verdict: model.VerdictDrop},
			Rules:     []model.Rule{{Peers: []*model.Peers{{}}, Verdict: model.VerdictAccept}}}
		tables = append(tables, t)
		rulesets = append(rulesets, &model.Ruleset{ID: uint64(i + 1), Default: model.PortEntry{PeerTable: t}})
	}
	in, none := &model.Identity{ID: 1}, &model.Identity{ID: 2}
	for i := range states {
		id := []*model.Identity{none, in}[i]
		states[i] = []model.PolicyPart{&model.PolicyNode{},
			&model.Subject{Addr: addr(0), In: [2]*model.Ruleset{nil, rulesets[i]}},
			&model.Subject{Addr: addr(1), In: [2]*model.Ruleset{nil, rulesets[1-i]}},
			&model.PeerVerdict{PeerTable: tables[0], Identity: in},
			&model.Peer{Range: model.Range{First: addr(2), Last: addr(2)}, Identity: id}}
	}
	return states
}

func TestElementsAndChainsChangeInTheSafeOrder(t *testing.T) {
	states := swap()
	eachVariant(t, func(t *testing.T, v Variant) {
		n := policytest.NewNetwork(t)
		p := open(n, v)
		held := policytest.Facts(t, p, joined(states[0]))
		policytest.Move(t, p, nil, held)
		packet := n.Packet(policytest.Behind[2][0], policytest.Behind[0][0], echo.Port{Number: 53, Protocol: model.UDP})
		for i := range 6 {
			ended := make(chan struct{})
			var wg sync.WaitGroup
			wg.Go(func() { flood(n, packet, ended, func(p verdict.Packet) { t.Errorf("change %d: %v passes", i, p) }) })
			wanted := policytest.Facts(t, p, joined(states[(i+1)%2]))
			policytest.Move(t, p, held, wanted)
			held = wanted
			close(ended)
			wg.Wait()
		}
	})
}

func TestManyChainsAreWrittenInPortions(t *testing.T) {
	eachVariant(t, func(t *testing.T, v Variant) {
		n := policytest.Bare(t)
		p := open(n, v)
		all := policytest.Facts(t, p, joined(policies(most)))
		policytest.Move(t, p, nil, all)
		policytest.Move(t, p, all, policytest.Facts(t, p, joined(policies(1))))
		n.Must(p.Clean(t.Context()))
	})
}

// The kernel's nf_tables follows chains to a bounded depth: everything that makes them deep is in one node.
func TestDeepestChainsAreAccepted(t *testing.T) {
	table := func(id uint64, v model.Verdict) *model.PeerTable {
		return &model.PeerTable{ID: id, Default: v, Otherwise: model.Decision{Verdict: v, Report: v != model.VerdictDrop},
			Rules: []model.Rule{{Verdict: model.VerdictDrop, Audit: true},
				{Peers: []*model.Peers{{}}, Verdict: model.VerdictAccept}}}
	}
	var rulesets [model.PolicyStages]*model.Ruleset
	for stage, v := range []model.Verdict{model.VerdictNext, model.VerdictDrop} {
		r := &model.Ruleset{ID: uint64(stage + 1), Default: model.PortEntry{PeerTable: table(uint64(10*stage+10), v)}}
		for _, p := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
			for i := range uint16(300) {
				r.Ports = append(r.Ports, model.PortEntry{Protocol: p, First: 3 * i, Last: 3*i + 1,
					PeerTable: table(uint64(10*stage+10)+uint64(i%3), v)})
			}
		}
		rulesets[stage] = r
	}
	parts := []model.PolicyPart{&model.PolicyNode{CutMark: 1 << 31, Unknown: model.VerdictDrop}}
	for i := range 128 {
		for _, a := range []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i), 1}),
			netip.AddrFrom16([16]byte{0xfd, 14: byte(i), 15: 1})} {
			parts = append(parts, &model.Subject{Addr: a, Device: "veth0", In: rulesets, Out: rulesets})
		}
	}
	for i := range 15 { // of which each name begins the next
		for _, end := range []string{"", "a", "b", "c"} {
			parts = append(parts, &model.Device{Name: ("zzzzzzzzzzzzzzz"[:i] + "y" + end)[:min(15, i+1+len(end))]})
		}
	}
	eachVariant(t, func(t *testing.T, v Variant) {
		n := policytest.Bare(t)
		p := open(n, v)
		policytest.Move(t, p, nil, policytest.Facts(t, p, joined(parts)))
	})
}
