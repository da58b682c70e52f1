package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// pathMTU is what the pods' devices have where there is a VXLAN.
const pathMTU = 1450

// target is a server that node a's pod sends to.
type target struct {
	name      string
	ns        *netns.Namespace
	addresses []netip.Addr // IPv4, IPv6
}

// targets returns a pod of the same subnet, one behind the tunnel, and one in a network namespace behind that one,
// which forwards.
func (c *cluster) targets() []target {
	c.Helper()
	for _, n := range c.nodes {
		c.shell(n.ns, fmt.Sprintf("ip link set pod mtu %d; ip -n %s link set eth0 mtu %d", pathMTU, n.podNS.Name, pathMTU))
	}
	near, far := c.nodes["b"], c.nodes["c"]
	nested := target{"a pod behind a pod", netnstest.New(c), []netip.Addr{netip.MustParseAddr("10.244.3.11"),
		netip.MustParseAddr("fd00:3::11")}}
	c.shell(far.podNS, strings.ReplaceAll(fmt.Sprintf(`
		sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
		ip link add inner mtu %d type veth peer name eth0 mtu %d netns NS
		ip link set inner up
		ip address add fe80::1/64 dev inner nodad
		ip -n NS link set lo up
		ip -n NS link set eth0 up
		ip -n NS address add 10.244.3.11/32 dev eth0
		ip -n NS address add fd00:3::11/128 dev eth0 nodad
		ip -n NS route add 10.244.3.10 dev eth0
		ip -n NS route add default via 10.244.3.10 dev eth0
		ip -n NS route add default via fe80::1 dev eth0
		ip route add 10.244.3.11 dev inner
		ip route add fd00:3::11 dev inner`, pathMTU, pathMTU), "NS", nested.ns.Name))
	c.shell(far.ns, "ip route add 10.244.3.11 via 10.244.3.10 dev pod onlink\n"+
		"ip route add fd00:3::11 via fd00:3::10 dev pod onlink")
	s, err := far.serve(nested.ns)
	c.must(err)
	c.Cleanup(func() { s.Close() })
	return []target{{"a pod on the link", near.podNS, near.pod}, {"a pod behind the tunnel", far.podNS, far.pod}, nested}
}

// shell runs a script in a network namespace.
func (c *cluster) shell(ns *netns.Namespace, script string) {
	c.Helper()
	c.must(ns.Do(func() error {
		if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}))
}

// ethtool's commands that switch offloads of a device (linux/ethtool.h).
const (
	setTSO = 0x1f
	setGSO = 0x24
	setGRO = 0x2c
)

// offload switches offloads of all devices of the nodes and their pods, by their commands.
func (c *cluster) offload(commands []uint32, on uint32) {
	c.Helper()
	for _, n := range c.nodes {
		for ns, devices := range map[*netns.Namespace][]string{n.podNS: {"eth0"}, n.ns: {"eth0", "pod", Device}} {
			c.must(ns.Do(func() error {
				fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				defer unix.Close(fd)
				for _, device := range devices {
					for _, command := range commands {
						value := struct{ command, on uint32 }{command, on}
						request := struct {
							name [unix.IFNAMSIZ]byte
							data unsafe.Pointer
							_    [16]byte
						}{data: unsafe.Pointer(&value)}
						copy(request.name[:], device)
						if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL,
							uintptr(unsafe.Pointer(&request))); e != 0 {
							return fmt.Errorf("ethtool command %#x of %s: %w", command, device, e)
						}
					}
				}
				return nil
			}))
		}
	}
}

// retransmitted returns how many segments a network namespace has sent again.
func (c *cluster) retransmitted(ns *netns.Namespace) (n int) {
	c.Helper()
	c.must(ns.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		var rows [][]string
		for line := range strings.Lines(string(b)) {
			if strings.HasPrefix(line, "Tcp:") {
				rows = append(rows, strings.Fields(line))
			}
		}
		n, err = strconv.Atoi(rows[1][slices.Index(rows[0], "RetransSegs")])
		return err
	}))
	return n
}

