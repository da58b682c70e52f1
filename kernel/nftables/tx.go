package nftables

import (
	"fmt"
	"time"

	"fairlead.dev/fairlead/kernel/netlink"
	"golang.org/x/sys/unix"
)

// Attribute and message numbers of include/uapi/linux/netfilter/nf_tables.h; those that golang.org/x/sys has not.
const (
	nftaListElem     = 1
	nftaExprName     = 1
	nftaExprData     = 2
	nftaDataValue    = 1
	nftaDataVerdict  = 2
	nftaVerdictCode  = 1
	nftaVerdictChain = 2

	msgNewTable, msgGetTable, msgDelTable       = 0, 1, 2
	msgNewChain, msgGetChain, msgDelChain       = 3, 4, 5
	msgNewRule, msgGetRule, msgDelRule          = 6, 7, 8
	msgNewSet, msgGetSet, msgDelSet             = 9, 10, 11
	msgNewElem, msgGetElem, msgDelElem          = 12, 13, 14
	msgGetGen                                   = 16
	elemKey, elemData, elemFlags, elemKeyEnd    = 1, 2, 3, 10
	elemTimeout, elemExpiration, elemUserdata   = 4, 5, 6
	elemIntervalEnd                             = 0x1
	setInterval, setMap, setTimeout, setDynamic = 0x4, 0x8, 0x10, 0x20
	setConcat                                   = 0x80
	verdictType                                 = 0xffffff00
)

// family of every table here: inet, both IPv4 and IPv6.
const family = unix.NFPROTO_INET

// messageLimit keeps a message of elements below the 65,535 bytes that an attribute's length can say.
const messageLimit = 60_000

// Type is a type of a field, as the nft command knows it, and its length in bytes.
type Type struct{ ID, Len uint32 }

// Types of fields (nftables' enum datatypes). Mark stands for any 32-bit number, Integer
// for one of 64 bits.
var (
	IPv4     = Type{7, 4}
	IPv6     = Type{8, 16}
	Proto    = Type{12, 1}
	Port     = Type{13, 2}
	Mark     = Type{19, 4}
	Device   = Type{41, 16} // a network device's name
	Integer  = Type{4, 8}
	NFProto  = Type{2, 1} // NFPROTO_*
	Verdicts = Type{1, 0}
)

// IntegerOf returns the type of a number of so many bytes in network byte order. A set of ranges of it has one field,
// whatever it is composed of.
func IntegerOf(bytes uint32) Type { return Type{Integer.ID, bytes} }

// typed returns the concatenated type's number and its length in registers.
func typed(fields []Type) (id, length uint32) {
	for _, f := range fields {
		id = id<<6 | f.ID
		length += (f.Len + 3) &^ 3
	}
	return id, length
}

// Set is a set, or a map if it has Data.
type Set struct {
	Name     string
	Key      []Type
	Data     []Type        // one Verdicts for a map to verdicts
	Interval bool          // elements may be ranges in any field
	Dynamic  bool          // packets add elements, which time out
	Size     uint32        // elements at most; 0: no limit
	Timeout  time.Duration // of elements that come without one, in whole milliseconds; 0: they stay
}

// ToVerdicts reports whether the set is a map to verdicts.
func (s Set) ToVerdicts() bool { return len(s.Data) == 1 && s.Data[0] == Verdicts }

// flags returns the set's flags for the kernel.
func (s Set) flags() (f uint32) {
	if s.Interval {
		f |= setInterval
	}
	if s.Data != nil {
		f |= setMap
	}
	if s.Dynamic {
		f |= setDynamic | setTimeout
	}
	if s.Timeout > 0 {
		f |= setTimeout
	}
	if len(s.Key) > 1 {
		f |= setConcat
	}
	return f
}

// Schema describes what can be read back of a set: key, data, flags, size and timeout.
func (s Set) Schema() string {
	_, k := typed(s.Key)
	_, d := typed(s.Data)
	if s.ToVerdicts() {
		d = 16 // sizeof(struct nft_verdict)
	}
	return schema(k, d, s.flags(), s.Size, s.Timeout)
}

func schema(key, data, flags, size uint32, timeout time.Duration) string {
	text := fmt.Sprintf("key %d data %d flags %#x size %d", key, data, flags, size)
	if timeout > 0 {
		text += fmt.Sprintf(" timeout %s", timeout)
	}
	return text
}

