package rules

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/model"
)

// first is a new connection's first packet, sent by the node.
func first(to string) Packet {
	return Packet{Src: netip.AddrPortFrom(nodeAddr, 40000), Dst: netip.MustParseAddrPort(to), Protocol: model.TCP,
		Path: Sent, Out: "host", Node: []netip.Addr{nodeAddr}}
}

// TestTenThousand counts what articles say of 10,000 Services of 10 endpoints, without a kernel.
func TestTenThousand(t *testing.T) {
	const n = 10000
	c := classic.FromParts(parts(n))
	for _, l := range []struct {
		classic.Layout
		each int // rules for a Service in KUBE-SERVICES
	}{{classic.IPTables19, 2}, {classic.IPTables, 1}} {
		r, err := ParseIPTables(l.Save(c), "")
		if err != nil {
			t.Fatal(err)
		}
		count := func(p Packet) Spread {
			c, err := Static(r, p)
			if err != nil {
				t.Fatal(err)
			}
			return c.Rules
		}
		at := func(i int) Spread { return count(first(netip.AddrPortFrom(serviceAddr(i), 80).String())) }
		head, middle, last, none := at(0), at(n/2), at(n-1), count(first("10.200.0.4:8080"))
		p := first("10.200.0.4:8080")
		p.Established = true
		known := count(p)
		t.Logf("%s, %d rules: first %.1f, middle %.1f, last %.1f, no Service %.0f, established %.0f", l.Layout, r.Rules(),
			head.Mean, middle.Mean, last.Mean, none.Mean, known.Mean)
		if want := (n - 1) * l.each; last.Min-head.Min != want || last.Max-head.Max != want {
			t.Errorf("%s: the first meets %+v, the last %+v, want %d more", l.Layout, head, last, want)
		}
		if all := n * l.each; none.Min < all || none.Max > all+20 || last.Min < all || last.Max > all+30 ||
			middle.Min < all/2 || middle.Max > all/2+30 || known.Max > 5 {
			t.Errorf("%s: first %+v, middle %+v, last %+v, none %+v, established %+v", l.Layout, head, middle, last, none, known)
		}
	}
}

// save wraps rules of the filter table's OUTPUT into what iptables-save prints, with a chain OTHER that accepts.
func save(rules ...string) string {
	text := "# by hand\n*filter\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [3:4]\n:OTHER - [0:0]\n"
	for _, r := range rules {
		text += "-A OUTPUT " + r + "\n"
	}
	return text + "-A OTHER -j ACCEPT\nCOMMIT\n"
}

