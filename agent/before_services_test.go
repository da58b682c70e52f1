package agent

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/source"
)

// dualWorld is a node of two pods, and a Service of one of them, and what the other may reach.
const dualWorld = `
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: client, namespace: shop}
spec:
  podSelector: {matchLabels: {app: client}}
  policyTypes: [Egress]
  egress:
  - to: [{ipBlock: {cidr: 10.96.0.10/32}}, {ipBlock: {cidr: 169.254.20.10/32}}]
    ports: [{port: 53, protocol: UDP}, {port: 53}]
  - to: [{podSelector: {matchLabels: {app: web}}}]
---
apiVersion: v1
kind: Node
metadata: {name: a}
spec: {podCIDRs: [10.244.1.0/24, "fd00:10:244:1::/64"]}
status: {addresses: [{type: InternalIP, address: 192.168.77.1}, {type: InternalIP, address: "fd00:77::1"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: shop, labels: {app: client}}
spec: {nodeName: a, containers: [{name: c}]}
status: {podIPs: [{ip: 10.244.1.2}, {ip: "fd00:10:244:1::2"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {nodeName: a, containers: [{name: c}]}
status: {podIPs: [{ip: 10.244.1.3}, {ip: "fd00:10:244:1::3"}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIPs: [10.96.0.10, "fd00:96::10"]
  selector: {app: web}
  ports: [{name: t, port: 80}, {name: u, port: 53, protocol: UDP}, {name: d, port: 53}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web4, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.244.1.3]}]
ports: [{name: t, port: 8080, protocol: TCP}, {name: u, port: 8053, protocol: UDP}, {name: d, port: 8053, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web6, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv6
endpoints: [{addresses: ["fd00:10:244:1::3"]}]
ports: [{name: t, port: 8080, protocol: TCP}, {name: u, port: 8053, protocol: UDP}, {name: d, port: 8053, protocol: TCP}]
`

// speak answers at a port of a host with a name, and over TCP with where the connection was going before it was
// redirected, until stop.
func (b *worldBed) speak(h *sandbox.Host, name, address string) (stop func()) {
	b.Helper()
	var l net.Listener
	var p net.PacketConn
	b.must(h.Do(func() (err error) {
		if l, err = net.Listen("tcp", address); err != nil {
			return err
		}
		p, err = net.ListenPacket("udp", address)
		return err
	}))
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintf(c, "%s for %s\n", name, originalDestination(c.(*net.TCPConn)))
			c.Close()
		}
	}()
	go func() {
		for buf := make([]byte, 100); ; {
			_, from, err := p.ReadFrom(buf)
			if err != nil {
				return
			}
			p.WriteTo([]byte(name+"\n"), from)
		}
	}()
	stop = func() { l.Close(); p.Close() }
	b.Cleanup(stop)
	return stop
}

// originalDestination returns where a connection went before it was redirected (SO_ORIGINAL_DST), else where it went.
func originalDestination(c *net.TCPConn) (to netip.AddrPort) {
	to = c.LocalAddr().(*net.TCPAddr).AddrPort()
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	raw, err := c.SyscallConn()
	if err != nil {
		return to
	}
	raw.Control(func(fd uintptr) {
		if to.Addr().Is4() {
			if o, err := unix.GetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IP, unix.SO_ORIGINAL_DST); err == nil {
				m := o.Multiaddr
				to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(m[4:8])), uint16(m[2])<<8|uint16(m[3]))
			}
		} else if o, err := unix.GetsockoptIPv6MTUInfo(int(fd), unix.IPPROTO_IPV6, unix.SO_ORIGINAL_DST); err == nil {
			to = netip.AddrPortFrom(netip.AddrFrom16(o.Addr.Addr), o.Addr.Port<<8|o.Addr.Port>>8)
		}
	})
	return to
}

// hears waits until a question of a host, from a port if that isn't 0, is answered so.
func (b *worldBed) hears(h *sandbox.Host, network, to string, from int, want string) {
	b.Helper()
	for end := time.Now().Add(20 * time.Second); ; {
		answer, err := "", error(nil)
		b.must(h.Do(func() error {
			answer, err = question(network, to, from)
			return nil
		}))
		if answer == want {
			return
		}
		if time.Now().After(end) {
			b.Fatalf("%s %s: %q, %v; want %q", network, to, answer, err, want)
		}
	}
}

func question(network, to string, from int) (string, error) {
	d := net.Dialer{Timeout: 300 * time.Millisecond, Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
	}}
	if from != 0 {
		d.LocalAddr = &net.TCPAddr{Port: from}
	}
	c, err := d.Dial(network, to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(300 * time.Millisecond))
	if network == "udp" {
		c.Write([]byte("?"))
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSpace(line), err
}

// nft applies rules in a host's network namespace.
func (b *worldBed) nft(h *sandbox.Host, rules string) {
	b.Helper()
	b.must(h.Do(func() error {
		c := exec.Command("nft", "-f", "-")
		c.Stdin = strings.NewReader(rules)
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("nft: %w: %s", err, out)
		}
		return nil
	}))
}

// redirects are a service mesh's rules in a pod: its program's own connections come from port 1337.
const redirects = `table inet mesh {
	chain output {
		type nat hook output priority -100
		tcp dport 80 tcp sport != 1337 redirect to :15001
		udp dport 53 redirect to :15053
	}
}`