// Hook is where a base chain sees packets.
type Hook struct {
	Type     string // nat or filter
	Number   uint32 // NF_INET_PRE_ROUTING and so on
	Priority int32
}

// Chain is a chain; without a Hook only other chains lead to it.
type Chain struct {
	Name string
	Hook *Hook
}

// Rule is a list of instructions with a comment.
type Rule struct {
	Comment string // at most 127 bytes
	Exprs   []Expr
}

// Element is one element of a set. End is the last key of a range and empty for a single key. Of Data and Verdict a map
// has one.
type Element struct {
	Key, End, Data string
	Verdict        *Verdict
	Timeout        time.Duration // until it goes, in whole milliseconds; 0: as its set says
	Comment        string        // at most 253 bytes
	flat           bool          // of a set of ranges in one field
	closes         bool          // as the kernel holds such ranges: Key is the first key behind one
}

// Element makes an element of a set out of text: the key, first and last in one where it is a range, and the value,
// which is a verdict's text or the data's bytes. To delete an element its key is enough.
func (s Set) Element(key, value string) Element {
	e := Element{Key: key}
	if s.Interval {
		e.Key, e.End, e.flat = key[:len(key)/2], key[len(key)/2:], s.flat()
	}
	if !s.ToVerdicts() {
		e.Data = value
		return e
	}
	v, _ := ParseVerdict(value)
	e.Verdict = &v
	return e
}

// Text returns the key and the value of which Set.Element makes the element again.
func (e Element) Text() (key, value string) {
	if e.Verdict != nil {
		return e.Key + e.End, e.Verdict.String()
	}
	return e.Key + e.End, e.Data
}

// Tx is a list of changes that take effect all at once, or not at all.
type Tx struct {
	batch netlink.Batch
	setID uint32
}

// Empty reports whether nothing is to be done.
func (t *Tx) Empty() bool { return t.batch.Len() == 0 }

// header is the length of struct nfgenmsg: the family, a version and the resource.
const header = 4

// message writes one message about a table of ours; said and what say what it does.
func (t *Tx) message(kind, flags uint16, said, what string, body func(b *netlink.Buffer)) {
	t.add(kind, flags, family, func() string { return said + what }, body)
}

func (t *Tx) add(kind, flags uint16, family uint8, said func() string, body func(b *netlink.Buffer)) {
	t.batch.Add(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags, said, func(b *netlink.Buffer) {
		*b = append(*b, family, 0, 0, 0)
		body(b)
	})
}

// TableFlags are flags of a table (NFT_TABLE_F_*).
type TableFlags uint32

// The flags.
const (
	Owned      TableFlags = 1 << 1 // only the Conn that makes it may change it, and it goes with that
	Persistent TableFlags = 1 << 2 // with Owned: it stays, until another makes it its own (Linux 6.9)
)

// AddTable makes a table; one that is there stays.
func (t *Tx) AddTable(name string) { t.AddTableAs(name, 0, "") }

// AddTableAs makes a table with flags and a comment; one that is there stays, and must have the same flags.
func (t *Tx) AddTableAs(name string, flags TableFlags, text string) {
	t.message(msgNewTable, unix.NLM_F_CREATE, "add table ", name, func(b *netlink.Buffer) {
		b.Text(1, name)
		if flags != 0 {
			b.BE32(2, uint32(flags))
		}
		if text != "" {
			b.Bytes(6, comment(text))
		}
	})
}

// DelTable removes a table and everything in it.
func (t *Tx) DelTable(name string) {
	t.message(msgDelTable, 0, "delete table ", name, func(b *netlink.Buffer) { b.Text(1, name) })
}

// AddSet makes a set.
func (t *Tx) AddSet(table string, s Set) {
	t.setID++
	t.message(msgNewSet, unix.NLM_F_CREATE|unix.NLM_F_EXCL, "add set ", s.Name, func(b *netlink.Buffer) {
		id, length := typed(s.Key)
		b.Text(1, table)
		b.Text(2, s.Name)
		b.BE32(3, s.flags())
		b.BE32(4, id)
		b.BE32(5, length)
		if s.ToVerdicts() {
			b.BE32(6, verdictType)
			b.BE32(7, 0)
		} else if s.Data != nil {
			id, length := typed(s.Data)
			b.BE32(6, id)
			b.BE32(7, length)
		}
		b.Nest(9, func() { s.describe(b) })
		if s.Timeout > 0 {
			b.BE64(11, uint64(s.Timeout.Milliseconds()))
		}
		b.BE32(10, t.setID)
	})
}

