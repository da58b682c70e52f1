package policytest

import (
	"net"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// Inject sends a datagram with any source by the device eth0 of an address's namespace to the node at its other end,
// which may drop it.
func (n *Network) Inject(by netip.Addr, src, dst netip.AddrPort, text string) {
	n.Helper()
	to := n.mac(by)
	n.Must(n.Of[by].Do(func() error {
		return netnstest.Send("eth0", to, netnstest.Datagram(src, dst, []byte(text)))
	}))
}

// mac returns the link-layer address of the node's device that an address is behind.
func (n *Network) mac(by netip.Addr) (mac net.HardwareAddr) {
	n.Helper()
	n.Must(n.Node.Do(func() error {
		d, err := net.InterfaceByName(Device(by))
		if err == nil {
			mac = append(mac, d.HardwareAddr...)
		}
		return err
	}))
	return mac
}

// Listener receives datagrams in the namespace of an address.
type Listener struct {
	*Network
	sockets []net.PacketConn // of IPv4 and IPv6
	port    uint16
}

// Listen listens at a port of all addresses of an address's namespace.
func (n *Network) Listen(at netip.Addr, port uint16) *Listener {
	n.Helper()
	l := &Listener{Network: n, port: port}
	n.Must(n.Of[at].Do(func() error {
		for _, network := range []string{"udp4", "udp6"} {
			c, err := net.ListenUDP(network, &net.UDPAddr{Port: int(port)})
			if err != nil {
				return err
			}
			n.Cleanup(func() { c.Close() })
			l.sockets = append(l.sockets, c)
		}
		return nil
	}))
	return l
}

// Send sends a datagram from the listener's port.
func (l *Listener) Send(to netip.Addr, text string) {
	l.Helper()
	_, err := l.socket(to.Is6()).WriteTo([]byte(text), net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, l.port)))
	l.Must(err)
}

func (l *Listener) socket(six bool) net.PacketConn {
	if six {
		return l.sockets[1]
	}
	return l.sockets[0]
}

// Before reports whether a datagram with a text comes before one with another text, which must come. Others don't
// count.
func (l *Listener) Before(six bool, text, last string) (came bool) {
	l.Helper()
	c := l.socket(six)
	l.Must(c.SetReadDeadline(time.Now().Add(5 * time.Second)))
	for b := make([]byte, 200); ; {
		n, _, err := c.ReadFrom(b)
		if l.Must(err); string(b[:n]) == last {
			return came
		}
		came = came || string(b[:n]) == text
	}
}