// eachOffload runs f with a pod's and its node's offloads on, and with some of them off.
func (c *cluster) eachOffload(f func(what string)) {
	for _, off := range []struct {
		what     string
		commands []uint32
	}{{"offloads on", nil}, {"no GRO", []uint32{setGRO}}, {"no TSO, no GSO", []uint32{setTSO, setGSO}},
		{"no offload", []uint32{setTSO, setGSO, setGRO}}} {
		c.offload([]uint32{setGSO, setTSO, setGRO}, 1)
		c.offload(off.commands, 0)
		f(off.what)
	}
}

// TestStreamsPassInSegments sends streams with a last segment just above the largest, with and without the offloads
// that join and cut segments: none may be lost for its size. A busy machine sends some again without a loss, so that
// one of twenty tries must do without: what is lost for its size is lost each time.
func TestStreamsPassInSegments(t *testing.T) {
	c := newCluster(t)
	targets := c.targets()
	client := c.nodes["a"].podNS
	c.eachOffload(func(what string) {
		for _, to := range targets {
			for i, a := range to.addresses {
				largest := pathMTU - []int{20, 40}[i] - 20 - 12 // IP, TCP, its timestamps
				for _, size := range []int{largest + 1, 9*largest + 1, 40 * largest} {
					tries, err := 0, error(nil)
					for again := 1; again > 0 && err == nil && tries < 20; tries++ {
						before := c.retransmitted(client) + c.retransmitted(to.ns)
						_, err = c.request(client, served[0], a, size, 10*time.Second)
						again = c.retransmitted(client) + c.retransmitted(to.ns) - before
						if again > 0 && tries == 19 {
							err = fmt.Errorf("%d segments were sent again", again)
						}
					}
					if err != nil {
						t.Errorf("%s: %d bytes to %s, %s: %v", what, size, to.name, a, err)
					}
				}
			}
		}
	})
}

// TestDatagramsPassInSegments has a pod send several datagrams in one call, as QUIC does (UDP_SEGMENT).
func TestDatagramsPassInSegments(t *testing.T) {
	const segment, datagrams, last = 1200, 10, 700
	c := newCluster(t)
	targets := c.targets()
	c.eachOffload(func(what string) {
		for _, to := range targets {
			for _, a := range to.addresses {
				if err := c.sendSegments(to.ns, a, segment, (datagrams-1)*segment+last); err != nil {
					t.Errorf("%s: to %s, %s: %v", what, to.name, a, err)
				}
			}
		}
	})
}

// sendSegments sends bytes from node a's pod in segments, and returns an error unless all arrive, each on its own.
func (c *cluster) sendSegments(to *netns.Namespace, a netip.Addr, segment, size int) error {
	var server *net.UDPConn
	err := to.Do(func() (err error) {
		server, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 443)))
		return err
	})
	if err != nil {
		return err
	}
	defer server.Close()
	sent := make([]byte, size)
	for i := range sent {
		sent[i] = byte(i / segment)
	}
	err = c.nodes["a"].podNS.Do(func() error {
		client, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 443)))
		if err != nil {
			return err
		}
		defer client.Close()
		raw, err := client.SyscallConn()
		if err != nil {
			return err
		}
		var failed error
		err = raw.Control(func(fd uintptr) {
			failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, segment)
		})
		if err = errors.Join(err, failed); err == nil {
			_, err = client.Write(sent)
		}
		return err
	})
	if err != nil {
		return err
	}
	server.SetReadDeadline(time.Now().Add(10 * time.Second))
	for buffer := make([]byte, 1<<16); len(sent) > 0; {
		n, err := server.Read(buffer)
		if err != nil {
			return fmt.Errorf("%d bytes were lost: %w", len(sent), err)
		}
		if want := sent[:min(segment, len(sent))]; !slices.Equal(buffer[:n], want) {
			return fmt.Errorf("datagram of %d bytes, want %d from byte %d on", n, len(want), size-len(sent))
		}
		sent = sent[n:]
	}
	return nil
}

