// Package rule writes, reads and follows rules of routing (ip-rule(8)). It writes into netlink.Batch and reads by a
// netlink.Socket of unix.NETLINK_ROUTE: see package route.
package rule

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// Rule sends packets to a table. Zero fields match everything.
type Rule struct {
	Owner      uint8 // FRA_PROTOCOL
	Priority   uint32
	Six        bool // of IPv6
	From, To   netip.Prefix
	Input      string // name of the interface that they come by; "lo" stands for packets of this host's own
	Protocol   uint8  // IP protocol number
	FromPort   uint16
	ToPort     PortRange
	Mark, Mask uint32 // which bits of the packet's mark are to be which
	Table      uint32 // 0: none, the rule does nothing but be there
	Goto       uint32 // in place of Table: go on with the rule of this priority
	Again      bool   // put it behind others of its priority, even if an equal one is there
	More       bool   // read alone: it also looks at what has no field here, such as a packet's user
}

// PortRange is ports from First to Last.
type PortRange struct{ First, Last uint16 }

// Put makes rules. One that is there already is no error.
func Put(b *netlink.Batch, rules ...Rule) {
	for _, r := range rules {
		flags := uint16(unix.NLM_F_CREATE)
		if !r.Again {
			flags |= unix.NLM_F_EXCL
		}
		b.Add(unix.RTM_NEWRULE, flags, func() string { return "set " + r.String() }, r.write, unix.EEXIST)
	}
}

// Delete removes rules. One that isn't there is no error.
func Delete(b *netlink.Batch, rules ...Rule) {
	for _, r := range rules {
		said := func() string { return "delete " + r.String() }
		b.Add(unix.RTM_DELRULE, 0, said, r.write, unix.ESRCH, unix.ENOENT, unix.ENODEV)
	}
}

// String returns text such as "rule 50 of protocol 6 port 80 for table 0x7", for errors.
func (r Rule) String() string {
	text := fmt.Sprintf("rule %d", r.Priority)
	if r.Mask != 0 {
		text += fmt.Sprintf(" mark %#x/%#x", r.Mark, r.Mask)
	}
	if r.Protocol != 0 || r.ToPort != (PortRange{}) {
		text += fmt.Sprintf(" of protocol %d port %d", r.Protocol, r.ToPort.First)
	}
	return text + fmt.Sprintf(" for table %#x", r.Table)
}

// Attributes and actions of rules (linux/fib_rules.h).
const (
	fraDst = iota + 1
	fraSrc
	fraIifname
	fraGoto
	_
	fraPriority
	fraMark      = 10
	fraTunnel    = 12
	fraTable     = 15
	fraMask      = 16
	fraOifname   = 17
	fraL3mdev    = 19
	fraUsers     = 20
	fraProtocol  = 21
	fraIPProto   = 22
	fraSportRng  = 23
	fraDportRng  = 24
	fraDSCP      = 25
	fraFlowLabel = 26
	actToTable   = 1
	actGoto      = 2
	actNothing   = 3
	headerLength = 12 // of struct fib_rule_hdr
)

func (r Rule) write(m *netlink.Buffer) {
	action := uint8(actToTable)
	if r.Goto != 0 {
		action = actGoto
	} else if r.Table == 0 {
		action = actNothing
	}
	to, from := uint8(max(0, r.To.Bits())), uint8(max(0, r.From.Bits()))
	*m = append(*m, family(r.Six), to, from, 0, 0, 0, 0, action, 0, 0, 0, 0)
	m.Uint8(fraProtocol, r.Owner)
	m.Uint32(fraPriority, r.Priority)
	if r.To.IsValid() {
		m.Bytes(fraDst, r.To.Addr().AsSlice())
	}
	if r.From.IsValid() {
		m.Bytes(fraSrc, r.From.Addr().AsSlice())
	}
	if r.Input != "" {
		m.Text(fraIifname, r.Input)
	}
	if r.Protocol != 0 {
		m.Uint8(fraIPProto, r.Protocol)
	}
	if r.FromPort != 0 {
		m.Bytes(fraSportRng, PortRange{r.FromPort, r.FromPort}.bytes())
	}
	if r.ToPort != (PortRange{}) {
		m.Bytes(fraDportRng, r.ToPort.bytes())
	}
	if r.Mask != 0 {
		m.Uint32(fraMark, r.Mark)
		m.Uint32(fraMask, r.Mask)
	}
	switch action {
	case actGoto:
		m.Uint32(fraGoto, r.Goto)
	case actToTable:
		m.Uint32(fraTable, r.Table)
	}
}

