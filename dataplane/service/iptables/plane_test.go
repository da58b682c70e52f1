package iptables

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/service/servicetest"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/nfacct"
	"fairlead.dev/fairlead/model"
)

// TestMain returns the legacy commands a lock of their own: the one that they take else is the whole host's, whatever
// the namespace, and another's large table holds it for seconds.
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "fairlead-iptables-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Setenv("XTABLES_LOCKFILE", filepath.Join(dir, "lock"))
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// eachVariant runs a test with both variants, each in a namespace of its own.
func eachVariant(t *testing.T, body func(t *testing.T, p *Plane)) {
	for _, v := range []Variant{Legacy, NFT} {
		t.Run(string(v), func(t *testing.T) {
			netnstest.With(t, func() (*Plane, error) { return NewVariant(v) }, func(p *Plane) {
				body(t, p)
			})
		})
	}
}

// everyPart returns everything, and a health check.
func everyPart() []model.ServicePart {
	return append(everything().Parts(), &model.HealthCheck{
		Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "web"}, Port: 32100})
}

// everything returns a node with every shape of frontend, in both families.
func everything() *model.Snapshot {
	a, pre := netip.MustParseAddr, netip.MustParsePrefix
	s := &model.Snapshot{Frontends: map[model.Entry]*model.Frontend{},
		ServiceNode: &model.ServiceNode{Node: &model.Node{Name: "a",
			Pods: []netip.Prefix{pre("10.244.0.0/16"), pre("10.9.9.9/32"), pre("fd00:244::/48")}}, Localhost: true,
			NodePorts: []model.Range{{First: a("0.0.0.0"), Last: a("255.255.255.255")}, {First: a("::2"), Last: a("fd00::1")}},
			RemoteNodePorts: []netip.Addr{a("10.0.0.2"), a("10.0.0.3"), a("10.0.1.4"), a("192.0.2.5"), a("203.0.113.6"),
				a("fd00::2")}}}
	id := uint64(1 << 60)
	pool := func(n int, affinity time.Duration, base netip.Addr, p model.Protocol) *model.Pool {
		id++
		l := &model.Pool{ID: id, Name: "p", Affinity: affinity, Protocol: p,
			Scheduler: []model.Scheduler{model.Random, model.RoundRobin}[id%2]}
		for i := range n {
			l.Backends = append(l.Backends, model.Backend{Addr: netip.AddrPortFrom(base, uint16(i+1)), Local: i%2 == 0,
				Weight: uint16(id % 3 * uint64(i%5))})
		}
		return l
	}
	for _, f := range []struct{ vip, any, backend string }{{"10.96.0.1", "0.0.0.0", "10.244.0.1"},
		{"fd00:96::1", "::", "fd00:244::1"}} {
		port, vip := uint16(0), a(f.vip)
		for _, n := range []int{0, 1, 10, 60} {
			for _, affinity := range []time.Duration{0, time.Hour} {
				for _, sources := range [][]netip.Prefix{nil, {},
					{netip.PrefixFrom(vip, 16).Masked(), netip.PrefixFrom(a(f.backend), a(f.backend).BitLen())}} {
					for _, addr := range []netip.Addr{vip, a(f.any)} {
						port++
						protocol := []model.Protocol{model.TCP, model.UDP, model.SCTP}[port%3]
						in := model.Target{Pool: pool(n, affinity, a(f.backend), protocol)}
						out := in
						if port%3 == 0 {
							out = model.Target{Pool: pool(n/2, affinity, a(f.backend), protocol), Empty: model.Drop}
						}
						e := model.Entry{Addr: addr, Port: port, Protocol: protocol}
						s.Frontends[e] = &model.Frontend{Entry: e, Internal: in, External: out, Masquerade: model.Origins(port % 8),
							Sources: sources, Remote: e.AnyAddr() && port%4 < 2}
					}
					if n > 0 {
						vip = vip.Next()
					}
				}
			}
		}
	}
	return s
}

// holds returns how the kernel differs from facts.
func holds(t *testing.T, p *Plane, want []Fact) string {
	held, err := p.Read(t.Context())
	if err != nil {
		return err.Error()
	}
	if missing, extra := servicetest.Difference(want, held),
		servicetest.Difference(held, want); len(missing)+len(extra) > 0 {
		return fmt.Sprintf("missing %q, extra %q", missing, extra)
	}
	return ""
}