// TestHopsAreSeen sends packets with few hops to live: each node on the way says so itself, and the tunnel is no hop.
func TestHopsAreSeen(t *testing.T) {
	c := newCluster(t)
	for _, to := range []string{"b", "c"} {
		for i, a := range c.nodes[to].pod {
			for k, name := range []string{"a", to} {
				n := c.nodes[name]
				if by, err := c.expired(a, k+1); err != nil || !n.sends(by, i) {
					t.Errorf("hop %d to %s: %s, %v; want node %s", k+1, a, by, err, name)
				}
			}
			if by, err := c.expired(a, 3); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("three hops to %s: %s, %v; want to arrive", a, by, err)
			}
		}
	}
}

// expired sends a datagram from node a's pod, to a port without a server, that may take so many hops, and returns where
// it ended.
func (c *cluster) expired(to netip.Addr, hops int) (by netip.Addr, err error) {
	e, err := c.rejected(c.nodes["a"].podNS, to, 1, []option{{[2]int{unix.IP_TTL, unix.IPV6_UNICAST_HOPS}, hops}})
	if err == nil && e.errno != unix.EHOSTUNREACH {
		err = e.errno
	}
	return e.by, err
}

// port is one without a server.
const port = 9

// option is an option of a socket, of IPv4 and IPv6, with its value.
type option struct {
	name  [2]int
	value int
}

// uncut are the options of datagrams that no node may cut into fragments, however short the path's MTU is known to be.
var uncut = []option{{[2]int{unix.IP_MTU_DISCOVER, unix.IPV6_MTU_DISCOVER}, unix.IP_PMTUDISC_PROBE}}

// icmpError is what an ICMP error says (struct sock_extended_err), and the sender of it.
type icmpError struct {
	by    netip.Addr
	errno unix.Errno
	kind  uint8 // its type
	info  int   // of a packet that is too long: how many bytes fit
}

// unreachable are the types of errors that say so, of IPv4 and IPv6.
var unreachable = [...]uint8{3, 1}

// sends reports whether a node sends ICMP errors of a family from an address.
func (n *node) sends(a netip.Addr, family int) bool {
	return slices.Contains(append(slices.Clone(n.resolver.Network().Network.Tunnel.Own), n.wire[family].Addr()), a)
}

// rejected sends a datagram of so many bytes to a port without a server, and returns the ICMP error that comes back.
func (c *cluster) rejected(from *netns.Namespace, to netip.Addr, size int, options []option) (e icmpError, err error) {
	failed := from.Do(func() error {
		fd, failed := send(to, size, options)
		if failed == nil {
			e, failed = readError(fd, family(to))
		}
		return errors.Join(failed, unix.Close(fd))
	})
	return e, failed
}

// send sends a datagram of so many bytes, and returns its socket, which hears of ICMP errors.
func send(to netip.Addr, size int, options []option) (fd int, err error) {
	f := family(to)
	level := [2]int{unix.IPPROTO_IP, unix.IPPROTO_IPV6}[f]
	if fd, err = unix.Socket(inet.Family(to), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return fd, err
	}
	for _, o := range append(options, option{[2]int{unix.IP_RECVERR, unix.IPV6_RECVERR}, 1}) {
		err = errors.Join(err, unix.SetsockoptInt(fd, level, o.name[f], o.value))
	}
	return fd, errors.Join(err, unix.Sendto(fd, make([]byte, size), 0, inet.Sockaddr(netip.AddrPortFrom(to, port))))
}

// An error message's sender follows what the kernel says of it: behind family and port, of IPv6 behind the flow label
// too.
const (
	errorSize = 16
	sender4   = errorSize + 4
	sender6   = errorSize + 8
)