func family(six bool) uint8 {
	if six {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func (p PortRange) bytes() []byte {
	return binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, p.First), p.Last)
}

// portRange reads what bytes returned.
func portRange(v []byte) (p PortRange) {
	if len(v) == 4 {
		p = PortRange{binary.NativeEndian.Uint16(v), binary.NativeEndian.Uint16(v[2:])}
	}
	return p
}

// List returns the rules that owner has, in the order in which the kernel evaluates them; those of all owners for
// owner 0.
func List(s *netlink.Socket, owner uint8) (l []Rule, err error) {
	err = netlink.Stable(func() error {
		l = nil
		for _, six := range []bool{false, true} {
			request := func(b *netlink.Buffer) { *b = append(*b, family(six), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) }
			err := s.Request(unix.RTM_GETRULE, unix.NLM_F_DUMP, request, func(m netlink.Message) {
				if r, ok := Of(m); ok && (r.Owner == owner || owner == 0) {
					l = append(l, r)
				}
			})
			if six && errors.Is(err, unix.EAFNOSUPPORT) {
				continue // a kernel without IPv6, or without rules for it, has none
			}
			if err != nil {
				return fmt.Errorf("list rules: %w", err)
			}
		}
		return nil
	})
	return l, err
}

// Of reads a message, and reports whether it is about a rule.
func Of(m netlink.Message) (r Rule, ok bool) {
	if m.Type != unix.RTM_NEWRULE && m.Type != unix.RTM_DELRULE || len(m.Body) < headerLength {
		return r, false
	}
	const invert = 2 // FIB_RULE_INVERT
	r.Six, r.Table = m.Body[0] == unix.AF_INET6, uint32(m.Body[4])
	r.More = m.Body[3] != 0 || binary.NativeEndian.Uint32(m.Body[8:])&invert != 0 // the type of service
	for t, v := range m.Attributes(headerLength) {
		r.read(t, v, m.Body[1], m.Body[2])
	}
	return r, true
}

// read reads an attribute. Lengths of prefixes are in bits.
func (r *Rule) read(t uint16, v []byte, toLength, fromLength uint8) {
	switch t {
	case fraProtocol:
		r.Owner = uint8(netlink.Uint(v))
	case fraIPProto:
		r.Protocol = uint8(netlink.Uint(v))
	case fraPriority:
		r.Priority = netlink.Uint(v)
	case fraTable:
		r.Table = netlink.Uint(v)
	case fraGoto:
		r.Goto, r.Table = netlink.Uint(v), 0
	case fraDst:
		r.To = prefix(v, toLength)
	case fraSrc:
		r.From = prefix(v, fromLength)
	case fraIifname:
		r.Input = netlink.Text(v)
	case fraSportRng:
		r.FromPort = portRange(v).First
	case fraDportRng:
		r.ToPort = portRange(v)
	case fraMark:
		r.Mark = netlink.Uint(v)
	case fraMask:
		r.Mask = netlink.Uint(v)
	case fraTunnel, fraOifname, fraUsers, fraDSCP, fraFlowLabel:
		r.More = true
	case fraL3mdev:
		r.More = r.More || netlink.Uint(v) != 0
	}
}

func prefix(v []byte, bits uint8) netip.Prefix {
	a, _ := netip.AddrFromSlice(v)
	return netip.PrefixFrom(a, int(bits))
}