// filters are rules of a pod that see no Service where sockets are translated.
const filters = `table inet filters {
	chain output { type filter hook output priority 0; ip daddr 10.96.0.0/16 drop; ip6 daddr fd00:96::/64 drop; }
}`

// A program that redirects its pod's connections sees the Service's address, and reaches Services itself: once it has
// its rules, and as long.
func TestSidecarsSeeServices(t *testing.T) {
	for _, services := range onHost {
		t.Run(services, func(t *testing.T) {
			t.Parallel()
			b := newWorldBed(t, dualWorld, services, "")
			client, err := b.cluster.Pod("shop", "client")
			b.must(err)
			web, err := b.cluster.Pod("shop", "web")
			b.must(err)
			b.speak(web, "web", ":8080")
			b.speak(web, "web", ":8053")
			b.speak(client, "sidecar", ":15001")
			b.speak(client, "sidecar", "127.0.0.1:15053")
			b.speak(client, "sidecar", "[::1]:15053")
			send, ready, stop := b.start()
			defer stop()
			send <- b.of(source.Kinds()...)
			<-ready
			for _, address := range []string{"10.96.0.10", "fd00:96::10"} {
				tcp, udp := net.JoinHostPort(address, "80"), net.JoinHostPort(address, "53")
				direct := "web for 10.244.1.3:8080"
				if strings.Contains(address, ":") {
					direct = "web for [fd00:10:244:1::3]:8080"
				}
				b.hears(client, "tcp", tcp, 0, direct)
				b.hears(client, "udp", udp, 0, "web")
				b.nft(client, redirects)
				b.hears(client, "tcp", tcp, 0, "sidecar for "+tcp)
				b.hears(client, "udp", udp, 0, "sidecar")
				b.hears(client, "tcp", tcp, 1337, direct)
				b.nft(client, "delete table inet mesh")
				b.hears(client, "tcp", tcp, 0, direct)
				b.hears(client, "udp", udp, 0, "web")
				if services == "ebpf" { // hooks that redirect nothing, such as SELinux', change nothing
					b.nft(client, filters)
					b.hears(client, "tcp", tcp, 0, direct)
					b.hears(client, "udp", udp, 0, "web")
					b.nft(client, "delete table inet filters")
				}
			}
		})
	}
}

// untracked has connection tracking pass over what a cache at 10.96.0.10 is asked, as NodeLocal DNSCache does.
const untracked = `table ip dns {
	chain in { type filter hook prerouting priority raw; ip daddr 10.96.0.10 meta l4proto { tcp, udp } th dport 53 notrack; }
	chain out { type filter hook output priority raw; ip daddr 10.96.0.10 meta l4proto { tcp, udp } th dport 53 notrack
		ip saddr 10.96.0.10 meta l4proto { tcp, udp } th sport 53 notrack; }
}`

// A process of the node that is bound to a ClusterIP which the node has at a device, as NodeLocal DNSCache is to that
// of kube-dns, goes before the Service; other ports are the Service's, and all of it once the process has gone.
func TestNodeLocalDNS(t *testing.T) {
	for _, pair := range [][2]string{{"nftables", "nftables"}, {"iptables-nft", "iptables"}, {"iptables-legacy", ""},
		{"ebpf", ""}, {"ebpf", "ebpf"}, {"ebpf", "nftables"}} {
		t.Run(strings.Join(pair[:], "/"), func(t *testing.T) {
			t.Parallel()
			nodeLocalDNS(t, pair[0], pair[1])
		})
	}
}

func nodeLocalDNS(t *testing.T, services, engine string) {
	b := newWorldBed(t, dualWorld, services, engine)
	client, err := b.cluster.Pod("shop", "client")
	b.must(err)
	web, err := b.cluster.Pod("shop", "web")
	b.must(err)
	b.speak(web, "web", ":8080")
	b.speak(web, "web", ":8053")
	b.further = []netip.Addr{netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("169.254.20.10")}
	b.must(b.node.Do(func() error {
		for _, args := range []string{"link add nodelocaldns type bridge", "address add 10.96.0.10/32 dev nodelocaldns",
			"address add 169.254.20.10/32 dev nodelocaldns", "link set nodelocaldns up"} {
			if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %s: %w: %s", args, err, out)
			}
		}
		return nil
	}))
	b.nft(b.node, untracked)
	b.speak(b.node, "cache", "169.254.20.10:53")
	end := b.speak(b.node, "cache", "10.96.0.10:53")
	send, ready, stop := b.start()
	defer stop()
	send <- b.of(source.Kinds()...)
	<-ready
	for _, h := range []*sandbox.Host{client, b.node} {
		for _, address := range []string{"10.96.0.10:53", "169.254.20.10:53"} {
			b.hears(h, "udp", address, 0, "cache")
			b.hears(h, "tcp", address, 0, "cache for "+address)
		}
		b.hears(h, "tcp", "10.96.0.10:80", 0, "web for 10.244.1.3:8080")
	}
	end()
	b.nft(b.node, "delete table ip dns")
	for _, h := range []*sandbox.Host{client, b.node} {
		b.hears(h, "udp", "10.96.0.10:53", 0, "web")
		b.hears(h, "tcp", "10.96.0.10:53", 0, "web for 10.244.1.3:8053")
	}
}
