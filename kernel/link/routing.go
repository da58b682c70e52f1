package link

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Way is a route of a table of its owner's own, Table, which Owner marks as theirs (RTA_TABLE and rtm_protocol). A Local
// way leads its packets to this host's own sockets; a Blackhole drops them.
type Way struct {
	Owner     uint8
	Table     uint32
	To        netip.Prefix
	Local     bool
	Blackhole bool
	Via       netip.Addr // next hop on Dev's link; zero: To is on the link itself
	Dev       int
	Source    netip.Addr // the source that the kernel prefers; zero: its choice
	MTU       uint32     // bytes of the longest packet that takes it; 0: as many as Dev takes
}

// Rule sends packets to a table (ip-rule(8)). Zero fields match everything.
type Rule struct {
	Owner    uint8 // FRA_PROTOCOL
	Priority uint32
	Six      bool // of IPv6
	From, To netip.Prefix
	Input    string // name of the interface that they come by; "lo" stands for packets of this host's own
	Protocol uint8  // IP protocol number
	FromPort uint16
	ToPort   PortRange
	Table    uint32 // 0: none, the rule does nothing but be there
	Goto     uint32 // in place of Table: go on with the rule of this priority
	Again    bool   // put it behind others of its priority, even if an equal one is there
	More     bool   // read alone: it also looks at what has no field here, such as a packet's mark
}

// PortRange is ports from First to Last.
type PortRange struct{ First, Last uint16 }

// Change is a way or rule that is to be, or with Gone not to be. A way takes the place of another to the same prefix in
// its table; to go, it is known by what is set of it.
type Change struct {
	Way  *Way
	Rule *Rule
	Gone bool
}

// String says what is tried, for errors.
func (c Change) String() string {
	verb := "set"
	if c.Gone {
		verb = "delete"
	}
	if c.Way != nil {
		return fmt.Sprintf("%s route to %s in table %#x", verb, c.Way.To, c.Way.Table)
	}
	return fmt.Sprintf("%s rule %d of protocol %d port %d for table %#x", verb, c.Rule.Priority, c.Rule.Protocol, c.Rule.ToPort.First, c.Rule.Table)
}

// Policy is a netlink socket for routes and rules by the thousand. It may not be used by two goroutines at once.
type Policy struct {
	fd   int
	port uint32
	seq  uint32
}

// DialPolicy connects to the calling thread's network namespace.
func DialPolicy() (*Policy, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	p := &Policy{fd: fd}
	unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1) // has dumps be filtered by the kernel, where it can
	unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	if err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err == nil {
		var a unix.Sockaddr
		if a, err = unix.Getsockname(fd); err == nil {
			p.port = a.(*unix.SockaddrNetlink).Pid
			return p, nil
		}
	}
	unix.Close(fd)
	return nil, fmt.Errorf("bind netlink socket: %w", err)
}

// Close gives the socket back.
func (p *Policy) Close() error { return unix.Close(p.fd) }

// batch is how many requests are under way at once: their acknowledgements fit in a socket's usual buffer.
const batch = 100

// Apply makes changes in order. What is there already, or gone already, is no error. It tries all, and joins the errors.
func (p *Policy) Apply(changes []Change) error {
	var errs []error
	for part := range slices.Chunk(changes, batch) {
		first := p.seq + 1
		var b []byte
		for _, c := range part {
			p.seq++
			b = c.append(b, p.seq)
		}
		if err := unix.Sendto(p.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return errors.Join(append(errs, fmt.Errorf("%v and %d more: %w", part[0], len(part)-1, err))...)
		}
		left := len(part)
		err := p.receive(func(m message) bool {
			if i := m.seq - first; m.kind == unix.NLMSG_ERROR && i < uint32(len(part)) {
				left--
				if e := m.errno(); e != nil && !part[i].nothingToDo(e) {
					errs = append(errs, fmt.Errorf("%v: %w", part[i], e))
				}
			}
			return left > 0
		})
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
	}
	return errors.Join(errs...)
}

// nothingToDo says whether err means that all is as wanted.
func (c Change) nothingToDo(err error) bool {
	if c.Gone {
		return errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV)
	}
	return c.Rule != nil && errors.Is(err, unix.EEXIST)
}

// Attributes of rules (linux/fib_rules.h).
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
	headerLength = 12 // of struct rtmsg and of struct fib_rule_hdr
)

