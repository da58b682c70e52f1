package dns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/nflog"
)

// wires is a node with a device to each of some hosts: the pods client, dns and other, the uplink wire, behind which a
// resolver is, and an overlay. All have the same link-layer addresses, those of the node's ends and their own.
type wires struct {
	*testing.T
	node   *netns.Namespace
	hosts  map[string]*netns.Namespace
	client net.PacketConn // of both families
}

const nodeMAC, hostMAC = "02:00:00:00:00:01", "02:00:00:00:00:02"

func (w *wires) must(err error) {
	if w.Helper(); err != nil {
		w.Fatal(err)
	}
}

// run runs commands, one a line, in a network namespace.
func (w *wires) run(ns *netns.Namespace, lines string) {
	w.Helper()
	w.must(ns.Do(func() error {
		for line := range strings.Lines(lines) {
			if args := strings.Fields(line); len(args) > 0 {
				if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
					return fmt.Errorf("%s: %w: %s", strings.TrimSpace(line), err, out)
				}
			}
		}
		return nil
	}))
}

// addresses are those of the hosts that have some, and of the resolver behind the wire.
var addresses = map[string][]string{"client": {"10.0.0.2", "fd00::2"}, "dns": {"10.0.0.53", "fd00::53"},
	"other": {"10.0.0.3", "fd00::3"}, "wire": {"192.168.0.2", "fd77::2"}, "node": {"192.168.0.1", "fd77::1"},
	"remote": {"203.0.113.53", "2001:db8::53"}}

func newWires(t *testing.T) *wires {
	w := &wires{T: t, node: netnstest.New(t), hosts: map[string]*netns.Namespace{}}
	w.run(w.node, `sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv4.conf.all.rp_filter=0
		sysctl -qw net.ipv4.conf.default.rp_filter=0 net.ipv4.conf.default.send_redirects=0
		ip link set lo up`)
	for _, name := range []string{"client", "dns", "other", "wire", "overlay"} {
		ns := netnstest.New(t)
		w.hosts[name] = ns
		w.run(w.node, fmt.Sprintf(`ip link add %s address %s type veth peer name eth0 address %s netns %s
			ip link set %[1]s up`, name, nodeMAC, hostMAC, ns.Name))
		w.run(ns, "ip link set lo up\nip link set eth0 up")
		for i, a := range addresses[name] {
			length := []int{32, 128}[i]
			w.run(ns, fmt.Sprintf("ip address add %s/%d dev eth0 %s", a, length, []string{"", "nodad"}[i]))
			w.run(w.node, fmt.Sprintf("ip route add %s/%d dev %s\nip neighbour add %[1]s lladdr %[4]s dev %[3]s", a, length,
				name, hostMAC))
		}
	}
	w.run(w.node, `ip address add 192.168.0.1/32 dev wire
		ip address add fd77::1/128 dev wire nodad
		ip route add default via 192.168.0.2 dev wire onlink
		ip route add default via fd77::2 dev wire onlink`)
	w.must(w.hosts["client"].Do(func() (err error) {
		w.client, err = net.ListenPacket("udp", ":4000")
		return err
	}))
	t.Cleanup(func() { w.client.Close() })
	return w
}

// send has a host send an answer with a source to the client, and returns what it says, once it has come there.
func (w *wires) send(host, source string) (data []byte) {
	w.Helper()
	from, to := netip.MustParseAddrPort(source), addresses["client"][0]
	if from.Addr().Is6() {
		to = addresses["client"][1]
	}
	data = []byte(host + " as " + source + ".")
	end := netip.AddrPortFrom(netip.MustParseAddr(to), 4000)
	if host == "node" {
		w.must(w.node.Do(func() error {
			c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(from), net.UDPAddrFromAddrPort(end))
			if err == nil {
				_, err = c.Write(data)
				err = errors.Join(err, c.Close())
			}
			return err
		}))
	} else {
		mac, err := net.ParseMAC(nodeMAC)
		w.must(err)
		w.must(w.hosts[host].Do(func() error {
			return netnstest.Send("eth0", mac, netnstest.Datagram(from, end, data))
		}))
	}
	w.must(w.client.SetReadDeadline(time.Now().Add(5 * time.Second)))
	b := make([]byte, 512)
	if n, _, err := w.client.ReadFrom(b); err != nil || !bytes.Equal(b[:n], data) {
		w.Fatalf("%s: the client received %q, %v", data, b[:n], err)
	}
	return data
}

// An answer counts only if a resolver may send it by the device that it came in by: a pod by its own, one on another
// node by the uplink, the node itself by a socket. All others pass, and are counted.
func TestAnswersCountByDevice(t *testing.T) {
	w := newWires(t)
	for _, anyDevice := range []bool{false, true} {
		w.must(w.node.Do(func() error {
			p, err := New()
			w.must(err)
			defer p.Close()
			p.Copy()
			if anyDevice {
				p.AnyDevice()
			}
			l, err := nflog.Listen(LogGroup, Copied)
			w.must(err)
			defer l.Close()
			var all []Fact
			add := func(x Part) {
				for _, f := range p.Render(x) {
					if !slices.ContainsFunc(all, f.Equal) {
						all = append(all, f)
					}
				}
			}
			for i := range families {
				add(Part{netip.MustParseAddr(addresses["client"][i]), 0})
				for _, resolver := range []string{"dns", "remote", "node"} {
					add(Part{netip.MustParseAddr(addresses[resolver][i]), 53})
				}
			}
			w.must(p.Write(context.Background(), all, nil))
			w.answers(p, l, anyDevice)
			return p.Clean(context.Background())
		}))
	}
}

// answers has answers sent, and checks which of them are copied.
func (w *wires) answers(p *Plane, l *nflog.Log, anyDevice bool) {
	w.Helper()
	forged := uint64(0)
	for _, c := range []struct {
		host, as string
		counts   bool
	}{
		{"dns", "dns", true}, {"wire", "remote", true}, {"node", "node", true},
		{"client", "dns", false}, {"other", "dns", false}, {"overlay", "dns", false}, {"wire", "dns", false},
		{"client", "remote", false}, {"other", "remote", false}, {"overlay", "remote", false}, {"dns", "remote", false},
	} {
		for i := range families {
			data := w.send(c.host, netip.AddrPortFrom(netip.MustParseAddr(addresses[c.as][i]), 53).String())
			entries, err := l.Receive()
			w.must(err)
			copied := len(entries) == 1 && bytes.HasSuffix(entries[0].Payload, data)
			if copied != (c.counts || anyDevice) || len(entries) > 1 {
				w.Errorf("any device %t, %s: it counts %t, %d copies", anyDevice, data, copied, len(entries))
			}
			if !c.counts && !anyDevice {
				forged++
			}
		}
	}
	if n, err := p.Counts(); err != nil || n != (Counts{Forged: forged}) {
		w.Errorf("%+v, %v; want %d forged", n, err, forged)
	}
}