func TestKernelReturnsWhatIsWritten(t *testing.T) {
	eachVariant(t, func(t *testing.T, p *Plane) {
		want := servicetest.Facts(t, p, everyPart())
		for _, s := range []struct {
			name           string
			put, del, want []Fact
		}{
			{"write", want, nil, want},
			{"replace", want, want, want},
			{"remove", nil, want, nil},
			{"write again", want, nil, want},
		} {
			if err := p.Write(t.Context(), s.put, s.del); err != nil {
				t.Errorf("%s: %v", s.name, err)
				return
			}
			if wrong := holds(t, p, s.want); wrong != "" {
				t.Errorf("%s: %s", s.name, wrong)
				return
			}
		}
		for _, name := range []string{"iptables", "ip6tables"} {
			if out, err := exec.Command(name+"-"+string(p.Variant()), "-t", "nat", "-A", "PREROUTING", "-j",
				"ACCEPT").CombinedOutput(); err != nil {
				t.Errorf("%s: %v: %s", name, err, out)
			}
		}
		if err := p.Clean(t.Context()); err != nil {
			t.Error(err)
		}
		if wrong := holds(t, p, nil); wrong != "" {
			t.Errorf("after clean: %s", wrong)
		}
		for _, counter := range []string{invalidDropped, localhostAccepted} {
			if _, err := nfacct.Packets(counter); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("after clean: counter %s: %v", counter, err)
			}
		}
		if v, err := p.localnet.Get(); v != "0" || err != nil {
			t.Errorf("after clean: %s is %q, %v", routeLocalnet, v, err)
		}
		for _, name := range []string{"iptables", "ip6tables"} {
			out, err := exec.Command(name+"-"+string(p.Variant()), "-t", "nat", "-D", "PREROUTING", "-j",
				"ACCEPT").CombinedOutput()
			if err != nil {
				t.Errorf("another's rule did not outlive clean: %v: %s", err, out)
			}
		}
	})
}

func TestMark(t *testing.T) {
	for _, mark := range []uint32{0, 3} {
		if _, err := NewMarked(NFT, mark); err == nil {
			t.Errorf("mark %#x is taken", mark)
		}
	}
	netnstest.With(t, func() (*Plane, error) { return NewVariant(NFT) }, func(first *Plane) {
		want := servicetest.Facts(t, first, everything().Parts())
		if err := first.Write(t.Context(), want, nil); err != nil {
			t.Error(err)
			return
		}
		second, err := NewMarked(NFT, 0x10)
		if err != nil {
			t.Error(err)
			return
		}
		defer second.Close()
		held, err := second.Read(t.Context())
		if err != nil || len(servicetest.Difference(held, want)) == 0 {
			t.Errorf("rules with another mark are taken for ours: %v", err)
		}
		if err := second.Write(t.Context(), servicetest.Difference(want, held),
			servicetest.Difference(held, want)); err != nil {
			t.Error(err)
		}
		if wrong := holds(t, second, want); wrong != "" {
			t.Error(wrong)
		}
	})
}

// TestForeignRulesArePreserved holds that what others have in the same chains is never touched, and that ours comes
// before it.
func TestForeignRulesArePreserved(t *testing.T) {
	eachVariant(t, func(t *testing.T, p *Plane) {
		run := func(args ...string) string {
			out, err := exec.Command("iptables-"+string(p.Variant()), args...).CombinedOutput()
			if err != nil {
				t.Errorf("%v: %v: %s", args, err, out)
			}
			return string(out)
		}
		run("-t", "nat", "-N", "THEIRS")
		run("-t", "nat", "-A", "THEIRS", "-d", "192.0.2.1", "-j", "ACCEPT")
		run("-t", "nat", "-A", "PREROUTING", "-m", "comment", "--comment", "not for -j FAIRLEAD-DROP", "-j", "THEIRS")
		run("-t", "nat", "-A", "PREROUTING", "-j", "THEIRS")
		all := servicetest.Facts(t, p, servicetest.Services(30))
		if err := p.Write(t.Context(), all, nil); err != nil {
			t.Error(err)
		}
		rules := strings.Split(strings.TrimSpace(run("-t", "nat", "-S", "PREROUTING")), "\n")
		if want := "-A PREROUTING -j THEIRS"; rules[len(rules)-1] != want || len(rules) < 3 {
			t.Errorf("PREROUTING: %q", rules)
		}
		if err := p.Write(t.Context(), nil, all); err != nil {
			t.Error(err)
		}
		want := "-P PREROUTING ACCEPT\n-P INPUT ACCEPT\n-P OUTPUT ACCEPT\n-P POSTROUTING ACCEPT\n-N THEIRS\n-A PREROUTING " +
			"-m comment --comment \"not for -j FAIRLEAD-DROP\" -j THEIRS\n-A PREROUTING -j THEIRS\n-A THEIRS -d 192.0.2.1/32 " +
			"-j ACCEPT\n"
		if left := run("-t", "nat", "-S"); left != want {
			t.Errorf("left is:\n%s", left)
		}
	})
}

