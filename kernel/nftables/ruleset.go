package nftables

import (
	"encoding/binary"
	"slices"

	"fairlead.dev/fairlead/kernel/nlattr"
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

// Has says whether an attribute is there.
func (i Instruction) Has(attr uint16) bool { return nlattr.Find(i.attrs, attr) != nil }

// Number gives a 32-bit attribute, 0 if it isn't there.
func (i Instruction) Number(attr uint16) uint32 { return number(nlattr.Find(i.attrs, attr)) }

// Byte gives an attribute of 8 bits, 0 if it isn't there.
func (i Instruction) Byte(attr uint16) uint8 {
	if v := nlattr.Find(i.attrs, attr); len(v) > 0 {
		return v[0]
	}
	return 0
}

// Text gives a string attribute.
func (i Instruction) Text(attr uint16) string { return nlattr.Text(nlattr.Find(i.attrs, attr)) }

// Value gives the plain value that an attribute of data holds, nil for none.
func (i Instruction) Value(attr uint16) []byte {
	return nlattr.Find(nlattr.Find(i.attrs, attr), nftaDataValue)
}

// Verdict gives the verdict that an attribute of data holds, nil for none.
func (i Instruction) Verdict(attr uint16) *Verdict {
	d := nlattr.Find(nlattr.Find(i.attrs, attr), nftaDataVerdict)
	if d == nil {
		return nil
	}
	return &Verdict{int32(number(nlattr.Find(d, nftaVerdictCode))), nlattr.Text(nlattr.Find(d, nftaVerdictChain))}
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

// Interval says whether elements may be ranges.
func (s *FullSet) Interval() bool { return s.Flags&setInterval != 0 }

// Dynamic says whether packets write elements.
func (s *FullSet) Dynamic() bool { return s.Flags&setDynamic != 0 }

// FullElement is an element. End is the last key of a range of several fields; a range of one field stands as two elements,
// of which Ends says that its key is the first one behind the range.
type FullElement struct {
	Element
	Ends     bool
	CatchAll bool
}

// families are what IPv4 and IPv6 packets can meet.
var families = []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6, unix.NFPROTO_INET}

// FullChains gives every chain of the families ip, ip6 and inet.
func (c *Conn) FullChains() (chains []*FullChain, err error) {
	err = c.stable(func() error {
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

// FullSets gives every set of the families ip, ip6 and inet, without elements: see Fill.
func (c *Conn) FullSets() (sets []*FullSet, err error) {
	err = c.stable(func() error {
		sets = nil
		for _, family := range families {
			err := c.dump(msgGetSet, unix.NLM_F_DUMP, of(family, func(*buffer) {}), func(b []byte) { sets = append(sets, fullSet(family, b)) })
			if err != nil {
				return err
			}
		}
		return nil
	})
	return sets, err
}

// of is a request about tables of another family than this package writes: the nfgenmsg behind the header says which.
func of(family uint8, request func(*buffer)) func(*buffer) {
	return func(b *buffer) {
		(*b)[unix.NLMSG_HDRLEN] = family
		request(b)
	}
}

// Dropping returns the chains at a hook, such as unix.NF_INET_FORWARD, whose policy is to drop packets, without their
// rules.
func (c *Conn) Dropping(hook uint32) (chains []*FullChain, err error) {
	err = c.stable(func() error {
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
	err = c.dump(msgGetChain, unix.NLM_F_DUMP, of(family, func(*buffer) {}), func(b []byte) {
		f := &FullChain{Family: family, Table: nlattr.Text(nlattr.Find(b, 1)), Name: nlattr.Text(nlattr.Find(b, 3)), Policy: int32(number(nlattr.Find(b, 5)))}
		if h := nlattr.Find(b, 4); h != nil {
			f.Hook = &Hook{Type: nlattr.Text(nlattr.Find(b, 7)), Number: number(nlattr.Find(h, 1)), Priority: int32(number(nlattr.Find(h, 2)))}
		}
		chains = append(chains, f)
	})
	return chains, err
}

func (c *Conn) fullChains(family uint8) (chains []*FullChain, err error) {
	if chains, err = c.bareChains(family); err != nil {
		return nil, err
	}
	place := map[[2]string]*FullChain{}
	for _, f := range chains {
		place[[2]string{f.Table, f.Name}] = f
	}
	err = c.dump(msgGetRule, unix.NLM_F_DUMP, of(family, func(*buffer) {}), func(b []byte) {
		if f := place[[2]string{nlattr.Text(nlattr.Find(b, 1)), nlattr.Text(nlattr.Find(b, 2))}]; f != nil {
			f.Rules = append(f.Rules, fullRule(b))
		}
	})
	return chains, err
}

func fullRule(b []byte) FullRule {
	r := FullRule{Handle: long(nlattr.Find(b, 3))}
	nlattr.Each(nlattr.Find(b, 4), func(_ uint16, v []byte) {
		r.Instructions = append(r.Instructions, Instruction{nlattr.Text(nlattr.Find(v, nftaExprName)), slices.Clone(nlattr.Find(v, nftaExprData))})
	})
	return r
}

func long(b []byte) uint64 {
	if len(b) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

func fullSet(family uint8, b []byte) *FullSet {
	s := &FullSet{Family: family, Table: nlattr.Text(nlattr.Find(b, 1)), Name: nlattr.Text(nlattr.Find(b, 2)), Flags: number(nlattr.Find(b, 3)), KeyLen: number(nlattr.Find(b, 5)), count: -1}
	nlattr.Each(nlattr.Find(nlattr.Find(b, 9), 2), func(_ uint16, v []byte) { s.Fields = append(s.Fields, number(nlattr.Find(v, 1))) })
	if v := nlattr.Find(b, 20); v != nil && s.Flags&(setInterval|setTimeout) == 0 { // NFTA_SET_COUNT, since 6.16
		s.count = int(number(v))
	}
	return s
}

// Fill reads a set's elements.
func (c *Conn) Fill(s *FullSet) error {
	named := func(b *buffer) { b.str(1, s.Table); b.str(2, s.Name) }
	return c.stable(func() error {
		s.Elements = nil
		err := c.dump(msgGetElem, unix.NLM_F_DUMP, of(s.Family, named), func(b []byte) {
			nlattr.Each(nlattr.Find(b, 3), func(_ uint16, v []byte) {
				flags := number(nlattr.Find(v, elemFlags))
				s.Elements = append(s.Elements, FullElement{Element: element(v), Ends: flags&1 != 0, CatchAll: flags&2 != 0})
			})
		})
		if err == nil && s.count >= 0 && s.count != len(s.Elements) {
			return errInterrupted // a hash table was being resized: see Elements
		}
		return err
	})
}