// append adds c as a netlink message.
func (c Change) append(b []byte, seq uint32) []byte {
	start := len(b)
	kind, flags := uint16(unix.RTM_NEWROUTE), uint16(unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	if c.Rule != nil {
		if kind, flags = unix.RTM_NEWRULE, unix.NLM_F_CREATE; !c.Rule.Again {
			flags |= unix.NLM_F_EXCL
		}
	}
	if c.Gone {
		kind, flags = kind+1, 0
	}
	b = header(b, kind, flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK, seq)
	if c.Way != nil {
		b = c.Way.append(b, c.Gone)
	} else {
		b = c.Rule.append(b)
	}
	binary.NativeEndian.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

func header(b []byte, kind, flags uint16, seq uint32) []byte {
	b = append(b, 0, 0, 0, 0)
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	return append(b, 0, 0, 0, 0)
}

func familyOf(six bool) uint8 {
	if six {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// append adds the route. One that is to go is looked for by what is set alone.
func (w *Way) append(b []byte, gone bool) []byte {
	kind, scope, flags := uint8(unix.RTN_UNICAST), uint8(unix.RT_SCOPE_UNIVERSE), uint32(0)
	if w.Local {
		kind, scope = unix.RTN_LOCAL, unix.RT_SCOPE_HOST
	} else if w.Blackhole {
		kind = unix.RTN_BLACKHOLE
	} else if !w.Via.IsValid() {
		scope = unix.RT_SCOPE_LINK
	} else {
		flags = unix.RTNH_F_ONLINK
	}
	if gone {
		kind, scope, flags = unix.RTN_UNSPEC, unix.RT_SCOPE_NOWHERE, 0
	}
	b = append(b, familyOf(w.To.Addr().Is6()), uint8(w.To.Bits()), 0, 0, unix.RT_TABLE_UNSPEC, w.Owner, scope, kind)
	b = binary.NativeEndian.AppendUint32(b, flags)
	b = attribute(b, unix.RTA_TABLE, word(w.Table))
	b = attribute(b, unix.RTA_DST, w.To.Addr().AsSlice())
	if w.Via.IsValid() {
		b = attribute(b, unix.RTA_GATEWAY, w.Via.AsSlice())
	}
	if w.Source.IsValid() {
		b = attribute(b, unix.RTA_PREFSRC, w.Source.AsSlice())
	}
	if w.Dev != 0 {
		b = attribute(b, unix.RTA_OIF, word(uint32(w.Dev)))
	}
	if w.MTU != 0 {
		b = attribute(b, unix.RTA_METRICS, attribute(nil, unix.RTAX_MTU, word(w.MTU)))
	}
	return b
}

func (r *Rule) append(b []byte) []byte {
	action := uint8(actToTable)
	if r.Goto != 0 {
		action = actGoto
	} else if r.Table == 0 {
		action = actNothing
	}
	b = append(b, familyOf(r.Six), uint8(max(0, r.To.Bits())), uint8(max(0, r.From.Bits())), 0, 0, 0, 0, action, 0, 0, 0, 0)
	b = attribute(b, fraProtocol, []byte{r.Owner})
	b = attribute(b, fraPriority, word(r.Priority))
	if r.To.IsValid() {
		b = attribute(b, fraDst, r.To.Addr().AsSlice())
	}
	if r.From.IsValid() {
		b = attribute(b, fraSrc, r.From.Addr().AsSlice())
	}
	if r.Input != "" {
		b = attribute(b, fraIifname, append([]byte(r.Input), 0))
	}
	if r.Protocol != 0 {
		b = attribute(b, fraIPProto, []byte{r.Protocol})
	}
	if r.FromPort != 0 {
		b = attribute(b, fraSportRng, PortRange{r.FromPort, r.FromPort}.bytes())
	}
	if r.ToPort != (PortRange{}) {
		b = attribute(b, fraDportRng, r.ToPort.bytes())
	}
	switch action {
	case actGoto:
		return attribute(b, fraGoto, word(r.Goto))
	case actToTable:
		return attribute(b, fraTable, word(r.Table))
	}
	return b
}

func (p PortRange) bytes() []byte {
	return binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, p.First), p.Last)
}

func word(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

func attribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, (4-len(value)%4)%4)...)
}

// message is a netlink message without its header.
type message struct {
	kind, flags uint16
	seq, port   uint32
	body        []byte
}

