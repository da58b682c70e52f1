package network

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
)

// node is a Node as far as the pod network goes.
type node struct {
	name     string
	created  int64        // seconds since 1970
	internal []netip.Addr // its InternalIPs, in their order
	all      []netip.Addr // all of its addresses, sorted
	ranges   []podRange
	faulty   []source.Problem // of reading it
}

// podRange is one of a Node's podCIDRs.
type podRange struct {
	prefix netip.Prefix
	index  int // in spec.podCIDRs
}

func (n *node) key() source.Key { return source.Key{Kind: source.Node, Name: n.name} }

func (n *node) equal(o *node) bool {
	return n.name == o.name && n.created == o.created && slices.Equal(n.internal, o.internal) &&
		slices.Equal(n.all, o.all) && slices.Equal(n.ranges, o.ranges) && slices.Equal(n.faulty, o.faulty)
}

// mostRanges is how many of a Node's podCIDRs count: Kubernetes has one a family.
const mostRanges = 8

func readNode(o *corev1.Node) *node {
	n := &node{name: o.Name, created: o.CreationTimestamp.Unix()}
	for _, a := range o.Status.Addresses {
		ip, err := netip.ParseAddr(a.Address)
		if err != nil || ip.Zone() != "" {
			continue // a name
		}
		ip = ip.Unmap()
		if n.all = append(n.all, ip); a.Type == corev1.NodeInternalIP {
			n.internal = append(n.internal, ip)
		}
	}
	slices.SortFunc(n.all, netip.Addr.Compare)
	if n.all = slices.Compact(n.all); slices.Equal(n.all, n.internal) {
		n.all = n.internal
	}
	list := o.Spec.PodCIDRs
	if len(list) == 0 && o.Spec.PodCIDR != "" {
		list = []string{o.Spec.PodCIDR}
	}
	for i, s := range list {
		p, err := readRange(s)
		if err == "" && len(n.ranges) == mostRanges {
			err = fmt.Sprintf("%d ranges of a Node are the most that count; this one doesn't", mostRanges)
		}
		if err != "" {
			n.faulty = append(n.faulty, source.Problem{Object: n.key(), Field: fmt.Sprintf("spec.podCIDRs[%d]", i),
				Reason: "InvalidPodCIDR", Message: err})
			if len(n.faulty) == mostRanges {
				break
			}
			continue
		}
		n.ranges = append(n.ranges, podRange{p, i})
	}
	return n
}

// readRange reads a podCIDR. Without a fault the text is empty.
func readRange(s string) (p netip.Prefix, fault string) {
	p, err := netip.ParsePrefix(s)
	switch a := p.Addr(); {
	case err != nil || a.Is4In6():
		return p, fmt.Sprintf("%q is no range of addresses: use one such as 10.244.1.0/24; no pod gets an address of it", s)
	case a.BitLen()-p.Bits() < 2:
		return p, fmt.Sprintf("%s is too small: the node itself and a pod need an address each; use a shorter prefix", p)
	case p.Bits() == 0 || a.IsMulticast() || a.IsLoopback() || a.IsLinkLocalUnicast():
		return p, fmt.Sprintf("%s can't be addresses of pods: use private unicast addresses", p)
	}
	return p.Masked(), ""
}

// ownAddress returns the address in a range that belongs to the node itself: the second, as routers usually have.
func ownAddress(p netip.Prefix) netip.Addr { return p.Addr().Next() }

// MAC returns the link-layer address of the tunnel's end at an outer address: locally administered, 02:66 and an IPv4
// address, or a hash of an IPv6 address.
func MAC(a netip.Addr) [6]byte {
	mac := [6]byte{0x02, 0x66}
	if a.Is4() {
		four := a.As4()
		copy(mac[2:], four[:])
		return mac
	}
	h := fnv.New32a()
	h.Write(a.AsSlice())
	binary.BigEndian.PutUint32(mac[2:], h.Sum32())
	return mac
}

// gateway returns the next hop inside the tunnel to another node's range: its own address there, for IPv6 the
// link-local
// address of its end (RFC 4291, appendix A), since the kernel refuses a gateway to which it has a route elsewhere.
func gateway(p netip.Prefix, mac [6]byte) netip.Addr {
	if p.Addr().Is4() {
		return ownAddress(p)
	}
	return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 8: mac[0] ^ 2, 9: mac[1], 10: mac[2], 11: 0xff, 12: 0xfe,
		13: mac[3], 14: mac[4], 15: mac[5]})
}

// familyOf returns "IPv4" or "IPv6".
func familyOf(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}
