package agent

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// far is a second node, so that there is an overlay.
const far = `
---
apiVersion: v1
kind: Node
metadata: {name: b}
spec: {podCIDRs: [10.244.2.0/24, "fd00:10:244:2::/64"]}
status: {addresses: [{type: InternalIP, address: 192.168.77.2}, {type: InternalIP, address: "fd00:77::2"}]}
`

// remote is a resolver of the other node, and beyond one outside of the cluster; onNode is the node itself.
const remote, beyond, onNode = "10.244.2.53:53", "198.51.100.2:53", "192.168.77.1:53"

// TestForgedAnswerOpensNothing has a pod send the answer to its own query itself, by a raw socket, with the source of a
// resolver, and another pod do so for it, in the agent's own network also through the overlay, which takes no raw
// socket: none counts, while those of all resolvers do.
func TestForgedAnswerOpensNothing(t *testing.T) {
	for _, c := range []struct{ network, mode, engine string }{{"wires", "nftables", "nftables"},
		{"wires", "ebpf", "ebpf"}, {"own", "nftables", "nftables"}, {"own", "ebpf", "ebpf"}} {
		t.Run(c.network+"/"+c.mode+"/"+c.engine, func(t *testing.T) {
			t.Parallel()
			folder := ""
			if c.network == "own" {
				folder = t.TempDir()
			}
			b := newNamesBedOf(t, c.mode, c.engine, namesWorld+far, folder)
			node, err := b.cluster.Node("a")
			b.must(err)
			b.serveOn(b.cluster.External(), beyond)
			b.serveOn(node, onNode)
			for _, r := range []string{remote, beyond, onNode} {
				b.resolvers = append(b.resolvers, netip.MustParseAddrPort(r))
			}
			b.start()
			b.set("beyond.example.com", record{"198.51.100.2", 3600}) // opens that resolver
			b.lookup("beyond.example.com")
			for i, resolver := range []string{"10.96.0.10:53", beyond, onNode} {
				name, address := fmt.Sprintf("n%d.example.com", i), fmt.Sprintf("192.0.2.%d", 100+i)
				b.set(name, record{address, 3600})
				if !b.query("client", "udp", resolver, name, dnsmessage.TypeA) {
					b.Errorf("no answer of %s", resolver)
				}
				b.passes(address+":80", true)
			}
			for _, resolver := range []string{"10.244.1.53:5353", remote, beyond, onNode} {
				for _, from := range []string{"client", "evil"} {
					arrives := b.sendForged(resolver, b.raw(from))
					b.passes("198.51.100.1:80", false)
					if wired := folder == "" && resolver != onNode; arrives != wired || b.Failed() { // the guard and Linux drop some
						b.Fatalf("%s as %s: arrives %t, want %t", from, resolver, arrives, wired)
					}
				}
			}
			if folder != "" {
				b.sendForged(remote, b.overlay)
				b.passes("198.51.100.1:80", false)
			}
		})
	}
}

// sendForged has the client query a resolver, which stays silent, and an answer of it sent. It reports whether that
// arrives.
func (b *namesBed) sendForged(as string, send func(packet []byte) error) bool {
	b.Helper()
	m := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: 77, RecursionDesired: true})
	q := dnsmessage.Question{Name: dnsmessage.MustNewName(silent + "."), Type: dnsmessage.TypeA,
		Class: dnsmessage.ClassINET}
	b.must(errors.Join(m.StartQuestions(), m.Question(q)))
	query, err := m.Finish()
	b.must(err)
	c := b.dial("client", "udp", as)
	if c == nil {
		b.Fatalf("no socket to %s", as)
	}
	defer c.Close()
	_, err = c.Write(query)
	b.must(err)
	b.must(send(netnstest.Datagram(netip.MustParseAddrPort(as), c.LocalAddr().(*net.UDPAddr).AddrPort(),
		b.answer(77, q, []record{{"198.51.100.1", 3600}}))))
	b.must(c.SetReadDeadline(time.Now().Add(packetWithin)))
	n, err := c.Read(make([]byte, 512))
	return err == nil && n > 0
}

// raw returns what sends a packet from a pod by a raw socket.
func (b *namesBed) raw(pod string) func(packet []byte) error {
	b.Helper()
	host, err := b.cluster.Pod("shop", pod)
	b.must(err)
	return func(packet []byte) error {
		return host.Do(func() error {
			mac, err := nextHop()
			if err != nil {
				return err
			}
			return netnstest.Send("eth0", mac, packet)
		})
	}
}

// overlay sends a packet from a pod as if it came out of the overlay, by an ordinary socket: to the tunnel's port at
// the node's address among pods.
func (b *namesBed) overlay(packet []byte) error {
	c := b.dial("evil", "udp", "10.244.1.1:4789")
	if c == nil {
		return errors.New("no socket to the tunnel")
	}
	defer c.Close()
	vxlan := []byte{8, 0, 0, 0, 0, 0, 7, 0}                                      // network 7
	ethernet := []byte{2, 0x66, 192, 168, 77, 1, 2, 0x66, 192, 168, 77, 2, 8, 0} // to and from nodes' tunnels
	_, err := c.Write(slices.Concat(vxlan, ethernet, packet))
	return err
}

// nextHop returns the link-layer address of the calling thread's pod's next hop for IPv4.
func nextHop() (net.HardwareAddr, error) {
	out, err := exec.Command("ip", "-4", "neighbour", "show", "dev", "eth0").CombinedOutput()
	if err != nil {
		return nil, err
	}
	found := regexp.MustCompile(`lladdr (\S+)`).FindStringSubmatch(string(out))
	if found == nil {
		return nil, errors.New("no neighbour in " + strings.TrimSpace(string(out)))
	}
	return net.ParseMAC(found[1])
}
