package rules

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	nft "fairlead.dev/fairlead/kernel/nftables"
)

// instructions run the instructions by the kernel's names; their attributes' numbers are those of
// include/uapi/linux/netfilter/nf_tables.h, what they do that of net/netfilter/nft_*.c.
var instructions map[string]func(*machine, nft.Instruction) (nft.Verdict, error)

func init() { // not in place, as look-ups lead back here
	instructions = map[string]func(*machine, nft.Instruction) (nft.Verdict, error){
		"immediate": immediate, "payload": payload, "meta": meta, "ct": ct, "cmp": compare, "range": within,
		"bitwise": bitwise, "byteorder": byteorder,
		"lookup": lookup, "fib": fib, "numgen": numgen, "nat": translate, "masq": masquerade, "reject": refuse,
		"dynset":  remember,
		"counter": nothing, "log": nothing, "notrack": notrack,
	}
}

var errUnknown = errors.New("this form is not understood")

func nothing(*machine, nft.Instruction) (nft.Verdict, error) { return goOn, nil }

func notrack(m *machine, _ nft.Instruction) (nft.Verdict, error) {
	m.untracked = true
	return goOn, nil
}

func immediate(m *machine, i nft.Instruction) (nft.Verdict, error) {
	if v := i.Verdict(2); v != nil {
		return *v, nil
	}
	return goOn, m.put(i.Number(1), i.Value(2))
}

func payload(m *machine, i nft.Instruction) (nft.Verdict, error) {
	if i.Has(5) { // writes into the packet
		return goOn, errUnknown
	}
	network, transport := m.header()
	var b []byte
	switch nft.Base(i.Number(2)) {
	case nft.NetworkHeader:
		b = append(network, transport...) // what follows the header may be loaded with it
	case nft.TransportHeader:
		b = transport
	default:
		return goOn, errUnknown
	}
	at, n := i.Number(3), i.Number(4)
	if at+n > uint32(len(b)) {
		return noMatch, nil
	}
	return goOn, m.put(i.Number(1), b[at:at+n])
}

// index returns a device's number: 0 for none, 1 for the loopback device, 2 for any other.
func index(device string) int {
	switch device {
	case "":
		return 0
	case "lo":
		return 1
	}
	return 2
}

// meta loads or, with a source register, sets a property.
func meta(m *machine, i nft.Instruction) (nft.Verdict, error) {
	const mark, iif, oif, iifname, oifname, iiftype, nftrace, nfproto, l4proto = 3, 4, 5, 6, 7, 8, 12, 15, 16
	key := i.Number(2)
	if i.Has(3) {
		r, err := m.reg(i.Number(3), 4)
		switch {
		case err != nil:
		case key == mark:
			m.mark = binary.NativeEndian.Uint32(r)
		case key != nftrace:
			err = fmt.Errorf("key %d: %w", key, errUnknown)
		}
		return goOn, err
	}
	var v []byte
	switch key {
	case mark:
		v = native(m.mark)
	case iif:
		v = native(uint32(index(m.in())))
	case oif:
		v = native(uint32(index(m.out())))
	case iifname:
		v = append([]byte(m.in()), make([]byte, unix.IFNAMSIZ-len(m.in()))...)
	case oifname:
		v = append([]byte(m.out()), make([]byte, unix.IFNAMSIZ-len(m.out()))...)
	case iiftype:
		switch m.in() {
		case "":
			return noMatch, nil
		case "lo":
			v = binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_LOOPBACK)
		default:
			v = binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_ETHER)
		}
	case nfproto:
		v = []byte{unix.NFPROTO_IPV4}
		if m.to.Addr().Is6() {
			v[0] = unix.NFPROTO_IPV6
		}
	case l4proto:
		v = []byte{byte(m.Protocol)}
	default:
		return goOn, fmt.Errorf("key %d: %w", key, errUnknown)
	}
	return goOn, m.put(i.Number(1), v)
}

// ct loads a property of the connection. Its original direction is the packet's.
func ct(m *machine, i nft.Instruction) (nft.Verdict, error) {
	const state, direction, status, l3proto, src, dst, proto, sport, dport, src4, dst4, src6, dst6 = 0, 1, 2, 7, 8, 9, 10,
		11, 12, 19, 20, 21, 22
	if m.base.Hook.Priority <= tracking || i.Has(4) || i.Byte(3) != 0 {
		return goOn, errUnknown
	}
	port := func(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }
	var v []byte
	switch key := i.Number(2); key {
	case state:
		v = native(map[string]uint32{"NEW": 8, "ESTABLISHED": 2, "UNTRACKED": 64}[m.state()])
	case direction:
		v = []byte{0}
	case status:
		v = native(m.status())
	case l3proto:
		v = []byte{unix.NFPROTO_IPV4}
		if m.Dst.Addr().Is6() {
			v[0] = unix.NFPROTO_IPV6
		}
	case src, src4, src6:
		v = m.Src.Addr().AsSlice()
	case dst, dst4, dst6:
		v = m.Dst.Addr().AsSlice()
	case proto:
		v = []byte{byte(m.Protocol)}
	case sport:
		v = port(m.Src.Port())
	case dport:
		v = port(m.Dst.Port())
	default:
		return goOn, fmt.Errorf("key %d: %w", key, errUnknown)
	}
	return goOn, m.put(i.Number(1), v)
}

// status returns the connection's status bits (IPS_*) that rules here ask for.
func (m *machine) status() (s uint32) {
	if m.Established {
		s |= 1<<1 | 1<<3 // an answer was seen, the connection is confirmed
	}
	if m.translated {
		s |= nft.StatusDNAT
	}
	return s
}