// describe writes the set's size and the lengths of its key's fields.
func (s Set) describe(b *netlink.Buffer) {
	if s.Size > 0 {
		b.BE32(1, s.Size)
	}
	if len(s.Key) < 2 {
		return
	}
	b.Nest(2, func() {
		for _, f := range s.Key {
			b.Nest(nftaListElem, func() { b.BE32(1, f.Len) })
		}
	})
}

// DelSet removes a set.
func (t *Tx) DelSet(table, set string) {
	t.message(msgDelSet, 0, "delete set ", set, func(b *netlink.Buffer) { b.Text(1, table); b.Text(2, set) })
}

// AddChain makes a chain; one that is there stays as it is.
func (t *Tx) AddChain(table string, c Chain) {
	t.message(msgNewChain, unix.NLM_F_CREATE, "add chain ", c.Name, func(b *netlink.Buffer) {
		b.Text(1, table)
		b.Text(3, c.Name)
		if c.Hook == nil {
			return
		}
		b.Nest(4, func() { b.BE32(1, c.Hook.Number); b.BE32(2, uint32(c.Hook.Priority)) })
		b.Text(7, c.Hook.Type)
	})
}

// DelChain removes a chain.
func (t *Tx) DelChain(table, chain string) {
	t.message(msgDelChain, 0, "delete chain ", chain, func(b *netlink.Buffer) { b.Text(1, table); b.Text(3, chain) })
}

// Flush removes every rule of a chain.
func (t *Tx) Flush(table, chain string) {
	t.message(msgDelRule, 0, "flush chain ", chain, func(b *netlink.Buffer) { b.Text(1, table); b.Text(2, chain) })
}

// AddRule appends a rule to a chain.
func (t *Tx) AddRule(table, chain string, r Rule) {
	t.message(msgNewRule, unix.NLM_F_CREATE|unix.NLM_F_APPEND, "add rule to ", chain, func(b *netlink.Buffer) {
		b.Text(1, table)
		b.Text(2, chain)
		b.Nest(4, func() {
			for _, e := range r.Exprs {
				*b = append(*b, e...)
			}
		})
		b.Bytes(7, comment(r.Comment))
	})
}

// comment encodes user data that the nft command shows as a comment: type 0, length, text, end mark.
func comment(s string) []byte {
	return append(append([]byte{0, byte(len(s) + 1)}, s...), 0)
}

// AddElements adds elements. One that is there already with the same data is no error.
func (t *Tx) AddElements(table, set string, es []Element) {
	t.elements(msgNewElem, unix.NLM_F_CREATE, "add to set ", table, set, es)
}

// DelElements removes elements, each of which must be there.
func (t *Tx) DelElements(table, set string, es []Element) {
	t.elements(msgDelElem, 0, "delete from set ", table, set, es)
}

// FlushSet removes every element of a set.
func (t *Tx) FlushSet(table, set string) {
	t.message(msgDelElem, 0, "flush set ", set, func(b *netlink.Buffer) { b.Text(1, table); b.Text(2, set) })
}

// elements writes elements in as many messages as their lengths need.
func (t *Tx) elements(kind, flags uint16, said, table, set string, es []Element) {
	for len(es) > 0 {
		t.message(kind, flags, said, set, func(b *netlink.Buffer) {
			b.Text(1, table)
			b.Text(2, set)
			b.Nest(3, func() {
				for start := len(*b); len(es) > 0 && len(*b)-start < messageLimit; es = es[1:] {
					es[0].encode(b, kind == msgNewElem)
				}
			})
		})
	}
}

// encode writes one element; what it maps to only if it is being added.
func (e Element) encode(b *netlink.Buffer, add bool) {
	at := b.Open(nftaListElem | nested)
	value(b, elemKey, e.Key)
	if e.flat {
		defer e.encodeEnd(b)
	} else if e.End != "" {
		value(b, elemKeyEnd, e.End)
	}
	if add && e.Data != "" {
		value(b, elemData, e.Data)
	}
	if add && e.Verdict != nil {
		verdict(b, elemData, *e.Verdict)
	}
	if add && e.Timeout > 0 {
		b.BE64(elemTimeout, uint64(e.Timeout.Milliseconds()))
	}
	if add && e.Comment != "" {
		b.Bytes(elemUserdata, comment(e.Comment))
	}
	b.Close(at)
}