// Each rule either matches, and its packet is dropped, or it doesn't.
func TestMatches(t *testing.T) {
	sets := "create a hash:ip family inet\nadd a 10.96.0.1\ncreate n hash:net family inet\nadd n 10.96.0.0/24\ncreate " +
		"ipp hash:ip,port,ip family inet\nadd ipp 10.96.0.1,tcp:80,172.18.0.2\ncreate ports bitmap:port range 0-1023\nadd " +
		"ports 80-90\ncreate l list:set size 8\nadd l n\ncreate empty hash:ip family inet\n"
	for rule, want := range map[string]bool{
		"":                            true,
		"-d 10.96.0.0/24":             true,
		"-d 10.96.0.0/255.255.255.0":  true,
		"! -d 10.96.0.0/24":           false,
		"-s 10.96.0.0/24":             false,
		"-p udp":                      false,
		"! -p udp":                    true,
		"-p tcp -m tcp --dport 80":    true,
		"-p tcp -m tcp --dport 70:79": false,
		"-p tcp -m tcp ! --dport :79": true,
		"-p tcp -m tcp --sport 40000": true,
		"-p udp -m udp --dport 80":    false,
		"-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN": true,
		"-p tcp -m multiport --dports 22,79:81":         true,
		"-p tcp -m multiport ! --dports 22,80":          false,
		"-p tcp -m multiport --ports 40000":             true,
		"-i eth0":                                       false,
		"-o host":                                       true,
		"-o ho+":                                        true,
		"-m conntrack --ctstate NEW":                    true,
		"-m conntrack ! --ctstate RELATED,ESTABLISHED":  true,
		"-m conntrack --ctstate DNAT":                   false,
		"-m conntrack --ctorigdst 10.96.0.1 --ctorigdstport 80 --ctproto 6":            true,
		"-m state --state ESTABLISHED":                                                 false,
		"-m addrtype --dst-type LOCAL":                                                 false,
		"-m addrtype --src-type LOCAL":                                                 true,
		"-m addrtype ! --src-type LOCAL":                                               false,
		"-m mark --mark 0x4000/0x4000":                                                 false,
		"-m mark ! --mark 0x4000/0x4000":                                               true,
		"-m mark --mark 0x1":                                                           true,
		`-m comment --comment "a \"quoted\" -j ACCEPT ! comment" -d 10.96.0.1/32`:      true,
		"-m set --match-set a dst":                                                     true,
		"-m set ! --match-set a dst":                                                   false,
		"-m set --match-set a src":                                                     false,
		"-m set --match-set n dst":                                                     true,
		"-m set --match-set l dst":                                                     true,
		"-m set --match-set empty dst":                                                 false,
		"-m set --match-set ipp dst,dst,src":                                           true,
		"-m set --match-set ipp src,dst,dst":                                           false,
		"-m set --match-set ports dst":                                                 true,
		"-m set --match-set ports src":                                                 false,
		"-m iprange --dst-range 10.95.0.0-10.97.0.0":                                   true,
		"-m iprange --dst-range 10.96.0.2-10.97.0.0":                                   false,
		"-m recent --rcheck --seconds 9 --name seen --mask 255.255.255.255 --rsource":  true,
		"-m recent --rcheck --seconds 9 --name other --mask 255.255.255.255 --rsource": false,
		"-m recent --set --name other --mask 255.255.255.255 --rsource":                true,
		"-m statistic --mode random --probability 1.0":                                 true,
		"-m statistic --mode random --probability 0":                                   false,
		"-m rpfilter":          true, // routing is not walked
		"-m rpfilter --invert": false,
		`-m bpf --bytecode "4,48 0 0 9,21 0 1 6,6 0 0 1,6 0 0 0"`:  true,
		`-m bpf --bytecode "4,48 0 0 9,21 0 1 17,6 0 0 1,6 0 0 0"`: false,
	} {
		r, err := ParseIPTables(save(rule+" -j DROP"), sets)
		if err != nil {
			t.Errorf("%s: %v", rule, err)
			continue
		}
		p := first("10.96.0.1:80")
		p.Mark = 1
		r.recent = map[listed]bool{{"seen", nodeAddr}: true}
		c, err := Static(r, p)
		if err != nil || len(c.Outcomes) != 1 || (c.Outcomes[0].Verdict == "drop") != want || c.Rules.Max != 1 {
			t.Errorf("%s: %+v, %v; matches: %v", rule, c, err, want)
		}
	}
}

func TestWhatIsNotUnderstoodIsNamed(t *testing.T) {
	for rule, name := range map[string]string{
		"-m hashlimit --hashlimit-upto 1/sec -j DROP":        "hashlimit",
		"-m tcp --tcp-option 5 -j DROP":                      "--tcp-option",
		"-m conntrack --ctexpire 5 -j DROP":                  "--ctexpire",
		"-m conntrack --ctstate ODD -j DROP":                 "ODD",
		"-m set --match-set gone src -j DROP":                "gone",
		"-m statistic --mode random --probability x -j DROP": "statistic",
		"-j TPROXY --on-port 80":                             "TPROXY",
		"-j NOWHERE":                                         "NOWHERE",
		"-j DNAT --to-destination 10.0.0.1-10.0.0.9":         "10.0.0.9",
		"-j MARK --set-mark 1 --or-mark 2":                   "MARK",
		"-p gre -j DROP":                                     "gre",
		"-d 10.0.0.1/255.0.255.0 -j DROP":                    "holes",
		"-f -j DROP":                                         "-f",
		"-m recent --rttl --rcheck --name x -j DROP":         "--rttl",
	} {
		if _, err := ParseIPTables(save(rule), ""); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", rule, err)
		}
	}
	for _, sets := range []string{"create m hash:mac\nadd m 00:11:22:33:44:55\n",
		"create n hash:net\nadd n 10.0.0.0/8 nomatch\n", "create x tree:ip\n", "add x 10.0.0.1\n", "flush\n"} {
		if _, err := ParseIPTables("", sets); err == nil {
			t.Errorf("%q is no error", sets)
		}
	}
}

