package nftables

import (
	"slices"

	"fairlead.dev/fairlead/kernel/netlink"
	"golang.org/x/sys/unix"
)

// FullChain is a chain of any family as the kernel tells it, with its rules in their order.
type FullChain struct {
	Family      uint8 // NFPROTO_*
	Table, Name string
	Hook        *Hook // nil: only other chains lead to it
	Policy      int32 // NF_ACCEPT or NF_DROP, of a chain with a hook
	Rules       []FullRule
}

// FullRule is a rule: what the kernel calls it, and its instructions.
type FullRule struct {
	Handle       uint64
	Instructions []Instruction
}

// Instruction is one instruction of a rule, by the kernel's name for its kind and with its attributes as nf_tables.h
// numbers them for that kind.
type Instruction struct {
	Kind  string
	attrs []byte
}

// Has reports whether an attribute is there.
func (i Instruction) Has(attr uint16) bool { return netlink.Find(i.attrs, attr) != nil }

// Number returns a 32-bit attribute, 0 if it isn't there.
func (i Instruction) Number(attr uint16) uint32 { return number(netlink.Find(i.attrs, attr)) }

// Byte returns an attribute of 8 bits, 0 if it isn't there.
func (i Instruction) Byte(attr uint16) uint8 {
	if v := netlink.Find(i.attrs, attr); len(v) > 0 {
		return v[0]
	}
	return 0
}

// Text returns a string attribute.
func (i Instruction) Text(attr uint16) string { return netlink.Text(netlink.Find(i.attrs, attr)) }

// Value returns the plain value that an attribute of data holds, nil for none.
func (i Instruction) Value(attr uint16) []byte {
	return netlink.Find(netlink.Find(i.attrs, attr), nftaDataValue)
}

// Verdict returns the verdict that an attribute of data holds, nil for none.
func (i Instruction) Verdict(attr uint16) *Verdict {
	return verdictIn(netlink.Find(i.attrs, attr))
}

// FullSet is a set or map of any family.
type FullSet struct {
	Family      uint8
	Table, Name string
	Flags       uint32   // NFT_SET_*
	KeyLen      uint32   // bytes
	Fields      []uint32 // lengths of a concatenated key's fields in bytes, nil if the kernel doesn't tell
	Elements    []FullElement

	count int // of elements as the kernel counts them, -1 if it doesn't, or if they go by themselves
}

// Interval reports whether elements may be ranges.
func (s *FullSet) Interval() bool { return s.Flags&setInterval != 0 }

// Dynamic reports whether packets write elements.
func (s *FullSet) Dynamic() bool { return s.Flags&setDynamic != 0 }

// FullElement is an element. End is the last key of a range of several fields; a range of one field stands as two
// elements, of which Ends says that its key is the first one behind the range.
type FullElement struct {
	Element
	Ends     bool
	CatchAll bool
}

// families are what IPv4 and IPv6 packets can meet.
var families = []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6, unix.NFPROTO_INET}

// FullChains returns every chain of the families ip, ip6 and inet.
func (c *Conn) FullChains() (chains []*FullChain, err error) {
	err = netlink.Stable(func() error {
		chains = nil
		for _, family := range families {
			l, err := c.fullChains(family)
			if err != nil {
				return err
			}
			chains = append(chains, l...)
		}
		return nil
	})
	return chains, err
}

// FullSets returns every set of the families ip, ip6 and inet, without elements: see Fill.
func (c *Conn) FullSets() (sets []*FullSet, err error) {
	err = netlink.Stable(func() error {
		sets = nil
		for _, family := range families {
			err := c.dump(msgGetSet, unix.NLM_F_DUMP, family, nil, func(b []byte) { sets = append(sets, fullSet(family, b)) })
			if err != nil {
				return err
			}
		}
		return nil
	})
	return sets, err
}