func compare(m *machine, i nft.Instruction) (nft.Verdict, error) {
	v := i.Value(3)
	r, err := m.reg(i.Number(1), uint32(len(v)))
	if err != nil {
		return goOn, err
	}
	d := bytes.Compare(r, v)
	ok, known := map[nft.CmpOp]bool{nft.Eq: d == 0, nft.Neq: d != 0, nft.Lt: d < 0, nft.Lte: d <= 0, nft.Gt: d > 0,
		nft.Gte: d >= 0}[nft.CmpOp(i.Number(2))]
	if !known {
		return goOn, errUnknown
	}
	return matches(ok), nil
}

func within(m *machine, i nft.Instruction) (nft.Verdict, error) {
	from, to := i.Value(3), i.Value(4)
	r, err := m.reg(i.Number(1), uint32(len(from)))
	inside := bytes.Compare(from, r) <= 0 && bytes.Compare(r, to) <= 0
	return matches(inside == (i.Number(2) == 0)), err
}

func bitwise(m *machine, i nft.Instruction) (nft.Verdict, error) {
	n := i.Number(3)
	r, err := m.reg(i.Number(1), n)
	mask, xor := i.Value(4), i.Value(5)
	if err != nil || i.Number(6) != 0 || uint32(len(mask)) < n || uint32(len(xor)) < n {
		return goOn, errors.Join(errUnknown, err)
	}
	v := slices.Clone(r)
	for k := range v {
		v[k] = v[k]&mask[k] ^ xor[k]
	}
	return goOn, m.put(i.Number(2), v)
}

// byteorder turns numbers of 2, 4 or 8 bytes round.
func byteorder(m *machine, i nft.Instruction) (nft.Verdict, error) {
	n, size := i.Number(4), int(i.Number(5))
	r, err := m.reg(i.Number(1), n)
	if err != nil || size == 0 {
		return goOn, errors.Join(errUnknown, err)
	}
	v := slices.Clone(r)
	if binary.NativeEndian.Uint16([]byte{1, 0}) == 1 {
		for c := range slices.Chunk(v, size) {
			slices.Reverse(c)
		}
	}
	return goOn, m.put(i.Number(2), v)
}

func lookup(m *machine, i nft.Instruction) (nft.Verdict, error) {
	s, err := m.t.set(reference{m.base.Family, m.base.Table, i.Text(1)})
	if err != nil {
		return goOn, err
	}
	key, err := m.reg(i.Number(2), s.KeyLen)
	if err != nil {
		return goOn, err
	}
	e := s.find(key)
	not := i.Number(5)&1 != 0
	switch {
	case (e != nil) == not:
		return noMatch, nil
	case !i.Has(3) || e == nil:
		return goOn, nil
	case e.Verdict != nil:
		return *e.Verdict, nil
	}
	return goOn, m.put(i.Number(3), []byte(e.Data))
}

// fib loads the kind of an address: RTN_LOCAL, RTN_MULTICAST, or RTN_UNICAST.
func fib(m *machine, i nft.Instruction) (nft.Verdict, error) {
	const addrType, source, destination = 3, 1 << 0, 1 << 1
	a := m.to.Addr()
	switch flags := i.Number(3); {
	case i.Number(2) != addrType || flags != source && flags != destination:
		return goOn, errUnknown
	case flags == source:
		a = m.from.Addr()
	}
	kind := uint32(unix.RTN_UNICAST)
	switch {
	case m.local(a):
		kind = unix.RTN_LOCAL
	case a.IsMulticast():
		kind = unix.RTN_MULTICAST
	}
	return goOn, m.put(i.Number(1), native(kind))
}

// numgen draws a number. One that counts up is, over many packets, as likely any.
func numgen(m *machine, i nft.Instruction) (nft.Verdict, error) {
	n := i.Number(2)
	if n == 0 {
		return goOn, errUnknown
	}
	return goOn, m.put(i.Number(1), native(uint32(m.even(int(n)))+i.Number(4)))
}

// translate does destination NAT; with source NAT the packet is as good as masqueraded.
func translate(m *machine, i nft.Instruction) (nft.Verdict, error) {
	if i.Number(1) == 0 {
		return masquerade(m, i)
	}
	to, err := m.address(i)
	if err != nil {
		return goOn, err
	}
	m.to, m.translated = to, true
	return nft.Accept, nil
}

// address returns where nat sends the packet.
func (m *machine) address(i nft.Instruction) (to netip.AddrPort, err error) {
	addr, port := m.to.Addr(), m.to.Port()
	if i.Has(3) {
		r, err := m.reg(i.Number(3), uint32(addr.BitLen()/8))
		if err != nil {
			return to, err
		}
		addr, _ = netip.AddrFromSlice(r)
	}
	if i.Has(5) {
		r, err := m.reg(i.Number(5), 2)
		if err != nil {
			return to, err
		}
		port = binary.BigEndian.Uint16(r)
	}
	if i.Has(4) && i.Number(4) != i.Number(3) || i.Has(6) && i.Number(6) != i.Number(5) {
		return to, errUnknown // a range
	}
	return netip.AddrPortFrom(addr, port), nil
}

func masquerade(m *machine, _ nft.Instruction) (nft.Verdict, error) {
	m.done.Masqueraded = true
	return nft.Accept, nil
}

func refuse(m *machine, _ nft.Instruction) (nft.Verdict, error) {
	m.done.Verdict = "reject"
	return nft.DropIt, nil
}

// remember writes an element, which never fails unless the set is full.
func remember(*machine, nft.Instruction) (nft.Verdict, error) { return goOn, nil }