// TestPaths draws: a jump, a goto, a return and a policy, with three ways of known weights.
func TestPaths(t *testing.T) {
	r, err := ParseIPTables(`*mangle
:OUTPUT DROP [0:0]
:A - [0:0]
:B - [0:0]
-A OUTPUT -m statistic --mode random --probability 0.25000000000 -j A
-A OUTPUT -j MARK --set-xmark 0x2/0x3
-A OUTPUT -m mark --mark 0x2/0x3 -g B
-A OUTPUT -j ACCEPT
-A A -m statistic --mode nth --every 2 --packet 0 -j RETURN
-A A -j ACCEPT
-A B -d 10.0.0.0/8 -j RETURN
-A B -j ACCEPT
COMMIT
`, "")
	if err != nil {
		t.Fatal(err)
	}
	c, err := Static(r, first("10.96.0.1:80"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"0.125: 5 rules, 2 jumps, 1 returns, drop",   // drawn into A, returned, marked, gone to B, from there to the policy
		"0.125: 3 rules, 1 jumps, 0 returns, accept", // drawn into A, accepted
		"0.75: 4 rules, 1 jumps, 0 returns, drop",    // marked, gone to B, from there to the policy
	}
	var got []string
	for _, o := range c.Outcomes {
		got = append(got, fmt.Sprintf("%v: %d rules, %d jumps, %d returns, %s", o.Probability, o.Rules, o.Jumps, o.Returns,
			o.Verdict))
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if m := 0.125*5 + 0.125*3 + 0.75*4; c.Rules != (Spread{m, 3, 5}) {
		t.Errorf("%+v, want a mean of %v", c.Rules, m)
	}
}

func TestCircleEnds(t *testing.T) {
	r, err := ParseIPTables("*filter\n:OUTPUT ACCEPT [0:0]\n:A - [0:0]\n-A OUTPUT -j A\n-A A -g A\nCOMMIT\n", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Static(r, first("10.96.0.1:80")); err == nil || !strings.Contains(err.Error(), "circle") {
		t.Errorf("%v", err)
	}
}

// FuzzParseIPTables searches for texts that are read but can't be walked, or that don't come to an end.
func FuzzParseIPTables(f *testing.F) {
	c := classic.FromParts(parts(2))
	f.Add(classic.IPTables19.Save(c), "")
	f.Add(classic.IPTables.Save(c), "create a hash:ip,port\nadd a 10.0.0.1,tcp:80\ncreate l list:set\nadd l a\n")
	f.Add(save(`-m comment --comment "\\" -m set --match-set a src,dst -j DROP`,
		"-m statistic --mode random --probability 0.5 -g OTHER", `-m bpf --bytecode "2,48 0 0 9,6 0 0 1"`),
		"create a hash:net,port\nadd a 10.0.0.0/8,80\n")
	f.Fuzz(func(t *testing.T, text, sets string) {
		if len(text)+len(sets) > 1<<14 {
			return
		}
		r, err := ParseIPTables(text, sets)
		if err != nil {
			return
		}
		for range 4 { // a few ways, not all
			c := newChance()
			r.walk(&Packet{Src: netip.MustParseAddrPort("10.0.0.2:1"), Dst: netip.MustParseAddrPort("10.96.0.0:80"),
				Protocol: model.TCP, Path: Sent}, c)
		}
	})
}