// readError waits for the ICMP error of what a socket of a family sent.
func readError(fd, family int) (e icmpError, err error) {
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd)}}, 10_000); err != nil || n == 0 {
		return e, fmt.Errorf("no ICMP error: %w", err)
	}
	control := make([]byte, 512)
	_, n, _, _, err := unix.Recvmsg(fd, make([]byte, 1<<11), control, unix.MSG_ERRQUEUE)
	if err != nil {
		return e, err
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	for _, m := range messages {
		if m.Header.Type != [...]int32{unix.IP_RECVERR, unix.IPV6_RECVERR}[family] {
			continue
		}
		e = icmpError{errno: unix.Errno(binary.NativeEndian.Uint32(m.Data)), kind: m.Data[5],
			info: int(binary.NativeEndian.Uint32(m.Data[8:]))}
		if family == 1 {
			e.by, _ = netip.AddrFromSlice(m.Data[sender6 : sender6+16])
		} else {
			e.by, _ = netip.AddrFromSlice(m.Data[sender4 : sender4+4])
		}
	}
	return e, err
}

// TestCongestionMarksPassTheTunnel has a router on the way mark a tunnel's packets (RFC 6040): the pod sees the mark.
func TestCongestionMarksPassTheTunnel(t *testing.T) {
	const able, experienced = 2, 3 // ECT(0), CE
	c := newCluster(t)
	for _, want := range []int{able, experienced} {
		if want == experienced {
			c.shell(c.nodes["c"].ns, `nft 'table inet x { chain c { type filter hook prerouting priority -400;
				udp dport 4789 ip ecn ect0 ip ecn set ce; }; }'`)
		}
		for _, a := range c.nodes["c"].pod {
			if saw, err := c.mark(c.nodes["c"].podNS, a, able); err != nil || saw != want {
				t.Errorf("to %s: mark %d, %v; want %d", a, saw, err, want)
			}
		}
	}
	for _, a := range c.nodes["b"].pod {
		if saw, err := c.mark(c.nodes["b"].podNS, a, able); err != nil || saw != able {
			t.Errorf("to %s: mark %d, %v; want %d", a, saw, err, able)
		}
	}
}

// mark sends a datagram with a mark from node a's pod, and returns the mark that it has when it arrives.
func (c *cluster) mark(to *netns.Namespace, a netip.Addr, mark int) (saw int, err error) {
	level, send, receive := unix.IPPROTO_IP, unix.IP_TOS, unix.IP_RECVTOS
	if a.Is6() {
		level, send, receive = unix.IPPROTO_IPV6, unix.IPV6_TCLASS, unix.IPV6_RECVTCLASS
	}
	set := func(u *net.UDPConn, option, value int) error {
		raw, err := u.SyscallConn()
		if err != nil {
			return err
		}
		var failed error
		err = raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), level, option, value) })
		return errors.Join(err, failed)
	}
	at := net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 9))
	var server *net.UDPConn
	err = to.Do(func() (err error) {
		if server, err = net.ListenUDP("udp", at); err != nil {
			return err
		}
		return set(server, receive, 1)
	})
	if err != nil {
		return 0, err
	}
	defer server.Close()
	err = c.nodes["a"].podNS.Do(func() error {
		client, err := net.DialUDP("udp", nil, at)
		if err != nil {
			return err
		}
		defer client.Close()
		if err := set(client, send, mark); err != nil {
			return err
		}
		_, err = client.Write([]byte("x"))
		return err
	})
	if err != nil {
		return 0, err
	}
	server.SetReadDeadline(time.Now().Add(10 * time.Second))
	control := make([]byte, 64)
	_, n, _, _, err := server.ReadMsgUDP(make([]byte, 1), control)
	if err != nil {
		return 0, err
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) != 1 {
		return 0, fmt.Errorf("%d control messages, %w", len(messages), err)
	}
	return int(messages[0].Data[0]), nil // IPv4's is a byte, IPv6's an int of this machine, which is little-endian
}