// errno gives the error of an NLMSG_ERROR, nil for an acknowledgement.
func (m message) errno() error {
	if len(m.body) < 4 {
		return unix.EBADMSG
	}
	if e := int32(binary.NativeEndian.Uint32(m.body)); e != 0 {
		return unix.Errno(-e)
	}
	return nil
}

// attributes calls f with each attribute after the first skip bytes.
func (m message) attributes(skip int, f func(kind uint16, value []byte)) {
	for b := m.body[min(skip, len(m.body)):]; len(b) >= 4; {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&0x3fff, b[4:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

// messages calls f with each message of a datagram until it returns false.
func messages(b []byte, f func(message) bool) bool {
	for len(b) >= unix.SizeofNlMsghdr {
		n := int(binary.NativeEndian.Uint32(b))
		if n < unix.SizeofNlMsghdr || n > len(b) {
			return true
		}
		m := message{binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]), binary.NativeEndian.Uint32(b[12:]), b[unix.SizeofNlMsghdr:n]}
		if !f(m) {
			return false
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return true
}

// receive calls f with each message that comes until it returns false.
func (p *Policy) receive(f func(message) bool) error {
	b := make([]byte, 64<<10)
	for {
		n, _, err := unix.Recvfrom(p.fd, b, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("netlink: %w", err)
		}
		if !messages(b[:n], f) {
			return nil
		}
	}
}

// request sends a request of a kind and calls f with each message of its answer: a dump's, or one alone.
func (p *Policy) request(kind, flags uint16, body []byte, f func(message)) error {
	p.seq++
	b := append(header(nil, kind, unix.NLM_F_REQUEST|flags, p.seq), body...)
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	if err := unix.Sendto(p.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	var failed error
	err := p.receive(func(m message) bool {
		switch {
		case m.seq != p.seq:
			return true
		case m.kind == unix.NLMSG_DONE:
			return false
		case m.kind == unix.NLMSG_ERROR:
			failed = m.errno()
			return false
		}
		if m.flags&unix.NLM_F_DUMP_INTR != 0 {
			failed = errors.New("the dump was interrupted by changes; try again")
		}
		f(m)
		return flags&unix.NLM_F_DUMP != 0
	})
	return errors.Join(err, failed)
}

// Ways gives the routes that owner has in its own tables.
func (p *Policy) Ways(owner uint8) (list []Way, err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		body := make([]byte, headerLength)
		body[0], body[5] = family, owner
		err := p.request(unix.RTM_GETROUTE, unix.NLM_F_DUMP, body, func(m message) {
			if len(m.body) >= headerLength && m.body[5] == owner && m.body[0] == family { // without IPv6, the kernel gives IPv4's again
				list = append(list, way(m))
			}
		})
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
	}
	return list, nil
}

// Reach is where packets to a prefix leave: by the interface of that name.
type Reach struct {
	To        netip.Prefix
	Interface string
}

// Reached returns the unicast routes of the main table that have one interface, the longest prefixes first.
func (p *Policy) Reached() (list []Reach, err error) {
	names := map[int]string{}
	body := make([]byte, unix.SizeofIfInfomsg)
	const skipStatistics = 1 << 3 // RTEXT_FILTER_SKIP_STATS
	body = attribute(body, unix.IFLA_EXT_MASK, binary.NativeEndian.AppendUint32(nil, skipStatistics))
	err = p.request(unix.RTM_GETLINK, unix.NLM_F_DUMP, body, func(m message) {
		m.attributes(unix.SizeofIfInfomsg, func(kind uint16, v []byte) {
			if kind == unix.IFLA_IFNAME && len(v) > 0 {
				names[int(binary.NativeEndian.Uint32(m.body[4:]))] = string(v[:len(v)-1])
			}
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		body := make([]byte, headerLength)
		body[0], body[4], body[7] = family, unix.RT_TABLE_MAIN, unix.RTN_UNICAST
		err := p.request(unix.RTM_GETROUTE, unix.NLM_F_DUMP, body, func(m message) {
			if w, main := m.main(); main && m.body[0] == family && w.Dev != 0 {
				list = append(list, Reach{w.To, names[w.Dev]})
			}
		})
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
	}
	slices.SortStableFunc(list, func(a, b Reach) int { return b.To.Bits() - a.To.Bits() })
	return list, nil
}

// main reads a route, and reports whether it is a unicast one of the main table.
func (m message) main() (Way, bool) {
	if len(m.body) < headerLength || m.body[7] != unix.RTN_UNICAST {
		return Way{}, false
	}
	w := way(m)
	return w, w.Table == unix.RT_TABLE_MAIN
}

// way reads a route.
func way(m message) Way {
	w := Way{Owner: m.body[5], Table: uint32(m.body[4]), Local: m.body[7] == unix.RTN_LOCAL,
		Blackhole: m.body[7] == unix.RTN_BLACKHOLE}
	to := unspecified(m.body[0])
	m.attributes(headerLength, func(kind uint16, v []byte) {
		switch {
		case kind == unix.RTA_TABLE && len(v) == 4:
			w.Table = binary.NativeEndian.Uint32(v)
		case kind == unix.RTA_DST:
			to = addr(v)
		case kind == unix.RTA_GATEWAY:
			w.Via = addr(v)
		case kind == unix.RTA_PREFSRC:
			w.Source = addr(v)
		case kind == unix.RTA_OIF && len(v) == 4:
			w.Dev = int(binary.NativeEndian.Uint32(v))
		case kind == unix.RTA_METRICS:
			message{body: v}.attributes(0, func(kind uint16, v []byte) {
				if kind == unix.RTAX_MTU && len(v) == 4 {
					w.MTU = binary.NativeEndian.Uint32(v)
				}
			})
		}
	})
	w.To = netip.PrefixFrom(to, int(m.body[1]))
	return w
}

func addr(b []byte) netip.Addr { a, _ := netip.AddrFromSlice(b); return a }

func unspecified(family uint8) netip.Addr {
	if family == unix.AF_INET {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// Rules gives the rules that owner has, in the order in which the kernel asks them; those of all owners for owner 0.
func (p *Policy) Rules(owner uint8) (list []Rule, err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		body := make([]byte, headerLength)
		body[0] = family
		err := p.request(unix.RTM_GETRULE, unix.NLM_F_DUMP, body, func(m message) {
			if r := rule(m); r.Owner == owner || owner == 0 {
				list = append(list, r)
			}
		})
		if errors.Is(err, unix.EAFNOSUPPORT) && family == unix.AF_INET6 {
			continue // a kernel without IPv6, or without rules for it, has none
		}
		if err != nil {
			return nil, fmt.Errorf("list rules: %w", err)
		}
	}
	return list, nil
}

// rule reads a rule.
func rule(m message) (r Rule) {
	if len(m.body) < headerLength {
		return r
	}
	const invert = 2 // FIB_RULE_INVERT
	r.Six, r.Table = m.body[0] == unix.AF_INET6, uint32(m.body[4])
	r.More = m.body[3] != 0 || binary.NativeEndian.Uint32(m.body[8:])&invert != 0 // the type of service
	m.attributes(headerLength, func(kind uint16, v []byte) {
		number := uint32(0)
		if len(v) == 4 {
			number = binary.NativeEndian.Uint32(v)
		}
		switch kind {
		case fraProtocol:
			r.Owner = v[0]
		case fraIPProto:
			r.Protocol = v[0]
		case fraPriority:
			r.Priority = number
		case fraTable:
			r.Table = number
		case fraGoto:
			r.Goto, r.Table = number, 0
		case fraDst:
			r.To = netip.PrefixFrom(addr(v), int(m.body[1]))
		case fraSrc:
			r.From = netip.PrefixFrom(addr(v), int(m.body[2]))
		case fraIifname:
			r.Input = string(v[:len(v)-1])
		case fraSportRng:
			r.FromPort = binary.NativeEndian.Uint16(v)
		case fraDportRng:
			r.ToPort = PortRange{binary.NativeEndian.Uint16(v), binary.NativeEndian.Uint16(v[2:])}
		case fraMark, fraTunnel, fraOifname, fraUsers, fraDSCP, fraFlowLabel:
			r.More = true
		case fraL3mdev:
			r.More = r.More || v[0] != 0
		}
	})
	return r
}

// Source gives the source address that the kernel would take for packets of its own to an address; zero where it has no
// route there.
func (p *Policy) Source(to netip.Addr) (from netip.Addr) {
	body := make([]byte, headerLength)
	body[0], body[1] = familyOf(to.Is6()), uint8(to.BitLen())
	p.request(unix.RTM_GETROUTE, 0, attribute(body, unix.RTA_DST, to.AsSlice()), func(m message) {
		if len(m.body) >= headerLength && m.kind == unix.RTM_NEWROUTE && m.body[7] == unix.RTN_UNICAST {
			from = way(m).Source
		}
	})
	return from
}

// Addresses gives the addresses of the namespace's interfaces.
func (p *Policy) Addresses() (map[netip.Addr]bool, error) {
	own := map[netip.Addr]bool{}
	const size = 8 // of struct ifaddrmsg
	err := p.request(unix.RTM_GETADDR, unix.NLM_F_DUMP, make([]byte, size), func(m message) {
		var address, local netip.Addr
		m.attributes(size, func(kind uint16, v []byte) {
			switch kind {
			case unix.IFA_ADDRESS:
				address = addr(v)
			case unix.IFA_LOCAL:
				local = addr(v)
			}
		})
		if local.IsValid() {
			address = local // of a point-to-point interface, the other is its peer's
		}
		own[address] = true
	})
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	return own, nil
}

// Watch sends whenever an address comes or goes, whenever anyone but p changes a way or rule of owner, whenever an
// interface whose name is dev changes, and, while main reports true, whenever what Reached returns may change, until
// ctx ends; then it closes the channel. It is called on a thread of the namespace.
func (p *Policy) Watch(ctx context.Context, owner uint8, dev string, main func() bool) (<-chan struct{}, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err == nil {
		err = p.listen(fd)
	}
	if err != nil {
		unix.Close(fd)
		unix.Close(wake)
		return nil, fmt.Errorf("listen for routes and addresses: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { unix.Write(wake, binary.NativeEndian.AppendUint64(nil, 1)) })
	changes := make(chan struct{}, 1)
	go func() {
		defer close(changes)
		defer unix.Close(fd)
		defer unix.Close(wake)
		defer stop()
		follow(ctx, fd, wake, changes, func(m message) bool {
			if m.kind == unix.RTM_NEWROUTE || m.kind == unix.RTM_DELROUTE {
				if _, is := m.main(); is && main() {
					return true
				}
			}
			return m.concerns(owner, dev)
		})
	}()
	return changes, nil
}

// listen joins the groups of events, of which the kernel filters out those that p itself causes.
func (p *Policy) listen(fd int) error {
	own := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, p.port))
	program, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 12, Size: 4}, // nlmsg_pid
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: own, SkipFalse: 1},
		bpf.RetConstant{Val: 0},
		bpf.RetConstant{Val: 1 << 30},
	})
	if err != nil {
		return err
	}
	filter := make([]unix.SockFilter, len(program))
	for i, q := range program {
		filter[i] = unix.SockFilter{Code: q.Op, Jt: q.Jt, Jf: q.Jf, K: q.K}
	}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}); err != nil {
		return err
	}
	const groups = 1<<(unix.RTNLGRP_LINK-1) | 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1) | 1<<(unix.RTNLGRP_IPV4_ROUTE-1) |
		1<<(unix.RTNLGRP_IPV6_ROUTE-1) | 1<<(unix.RTNLGRP_IPV4_RULE-1) | 1<<(unix.RTNLGRP_IPV6_RULE-1)
	return unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups})
}

// concerns says whether an event is one of those that Watch tells of.
func (m message) concerns(owner uint8, dev string) (yes bool) {
	switch m.kind {
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return true
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		return len(m.body) >= headerLength && m.body[5] == owner
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		return rule(m).Owner == owner
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		m.attributes(unix.SizeofIfInfomsg, func(kind uint16, v []byte) {
			yes = yes || kind == unix.IFLA_IFNAME && string(v) == dev+"\x00"
		})
	}
	return yes
}

// follow reads events until wake is written to, and passes on that one concerns us, or that some were lost.
func follow(ctx context.Context, fd, wake int, changes chan<- struct{}, concerns func(message) bool) {
	b := make([]byte, 64<<10)
	for ctx.Err() == nil {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}, {Fd: int32(wake), Events: unix.POLLIN}}
		if _, err := unix.Poll(p, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		if p[0].Revents == 0 {
			continue
		}
		n, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
		yes := errors.Is(err, unix.ENOBUFS)
		if err == nil {
			messages(b[:n], func(m message) bool { yes = yes || concerns(m); return true })
		}
		if yes {
			select {
			case changes <- struct{}{}:
			default: // one is waiting already
			}
		}
	}
}
