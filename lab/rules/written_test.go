package rules

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"fairlead.dev/fairlead/model"
)

// writtenIPTables is what no data plane here writes: all tables, sets, jumps, gotos and returns of every kind.
const writtenIPTables = `*raw
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A PREROUTING -p udp -j ACCEPT
-A PREROUTING -p tcp -m tcp --dport 9 -j DROP
-A OUTPUT -o lo -j ACCEPT
COMMIT
*mangle
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:marks - [0:0]
:more - [0:0]
-A PREROUTING -j marks
-A OUTPUT -g marks
-A OUTPUT -j ACCEPT
-A POSTROUTING -m mark --mark 0x10/0xf0 -j RETURN
-A POSTROUTING -m mark --mark 0x30/0xf0 -j ACCEPT
-A marks -s 10.128.0.0/9 -j MARK --set-xmark 0x10/0xf0
-A marks ! -s 10.128.0.0/9 -j MARK --or-mark 0x30
-A marks -m mark ! --mark 0x10/0xf0 -g more
-A marks -m comment --comment "never at the node's own" -j RETURN
-A marks -j DROP
-A more -m set ! --match-set servers dst -j RETURN
-A more -m set --match-set wide dst,dst -j RETURN
-A more -j MARK --set-xmark 0x31/0xff
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
:pick - [0:0]
:one - [0:0]
:two - [0:0]
-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -i pod -o host -p tcp -m multiport --dports 22,8000:8079 -j DROP
-A FORWARD -m addrtype --dst-type LOCAL -j DROP
-A FORWARD -m iprange --dst-range 10.200.0.1-10.200.0.9 -j pick
-A OUTPUT -m conntrack --ctstate NEW -j pick
-A OUTPUT -m addrtype --src-type LOCAL ! --dst-type LOCAL -j RETURN
-A OUTPUT -j DROP
-A pick -d 10.200.0.4/32 -m iprange --src-range 10.128.0.1-10.128.0.9 -j one
-A pick -d 10.200.0.4/32 -j two
-A pick -d 10.200.0.0/24 -j ACCEPT
-A one -p tcp -m tcp ! --sport 1:2 -j two
-A one -j ACCEPT
-A two -p udp -j DROP
-A two -s 172.18.0.2/32 -p tcp -m tcp --dport 8080 -j RETURN
-A two -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK FIN -j DROP
COMMIT
`

const writtenSets = `create servers hash:ip family inet
add servers 10.200.0.3
add servers 10.200.0.4
create wide hash:net,port family inet
add wide 10.200.0.4/31,tcp:8080
add wide 10.0.0.0/8,udp:8080
`

// writtenNFTables has chains of two families at several priorities, ranges, and maps of every kind.
const writtenNFTables = `
table ip hand {
	set wide { type ipv4_addr; flags interval; elements = { 10.0.0.0/16, 10.200.0.4-10.200.0.9, 192.168.0.0/16 }; }
	set both { type ipv4_addr . inet_service; flags interval; elements = { 10.200.0.0/30 . 8000-9000, 10.200.0.4/31 . 8080 }; }
	map next { type mark : verdict; elements = { 0x1 : jump one, 0x2 : goto two, 0x3 : accept }; }
	chain early { type filter hook prerouting priority -150; meta mark set 0x2; ip saddr 10.128.0.0/9 meta mark set 0x1; }
	chain out { type filter hook output priority -150; oifname "lo" accept; oifname "host" meta mark set meta mark or 0x2; ip protocol tcp return; drop; }
	chain late { type filter hook postrouting priority 0; policy accept; meta mark vmap @next; meta mark 7 drop; counter; }
	chain one { ip daddr @wide tcp dport vmap { 1-100 : drop, 8000-8100 : jump three }; tcp flags & (fin|syn|rst|ack) == syn return; ip ttl 1-3 drop; }
	chain two { ip daddr != @wide return; ip daddr . tcp dport @both goto three; drop; }
	chain three { tcp sport 1-2 drop; ct state vmap { established : accept, new : continue }; ip saddr { 10.128.0.1, 10.128.0.2 } return; fib saddr type local accept; }
}
table inet hand {
	chain f { type filter hook forward priority filter; policy drop; meta nfproto ipv6 drop; ct state established accept; ip daddr { 10.200.0.0/24 } jump more; meta l4proto udp drop; ct original ip daddr 10.200.0.1-10.200.0.5 accept; }
	chain more { iifname "pod" tcp dport != { 80, 443 } ct direction original return; accept; }
	chain o { type filter hook output priority filter; ct state new ip daddr 10.200.0.4 meta l4proto { tcp, udp } th dport 8080 accept; }
}
`

// TestWrittenRules compares the walk with the kernel for rules that no program made.
func TestWrittenRules(t *testing.T) {
	load := func(text string, command ...string) error {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", command, err, out)
		}
		return nil
	}
	iptables := func(variant string) func(context.Context, []model.ServicePart) (func() error, error) {
		return func(context.Context, []model.ServicePart) (func() error, error) {
			err := load(writtenSets, "ipset", "restore")
			if err == nil {
				err = load(writtenIPTables, "iptables-"+variant+"-restore")
			}
			return func() error { return nil }, err
		}
	}
	for _, s := range []subject{
		{"iptables legacy", Legacy, iptables("legacy"), readIPTables("legacy"), nil},
		{"iptables nft", NFT, iptables("nft"), readIPTables("nft"), nil},
		{"nft", NFT, func(context.Context, []model.ServicePart) (func() error, error) {
			return func() error { return nil }, load(writtenNFTables, "nft", "-f", "-")
		}, readNFTables, nil},
	} {
		t.Run(s.name, func(t *testing.T) {
			w := newWorld(t)
			rules := w.program(t, s, nil)
			for _, i := range []int{0, 2, 3, 4} {
				p := Packet{Src: netip.AddrPortFrom(nodeAddr, 0), Dst: netip.AddrPortFrom(serverAddr(i), serverPort),
					Protocol: model.TCP, Path: Sent, Out: "host", Node: []netip.Addr{nodeAddr, podGateway}}
				w.compare(t, s, rules, p.Dst.String(), w.node, p)
				p.Src, p.Path, p.In = netip.AddrPortFrom(podAddr, 0), Forwarded, "pod"
				w.compare(t, s, rules, p.Dst.String(), w.pod, p)
			}
		})
	}
}