// Dropping returns the chains at a hook, such as unix.NF_INET_FORWARD, whose policy is to drop packets, without their
// rules.
func (c *Conn) Dropping(hook uint32) (chains []*FullChain, err error) {
	err = netlink.Stable(func() error {
		chains = nil
		for _, family := range families {
			l, err := c.bareChains(family)
			if err != nil {
				return err
			}
			chains = append(chains, slices.DeleteFunc(l, func(f *FullChain) bool {
				return f.Hook == nil || f.Hook.Number != hook || f.Policy != DropIt.Code
			})...)
		}
		return nil
	})
	return chains, err
}

// bareChains returns the chains of a family without their rules.
func (c *Conn) bareChains(family uint8) (chains []*FullChain, err error) {
	err = c.dump(msgGetChain, unix.NLM_F_DUMP, family, nil, func(b []byte) {
		f := &FullChain{Family: family, Table: netlink.Text(netlink.Find(b, 1)), Name: netlink.Text(netlink.Find(b, 3)),
			Policy: int32(number(netlink.Find(b, 5)))}
		if h := netlink.Find(b, 4); h != nil {
			f.Hook = &Hook{Type: netlink.Text(netlink.Find(b, 7)), Number: number(netlink.Find(h, 1)),
				Priority: int32(number(netlink.Find(h, 2)))}
		}
		chains = append(chains, f)
	})
	return chains, err
}

func (c *Conn) fullChains(family uint8) (chains []*FullChain, err error) {
	if chains, err = c.bareChains(family); err != nil {
		return nil, err
	}
	chainIndex := map[[2]string]*FullChain{}
	for _, f := range chains {
		chainIndex[[2]string{f.Table, f.Name}] = f
	}
	err = c.dump(msgGetRule, unix.NLM_F_DUMP, family, nil, func(b []byte) {
		if f := chainIndex[[2]string{netlink.Text(netlink.Find(b, 1)), netlink.Text(netlink.Find(b, 2))}]; f != nil {
			f.Rules = append(f.Rules, fullRule(b))
		}
	})
	return chains, err
}

func fullRule(b []byte) FullRule {
	r := FullRule{Handle: netlink.BE(netlink.Find(b, 3))}
	for _, v := range netlink.Attributes(netlink.Find(b, 4)) {
		kind, attrs := netlink.Text(netlink.Find(v, nftaExprName)), netlink.Find(v, nftaExprData)
		r.Instructions = append(r.Instructions, Instruction{kind, slices.Clone(attrs)})
	}
	return r
}

func fullSet(family uint8, b []byte) *FullSet {
	s := &FullSet{Family: family, Table: netlink.Text(netlink.Find(b, 1)), Name: netlink.Text(netlink.Find(b, 2)),
		Flags: number(netlink.Find(b, 3)), KeyLen: number(netlink.Find(b, 5)), count: -1}
	for _, v := range netlink.Attributes(netlink.Find(netlink.Find(b, 9), 2)) {
		s.Fields = append(s.Fields, number(netlink.Find(v, 1)))
	}
	if v := netlink.Find(b, 20); v != nil && s.Flags&(setInterval|setTimeout) == 0 { // NFTA_SET_COUNT, since 6.16
		s.count = int(number(v))
	}
	return s
}

// Fill reads a set's elements.
func (c *Conn) Fill(s *FullSet) error {
	named := func(b *netlink.Buffer) { b.Text(1, s.Table); b.Text(2, s.Name) }
	return netlink.Stable(func() error {
		s.Elements = nil
		err := c.dump(msgGetElem, unix.NLM_F_DUMP, s.Family, named, func(b []byte) {
			for _, v := range netlink.Attributes(netlink.Find(b, 3)) {
				flags := number(netlink.Find(v, elemFlags))
				s.Elements = append(s.Elements, FullElement{Element: element(v), Ends: flags&1 != 0, CatchAll: flags&2 != 0})
			}
		})
		if err == nil && s.count >= 0 && s.count != len(s.Elements) {
			return netlink.ErrInterrupted // a hash table was being resized: see Elements
		}
		return err
	})
}
