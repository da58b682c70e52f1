package link

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// policy dials a test's namespace.
func policy(t *testing.T, do func(func() error) error) (p *Policy) {
	t.Helper()
	check(t, do(func() (err error) { p, err = DialPolicy(); return err }))
	t.Cleanup(func() { p.Close() })
	return p
}

func TestPolicyHoldsWhatIsApplied(t *testing.T) {
	ns, c := space(t)
	p := policy(t, ns.Do)
	check(t, c.Up(1))
	const owner, table = 0xee, 0xfa000123
	var changes, gone []Change
	var ways []Way
	var rules []Rule
	for i := range 300 { // more than one batch
		a := netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)})
		ways = append(ways, Way{Owner: owner, Table: table, To: netip.PrefixFrom(a, 32), Dev: 1, Local: i%2 == 0})
	}
	ways = append(ways, Way{Owner: owner, Table: table + 1, To: netip.MustParsePrefix("fd00:9::/64"), Dev: 1, Local: true})
	for _, six := range []bool{false, true} {
		from, to := netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("10.8.0.1/32")
		if six {
			from, to = netip.MustParsePrefix("fd00:9::/64"), netip.MustParsePrefix("fd00:8::1/128")
		}
		rules = append(rules,
			Rule{Owner: owner, Priority: 50, Six: six, Protocol: 6, ToPort: PortRange{80, 80}, Table: table},
			Rule{Owner: owner, Priority: 51, Six: six, Protocol: 17, From: from, To: to, FromPort: 7, ToPort: PortRange{1, 65534}, Table: 7},
			Rule{Owner: owner, Priority: 52, Six: six, Input: "lo", Goto: 53},
			Rule{Owner: owner, Priority: 53, Six: six})
	}
	for i := range ways {
		changes = append(changes, Change{Way: &ways[i]})
		gone = append(gone, Change{Way: &Way{Owner: owner, Table: ways[i].Table, To: ways[i].To}, Gone: true})
	}
	for i := range rules {
		changes = append(changes, Change{Rule: &rules[i]})
		gone = append(gone, Change{Rule: &rules[i], Gone: true})
	}
	check(t, p.Apply(changes), p.Apply(changes))
	heldWays, err := p.Ways(owner)
	heldRules, err2 := p.Rules(owner)
	check(t, err, err2)
	if len(heldWays) != len(ways) || fmt.Sprint(heldRules) != fmt.Sprint(rules) {
		t.Errorf("%d of %d routes, rules\n%v, want\n%v", len(heldWays), len(ways), heldRules, rules)
	}
	want := map[Way]bool{}
	for _, w := range ways {
		want[w] = true
	}
	for _, w := range heldWays {
		if !want[w] {
			t.Errorf("route %+v is none of ours", w)
		}
	}
	check(t, p.Apply(gone), p.Apply(gone))
	heldWays, err = p.Ways(owner)
	heldRules, err2 = p.Rules(owner)
	if check(t, err, err2); len(heldWays)+len(heldRules) != 0 {
		t.Errorf("left: %v %v", heldWays, heldRules)
	}
	bad := Change{Rule: &Rule{Owner: owner, Priority: 50, ToPort: PortRange{1, 65535}, Table: 7}}
	if err := p.Apply([]Change{bad, changes[0]}); err == nil || !strings.Contains(err.Error(), "rule 50") {
		t.Errorf("a rule that the kernel refuses: %v", err)
	}
	if heldWays, _ = p.Ways(owner); len(heldWays) != 1 {
		t.Error("a refusal keeps what comes after it from being applied")
	}
}

func TestPolicyTellsOfOthersChanges(t *testing.T) {
	ns, c := space(t)
	p := policy(t, ns.Do)
	const owner = 0xee
	ctx, stop := context.WithCancel(t.Context())
	var signals <-chan struct{}
	var main atomic.Bool
	check(t, c.Up(1), ns.Do(func() (err error) { signals, err = p.Watch(ctx, owner, "lo", main.Load); return err }))
	run := func(command string) {
		t.Helper()
		words := strings.Fields(command)
		check(t, ns.Do(func() error { return exec.Command(words[0], words[1:]...).Run() }))
	}
	quiet := func(what string) {
		t.Helper()
		select {
		case <-signals:
			t.Errorf("%s is told", what)
		case <-time.After(50 * time.Millisecond):
		}
	}
	quiet("nothing")
	check(t, p.Apply([]Change{{Rule: &Rule{Owner: owner, Priority: 50, Table: 7}}}))
	quiet("a change of its own")
	run("ip route add 10.8.0.0/16 dev lo")
	quiet("a route of the main table that nobody asks for")
	main.Store(true)
	for _, command := range []string{"ip rule del pref 50", "ip route add 10.9.0.0/16 dev lo table 7 proto 0xee",
		"ip addr add 10.9.9.9/32 dev lo", "ip route add 10.8.7.0/24 dev lo", "ip route del 10.8.7.0/24 dev lo",
		"ip -6 route add fd00:8::/64 dev lo", "ip route add 10.8.7.6/32 dev lo"} {
		run(command)
		select {
		case <-signals:
		case <-time.After(10 * time.Second):
			t.Errorf("%s is not told", command)
		}
	}
	reached, err := p.Reached()
	var to []string
	for _, r := range reached {
		if !r.To.Addr().IsLoopback() {
			to = append(to, r.To.String()+" "+r.Interface)
		}
	}
	if want := "fd00:8::/64 lo,10.8.7.6/32 lo,10.8.0.0/16 lo"; err != nil || strings.Join(to, ",") != want {
		t.Errorf("the main table's routes are %s, %v; want %s", strings.Join(to, ","), err, want)
	}
	own, err := p.Addresses()
	if check(t, err); !own[netip.MustParseAddr("10.9.9.9")] {
		t.Errorf("addresses are %v", own)
	}
	stop()
	for range signals {
	}
}

func TestRulesSayThatTheyLookAtMore(t *testing.T) {
	ns, _ := space(t)
	p := policy(t, ns.Do)
	const owner = 0xee
	for _, more := range []string{"", "fwmark 5", "oif lo", "uidrange 5-7", "tos 0x10", "not"} {
		check(t, ns.Do(func() error {
			args := append([]string{"rule", "add"}, strings.Fields(more+" dport 80 ipproto tcp lookup 7 pref 60 protocol 238")...)
			if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
				return fmt.Errorf("%q: %w: %s", args, err, out)
			}
			return nil
		}))
		rules, err := p.Rules(owner)
		check(t, err)
		want := Rule{Owner: owner, Priority: 60, Protocol: 6, ToPort: PortRange{80, 80}, Table: 7, More: more != ""}
		if len(rules) != 1 || rules[0] != want {
			t.Errorf("%q: rules %v, want %v", more, rules, want)
		}
		check(t, p.Apply([]Change{{Rule: &want, Gone: true}}))
	}
}