// Rules of another owner that the commands can't print stop no change of ours, and stay as they are: after a change by
// this agent, by one that starts anew, and when someone removes what leads to us.
func TestUnprintableRulesOfOthers(t *testing.T) {
	netnstest.Do(t, func() {
		p, err := NewVariant(NFT)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { p.Close() }()
		run := func(args ...string) string {
			out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
			if err != nil {
				t.Errorf("%v: %v: %s", args, err, out)
			}
			return string(out)
		}
		all, few := servicetest.Facts(t, p, everyPart()), servicetest.Facts(t, p, servicetest.Services(3))
		move := func(what string, from, to []Fact) {
			t.Helper()
			err := p.Write(t.Context(), servicetest.Difference(to, from), servicetest.Difference(from, to))
			if wrong := holds(t, p, to); wrong != "" || err != nil {
				t.Errorf("%s: %v, %s", what, err, wrong)
			}
		}
		move("alone", nil, all)
		for _, table := range []string{"ip raw", "ip nat", "ip filter", "ip6 nat", "ip6 filter"} {
			_, name, _ := strings.Cut(table, " ")
			run("nft", "add chain "+table+" others")
			for _, chain := range append([]string{"others"}, builtIn[name]...) {
				run("nft", fmt.Sprintf("add rule %s %s ct state vmap { invalid : drop }", table, chain))
			}
		}
		theirs := strings.Count(run("nft", "list", "ruleset"), "vmap")
		move("fewer", all, few)
		p.Close()
		if p, err = NewVariant(NFT); err != nil {
			t.Error(err)
			return
		}
		if wrong := holds(t, p, few); wrong != "" {
			t.Errorf("started anew: %s", wrong)
		}
		move("more", few, all)
		run("iptables-nft", "-t", "nat", "-D", "PREROUTING", "1")
		held, err := p.Read(t.Context())
		if err != nil || len(servicetest.Difference(all, held)) == 0 {
			t.Errorf("what leads to us is gone, and read as if it were there: %v", err)
		}
		move("repaired", held, all)
		if n := strings.Count(run("nft", "list", "ruleset"), "vmap"); n != theirs {
			t.Errorf("%d rules of others, there were %d", n, theirs)
		}
		if err := p.Clean(t.Context()); err != nil {
			t.Error(err)
		}
		if left := run("nft", "list", "ruleset"); strings.Count(left, "vmap") != theirs || strings.Contains(left, Prefix) {
			t.Errorf("after clean: %s", left)
		}
	})
}

// TestManyPools writes more pools than one restore of the nft variant is given, and then others in their place.
func TestManyPools(t *testing.T) {
	eachVariant(t, func(t *testing.T, p *Plane) {
		const n = 2*most + 10
		first := servicetest.Facts(t, p, servicetest.Services(n))
		var other []Fact
		for i := range n {
			other = append(other, p.Render(servicetest.Pool(i, 1))...)
		}
		before := slices.DeleteFunc(slices.Clone(first), func(f Fact) bool { return f.Key.Kind != KindPool })
		second := append(slices.DeleteFunc(slices.Clone(first), func(f Fact) bool { return f.Key.Kind == KindPool }),
			other...)
		for _, step := range []struct{ put, del, want []Fact }{{first, nil, first}, {other, before, second},
			{nil, second, nil}} {
			if err := p.Write(t.Context(), step.put, step.del); err != nil {
				t.Error(err)
				return
			}
			if wrong := holds(t, p, step.want); wrong != "" {
				t.Errorf("%.1000s", wrong)
				return
			}
		}
	})
}

