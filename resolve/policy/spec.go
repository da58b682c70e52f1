package policy

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
)

// digest is a SHA-256 of what something is.
type digest [sha256.Size]byte

// kind is what a peer selects.
type kind uint8

const (
	pods kind = iota
	nodes
	block
	blockPods   // addresses of a CIDR that are pods' with a named port
	unknownPods // addresses of pod ranges that are no known pod's
	domains     // addresses of domain names
)

// peerSpec is one selector or CIDR of a rule.
type peerSpec struct {
	text   string
	digest digest
	kind   kind

	namespace  string   // of pods: the one namespace, or else
	namespaces selector // those that match
	labels     selector // of pods or nodes
	port       *port    // of pods: they also have this port

	cidr   netip.Prefix
	except []netip.Prefix // parts of cidr

	domain string // as domainName reads it
}

// port is a port of a pod that has a name.
type port struct {
	name     string
	protocol model.Protocol
	number   uint16
}

func (p port) String() string { return fmt.Sprintf("%s=%d/%s", quote(p.name), p.number, p.protocol) }

// named sets the text of s, and returns s.
func (s *peerSpec) named() *peerSpec {
	switch s.kind {
	case pods:
		s.text = fmt.Sprintf("pods{%s}", s.labels)
		if s.namespace != "" {
			s.text += " in " + quote(s.namespace)
		} else {
			s.text += fmt.Sprintf(" in namespaces{%s}", s.namespaces)
		}
	case nodes:
		s.text = fmt.Sprintf("nodes{%s}", s.labels)
	case block, blockPods:
		if s.text = s.cidr.String(); len(s.except) > 0 {
			var b strings.Builder
			for _, e := range s.except {
				b.WriteString("," + e.String())
			}
			s.text += " except " + b.String()[1:]
		}
	case unknownPods:
		s.text = "unknown pods"
	case domains:
		s.text = "name " + s.domain
	}
	if s.port != nil {
		s.text += " with port " + s.port.String()
	}
	s.digest = sha256.Sum256([]byte(s.text))
	return s
}

// on returns s with the port p, nil where that matches nothing.
func (s *peerSpec) on(p port) *peerSpec {
	switch s.kind {
	case pods, block:
		c := *s
		if c.port = &p; s.kind == block {
			c.kind = blockPods
		}
		return c.named()
	case unknownPods:
		return s
	}
	return nil
}

// holds reports whether a is one of the addresses of s, which has a CIDR.
func (s *peerSpec) holds(a netip.Addr) bool {
	return s.cidr.Contains(a) && !slices.ContainsFunc(s.except, func(e netip.Prefix) bool { return e.Contains(a) })
}

// matches reports whether s matches the class c.
func (s *peerSpec) matches(c *class) bool {
	switch s.kind {
	case pods:
		if c.namespace == nil || s.namespace != "" && s.namespace != c.namespace.name {
			return false
		}
		return (s.namespace != "" || s.namespaces.matches(c.namespace.labels)) && s.labels.matches(c.labels) &&
			(s.port == nil || slices.Contains(c.named(), *s.port))
	case nodes:
		return c.namespace == nil && s.labels.matches(c.labels)
	}
	return false
}

// newBlock returns what matches addresses of cidr but those in except, nil where that is none.
func newBlock(cidr netip.Prefix, except []netip.Prefix) *peerSpec {
	s := &peerSpec{kind: block, cidr: cidr.Masked()}
	for _, e := range except {
		e = e.Masked()
		switch {
		case !e.Overlaps(s.cidr):
		case e.Bits() <= s.cidr.Bits():
			return nil
		default:
			s.except = append(s.except, e)
		}
	}
	slices.SortFunc(s.except, netip.Prefix.Compare) // the wider of two that overlap is first
	n := 0
	for _, e := range s.except {
		if n == 0 || !s.except[n-1].Overlaps(e) {
			s.except[n], n = e, n+1
		}
	}
	s.except = s.except[:n]
	return s.named()
}

var (
	unknown = (&peerSpec{kind: unknownPods}).named()
	anyPod  = (&peerSpec{kind: pods}).named()
)

// readPrefix reads a CIDR as the API server has it: leading zeros and IPv4-mapped addresses are errors.
func readPrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err == nil && p.Addr().Is4In6() {
		err = fmt.Errorf("%q is an IPv4-mapped range", s)
	}
	return p.Masked(), err
}
