// Package ipset reads and writes IP sets of one network namespace: those of type hash:net, whose elements are prefixes,
// and hash:net,iface, whose elements are prefixes by a device.
// Sets of other types, owners and revisions are left alone: their elements are never read.
//
// Written against include/uapi/linux/netfilter/ipset/ip_set.h and net/netfilter/ipset/ip_set_core.c.
package ipset

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// Commands, attributes and flags of ip_set.h.
const (
	cmdCreate, cmdDestroy, cmdList, cmdAdd, cmdDel = 2, 3, 7, 9, 10
	cmdType                                        = 13

	attrProtocol, attrName, attrType, attrRevision = 1, 2, 3, 4
	attrFamily, attrFlags, attrData, attrADT       = 5, 6, 7, 8
	attrLine                                       = 9
	attrIP, attrCIDR, attrTimeout, attrElementFlag = 1, 3, 6, 8
	attrHashSize, attrMaxElements, attrElements    = 18, 19, 24
	attrIPv4, attrIPv6, attrDevice                 = 1, 2, 23

	listNames, listHeaders = 1 << 1, 1 << 2
	flagNoMatch            = 1 << 2
	byteOrder              = unix.NLA_F_NET_BYTEORDER
)

const (
	protocol = 6 // of the messages, which every kernel speaks since Linux 2.6.39
	typeName = "hash:net"
	byDevice = "hash:net,iface"
	revision = 2 // of both types: the first with elements that don't match, and with /0 by a device
	hashSize = 64
	// MaxElements is how many elements a set can hold. Memory follows what it does hold.
	MaxElements = 1 << 20
	buffer      = 4 << 20
	portion     = 256 << 10
)

// Errors of the kernel's own (ip_set.h).
const (
	errMaxSets  unix.Errno = 4099
	errBusy     unix.Errno = 4100
	errExists   unix.Errno = 4103
	errHashFull unix.Errno = 4352
)

// why returns an error with words for the kernel's own numbers.
func why(err error) error {
	for e, text := range map[unix.Errno]string{
		4098:        "the kernel lacks sets of this type (CONFIG_IP_SET_HASH_NET, CONFIG_IP_SET_HASH_NETIFACE)",
		errMaxSets:  "the kernel has no room for another set, of 65,535: remove some that nothing uses",
		errBusy:     "a rule uses it",
		4102:        "a set of another type has that name",
		errExists:   "it exists already, or doesn't",
		errHashFull: fmt.Sprintf("the set is full: it holds %d prefixes", MaxElements),
	} {
		if errors.Is(err, e) {
			return fmt.Errorf("%s (%w)", text, err)
		}
	}
	return err
}

// Set is a set of prefixes of one family.
type Set struct {
	Name     string        // at most 31 bytes
	IPv6     bool          // else of IPv4
	Timeout  time.Duration // of elements, rounded to seconds; 0: none
	Devices  bool          // elements are prefixes by a device
	Elements int           // about how many it will have: a set that grows waits for all processors, each time
}

// typeName returns the name of the set's type.
func (s Set) typeName() string {
	if s.Devices {
		return byDevice
	}
	return typeName
}

// Element is a prefix in a set: /0 by a device alone.
type Element struct {
	Prefix  netip.Prefix
	NoMatch bool   // its addresses match no shorter prefix of the set
	Device  string // of a set of Devices
}

// Conn speaks of the sets of one network namespace.
type Conn struct{ s *netlink.Socket }

// Open opens the sets of the calling thread's network namespace.
func Open() (*Conn, error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER, buffer)
	if err != nil {
		return nil, fmt.Errorf("ipset: %w", err)
	}
	return &Conn{s}, nil
}

// Close closes the handle. Sets stay.
func (c *Conn) Close() error { return c.s.Close() }

// kind returns the type of a command's message.
func kind(command uint16) uint16 { return unix.NFNL_SUBSYS_IPSET<<8 | command }

// head writes what every message begins with.
func head(b *netlink.Buffer) {
	*b = append(*b, unix.AF_INET, unix.NFNETLINK_V0, 0, 0)
	b.Uint8(attrProtocol, protocol)
}

// list calls f with the attributes of sets: those named, or all if name is "".
func (c *Conn) list(name string, flags uint32, f func(attributes []byte)) error {
	body := func(b *netlink.Buffer) {
		head(b)
		if name != "" {
			b.Text(attrName, name)
		}
		if flags != 0 {
			b.BE32(attrFlags|byteOrder, flags)
		}
	}
	return c.s.Request(kind(cmdList), unix.NLM_F_DUMP, body, func(m netlink.Message) {
		if len(m.Body) > 4 {
			f(m.Body[4:])
		}
	})
}