// TestGuardOutlivesTheSysctl holds that packets to loopback addresses are kept out as long as the kernel routes them
// for us, whatever is written when.
func TestGuardOutlivesTheSysctl(t *testing.T) {
	eachVariant(t, func(t *testing.T, p *Plane) {
		guarded := func() bool {
			out, err := exec.Command("iptables-"+string(p.Variant()), "-t", "raw", "-S").CombinedOutput()
			if err != nil {
				t.Errorf("%v: %s", err, out)
			}
			return strings.Contains(string(out), chainGuard)
		}
		write := func(put, del []Fact) {
			if err := p.Write(t.Context(), put, del); err != nil {
				t.Error(err)
			}
		}
		with, without := p.Render(&model.ServiceNode{Node: &model.Node{}, Localhost: true}),
			p.Render(&model.ServiceNode{Node: &model.Node{}})
		write(with, nil)
		sysctl := servicetest.Difference(with, without)
		sysctl = slices.DeleteFunc(sysctl, func(f Fact) bool { return f.Key.Kind != KindSysctl })
		write(without, slices.DeleteFunc(slices.Clone(with), func(f Fact) bool { return f.Key.Kind == KindSysctl }))
		if v, err := p.localnet.Get(); err != nil || v != "1" || !guarded() {
			t.Errorf("the sysctl is %q, %v, and guarded is %t", v, err, guarded())
		}
		if wrong := holds(t, p, append(slices.Clone(without), sysctl...)); wrong != "" {
			t.Error(wrong)
		}
		write(nil, sysctl)
		if v, err := p.localnet.Get(); err != nil || v != "0" || guarded() {
			t.Errorf("after it has gone, the sysctl is %q, %v, and guarded is %t", v, err, guarded())
		}
	})
}

// TestOneFamilyAlone holds that a family whose commands don't work leaves the other be, and that writes say which.
func TestOneFamilyAlone(t *testing.T) {
	path := os.Getenv("PATH")
	for _, verb := range []string{"save", "restore"} {
		eachVariant(t, func(t *testing.T, p *Plane) {
			dir, name := t.TempDir(), "ip6tables-"+string(p.Variant())+"-"+verb
			if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\ncat >/dev/null; echo broken >&2; exit 3\n"),
				0o755); err != nil {
				t.Error(err)
			}
			all := servicetest.Facts(t, p, everyPart())
			six := slices.DeleteFunc(slices.Clone(all), func(f Fact) bool { return f.Key.Family != iptables.IPv6 })
			if err := p.Write(t.Context(), six, nil); err != nil {
				t.Error(err)
			}
			os.Setenv("PATH", dir+":"+path)
			defer os.Setenv("PATH", path)
			if _, err := p.Read(t.Context()); err != nil {
				t.Errorf("%s does not work, and nothing can be read: %v", name, err)
			}
			if err := p.Write(t.Context(), servicetest.Difference(all, six), nil); err != nil {
				t.Error(err)
			}
			held, err := p.Read(t.Context())
			if missing := servicetest.Difference(servicetest.Difference(all, six), held); len(missing) > 0 || err != nil {
				t.Errorf("missing %q, %v", missing, err)
			}
			if err := p.Write(t.Context(), nil, six); err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("a write by %s says %v", name, err)
			}
			if err := p.Clean(t.Context()); err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("cleaning leaves what %s can't reach, and says %v", name, err)
			}
			os.Setenv("PATH", path)
			if err := p.Clean(t.Context()); err != nil {
				t.Error(err)
			}
			if wrong := holds(t, p, nil); wrong != "" {
				t.Error(wrong)
			}
		})
	}
}

// Rules that accept must not come before those of a policy engine.
func TestPoliciesStayFirst(t *testing.T) {
	for _, v := range []Variant{NFT, Legacy} {
		netnstest.With(t, func() (*Plane, error) { return NewVariant(v) }, func(p *Plane) {
			if _, err := p.Read(t.Context()); err != nil {
				t.Error(err)
			}
			policy := "*filter\n:FLPOLICY-FORWARD - [0:0]\n-A FORWARD -j FLPOLICY-FORWARD\n-A FORWARD -j ACCEPT\nCOMMIT\n"
			if err := p.conn.Restore(t.Context(), iptables.IPv4, []byte(policy)); err != nil {
				t.Error(err)
			}
			node := p.Render(&model.ServiceNode{Node: &model.Node{Name: "a"}})
			for range 2 { // written, and written anew
				if err := errors.Join(p.Write(t.Context(), node, nil), p.Write(t.Context(), nil, node)); err != nil {
					t.Error(err)
				}
			}
			if err := p.Write(t.Context(), node, nil); err != nil {
				t.Error(err)
			}
			is, err := p.conn.Save(t.Context(), iptables.IPv4, "filter")
			if err != nil {
				t.Error(err)
				return
			}
			l := is["filter"].Rules["FORWARD"]
			if len(l) < 3 || l[0] != "-j FLPOLICY-FORWARD" || l[len(l)-1] != "-j ACCEPT" {
				t.Errorf("%s: FORWARD %q", v, l)
			}
		})
	}
}