// Names returns the names of the sets that begin with a prefix.
func (c *Conn) Names(prefix string) (names []string, err error) {
	err = c.list("", listNames, func(set []byte) {
		if name := netlink.Text(netlink.Find(set, attrName)); strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("ipset: list sets: %w", why(err))
	}
	return names, nil
}

// HasDevices returns an error where the kernel has no sets of prefixes by a device.
func (c *Conn) HasDevices() error {
	err := c.s.Request(kind(cmdType), 0, func(b *netlink.Buffer) {
		head(b)
		b.Text(attrType, byDevice)
		b.Uint8(attrFamily, unix.NFPROTO_IPV4)
	}, func(netlink.Message) {})
	if err != nil {
		return fmt.Errorf("ipset: look up type %s: %w", byDevice, why(err))
	}
	return nil
}

// Counts returns how many elements the sets have whose names begin with a prefix, without those of sets with a timeout.
func (c *Conn) Counts(prefix string) (counts map[string]int, err error) {
	counts = map[string]int{}
	err = c.list("", listHeaders, func(set []byte) {
		name, data := netlink.Text(netlink.Find(set, attrName)), netlink.Find(set, attrData)
		if strings.HasPrefix(name, prefix) && netlink.Find(data, attrTimeout) == nil {
			counts[name] = int(netlink.BE(netlink.Find(data, attrElements)))
		}
	})
	if err != nil {
		return nil, fmt.Errorf("ipset: count elements: %w", why(err))
	}
	return counts, nil
}

// Read returns a set and its elements. ours is false where the set is of another type or revision.
func (c *Conn) Read(name string) (set Set, elements []Element, ours bool, err error) {
	set.Name = name
	err = c.list(name, 0, func(b []byte) {
		if t := netlink.Find(b, attrType); t != nil {
			set.Devices = netlink.Text(t) == byDevice
			ours = netlink.Text(t) == set.typeName() && netlink.Uint(netlink.Find(b, attrRevision)) == revision
			set.IPv6 = netlink.Uint(netlink.Find(b, attrFamily)) == unix.NFPROTO_IPV6
			set.Timeout = time.Duration(netlink.BE(netlink.Find(netlink.Find(b, attrData), attrTimeout))) * time.Second
		}
		for t, v := range netlink.Attributes(netlink.Find(b, attrADT)) {
			if e, ok := parse(v); ok && t == attrData {
				elements = append(elements, e)
			}
		}
	})
	if err != nil {
		return set, nil, false, fmt.Errorf("ipset: read set %s: %w", name, why(err))
	}
	return set, elements, ours, nil
}

// parse returns the element that attributes are of.
func parse(b []byte) (e Element, ok bool) {
	bits, flags, device := -1, uint32(0), ""
	var a netip.Addr
	for t, v := range netlink.Attributes(b) {
		switch t {
		case attrIP:
			for _, ip := range netlink.Attributes(v) {
				a, ok = netip.AddrFromSlice(ip)
			}
		case attrCIDR:
			bits = int(netlink.Uint(v))
		case attrElementFlag:
			flags = uint32(netlink.BE(v))
		case attrDevice:
			device = netlink.Text(v)
		}
	}
	if !ok {
		return e, false
	}
	if bits < 0 {
		bits = a.BitLen()
	}
	e = Element{netip.PrefixFrom(a, bits), flags&flagNoMatch != 0, device}
	return e, e.Prefix.IsValid()
}

// Batch is changes of sets, which the kernel makes one by one. Changes of one set's elements that follow one another
// are few requests: for each, the kernel compares the names of all sets.
type Batch struct {
	b      netlink.Batch
	groups map[int]*group // by request
	last   *group         // that isn't a request yet
	n      int
}

// group is changes of elements of one set.
type group struct {
	command  uint16
	set      string
	elements []Element
}

// mostElements is how many elements a request has at most.
const mostElements = 256

// Len returns the number of changes.
func (b *Batch) Len() int { return b.n }

// Create adds the creation of a set; one that exists alike is left as it is.
func (b *Batch) Create(s Set) {
	family := uint8(unix.NFPROTO_IPV4)
	if s.IPv6 {
		family = unix.NFPROTO_IPV6
	}
	b.flush()
	b.n++
	b.b.Add(kind(cmdCreate), unix.NLM_F_CREATE, func() string { return "create set " + s.Name }, func(m *netlink.Buffer) {
		head(m)
		m.Text(attrName, s.Name)
		m.Text(attrType, s.typeName())
		m.Uint8(attrRevision, revision)
		m.Uint8(attrFamily, family)
		m.Nest(attrData, func() {
			m.BE32(attrHashSize|byteOrder, uint32(max(hashSize, s.Elements)))
			m.BE32(attrMaxElements|byteOrder, MaxElements)
			if s.Timeout > 0 {
				m.BE32(attrTimeout|byteOrder, uint32(s.Timeout/time.Second))
			}
		})
	})
}

// Destroy adds the removal of a set. That there is none is no error.
func (b *Batch) Destroy(name string) {
	b.flush()
	b.n++
	b.b.Add(kind(cmdDestroy), 0, func() string { return "destroy set " + name }, func(m *netlink.Buffer) {
		head(m)
		m.Text(attrName, name)
	}, unix.ENOENT)
}

// Put adds an element to a set, or changes whether it matches.
func (b *Batch) Put(set string, e Element) { b.element(cmdAdd, set, e) }

// Delete adds the removal of an element. That there is none, or no set, is no error.
func (b *Batch) Delete(set string, e Element) { b.element(cmdDel, set, e) }

func (b *Batch) element(command uint16, set string, e Element) {
	if g := b.last; g == nil || g.command != command || g.set != set || len(g.elements) == mostElements {
		b.flush()
		b.last = &group{command: command, set: set}
	}
	b.last.elements = append(b.last.elements, e)
	b.n++
}

// flush makes a request of the last group.
func (b *Batch) flush() {
	g := b.last
	if g == nil {
		return
	}
	b.last = nil
	var fine []unix.Errno
	if g.command == cmdDel {
		fine = []unix.Errno{unix.ENOENT, errExists}
	}
	if b.groups == nil {
		b.groups = map[int]*group{}
	}
	b.groups[b.b.Len()] = g
	b.b.Add(kind(g.command), 0, g.String, func(m *netlink.Buffer) {
		head(m)
		m.Text(attrName, g.set)
		m.Uint32(attrLine, 0) // beside attrADT; without lines of elements nothing comes of it
		m.Nest(attrADT, func() {
			for _, e := range g.elements {
				m.Nest(attrData, func() { e.write(m) })
			}
		})
	}, fine...)
}

// String returns what the group does.
func (g *group) String() string {
	verb := "add to"
	if g.command == cmdDel {
		verb = "delete from"
	}
	return fmt.Sprintf("%s set %s: %s", verb, g.set, g.elements[0].Prefix)
}

func (e Element) write(m *netlink.Buffer) {
	m.Nest(attrIP, func() {
		if a := e.Prefix.Addr(); a.Is4() {
			m.Bytes(attrIPv4|byteOrder, a.AsSlice())
		} else {
			m.Bytes(attrIPv6|byteOrder, a.AsSlice())
		}
	})
	m.Uint8(attrCIDR, uint8(e.Prefix.Bits()))
	if e.Device != "" {
		m.Text(attrDevice, e.Device)
	}
	if e.NoMatch {
		m.Bytes(attrElementFlag|byteOrder, binary.BigEndian.AppendUint32(nil, flagNoMatch))
	}
}

// Apply makes the changes in their order, and tries all. The error has everything that the kernel refuses. It makes
// what follows a refused element in a request at the end, one by one.
func (c *Conn) Apply(b *Batch) error {
	b.flush()
	b.b.Portion = portion
	var single Batch
	var errs []error
	err := c.s.Run(&b.b, func(i int, err error) {
		g := b.groups[i]
		if g == nil || len(g.elements) == 1 {
			errs = append(errs, fmt.Errorf("ipset: %s: %w", b.b.Said(i), why(err)))
			return
		}
		for _, e := range g.elements {
			single.element(g.command, g.set, e)
			single.flush()
		}
	})
	if single.n > 0 {
		err = errors.Join(err, c.Apply(&single))
	}
	return errors.Join(append(errs, err)...)
}

// patience is how long Destroy waits until the kernel has forgotten the rules that used a set: nf_tables does that some
// time after they are gone.
const patience = 5 * time.Second

// Destroy destroys sets that no rule uses any more.
func (c *Conn) Destroy(names ...string) error {
	for until := time.Now().Add(patience); ; {
		var b Batch
		for _, n := range names {
			b.Destroy(n)
		}
		var errs []error
		var busy []string
		err := c.s.Run(&b.b, func(i int, err error) {
			if errors.Is(err, errBusy) {
				busy = append(busy, names[i])
			}
			errs = append(errs, fmt.Errorf("ipset: %s: %w", b.b.Said(i), why(err)))
		})
		if err := errors.Join(append(errs, err)...); len(busy) == 0 || time.Now().After(until) {
			return err
		}
		names = busy
		time.Sleep(time.Millisecond)
	}
}

// Destroy removes the IP sets of the calling thread's network namespace whose names begin with a prefix, of any type.
// Rules must not use them any more. Where the kernel has no sets there is nothing to remove.
func Destroy(prefix string) error {
	c, err := Open()
	if err != nil {
		return err
	}
	defer c.Close()
	names, err := c.Names(prefix)
	if err != nil || len(names) == 0 {
		return nil // this kernel has no sets
	}
	return c.Destroy(names...)
}
