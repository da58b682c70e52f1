package nftables

import (
	"errors"
	"fmt"
	"time"

	"fairlead.dev/fairlead/kernel/netlink"
	"golang.org/x/sys/unix"
)

// Tables returns the names of the inet tables.
func (c *Conn) Tables() (names []string, err error) { return c.tables(family) }

func (c *Conn) tables(family uint8) (names []string, err error) {
	err = netlink.Stable(func() error {
		names = nil
		return c.dump(msgGetTable, unix.NLM_F_DUMP, family, nil,
			func(b []byte) { names = append(names, netlink.Text(netlink.Find(b, 1))) })
	})
	return names, err
}

// FlagsOf returns a table's flags, and whether the table is there.
func (c *Conn) FlagsOf(table string) (flags TableFlags, there bool, err error) {
	err = netlink.Stable(func() error {
		flags, there = 0, false
		return c.dump(msgGetTable, unix.NLM_F_DUMP, family, nil, func(b []byte) {
			if netlink.Text(netlink.Find(b, 1)) == table {
				flags, there = TableFlags(number(netlink.Find(b, 2))), true
			}
		})
	})
	return flags, there, err
}

// SetInfo is what the kernel tells of a set, Schema as Set.Schema gives it.
type SetInfo struct{ Name, Schema string }

// Sets returns the sets of a table.
func (c *Conn) Sets(table string) (sets []SetInfo, err error) {
	err = netlink.Stable(func() error {
		sets = nil
		return c.dump(msgGetSet, unix.NLM_F_DUMP, family, func(b *netlink.Buffer) { b.Text(1, table) }, func(b []byte) {
			key, data, flags := number(netlink.Find(b, 5)), number(netlink.Find(b, 7)), number(netlink.Find(b, 3))
			size := number(netlink.Find(netlink.Find(b, 9), 1))
			timeout := time.Duration(netlink.BE(netlink.Find(b, 11))) * time.Millisecond
			sets = append(sets, SetInfo{netlink.Text(netlink.Find(b, 2)), schema(key, data, flags, size, timeout)})
		})
	})
	return sets, err
}

// Chains returns the names of a table's chains.
func (c *Conn) Chains(table string) (names []string, err error) {
	err = netlink.Stable(func() error {
		names = nil
		return c.dump(msgGetChain, unix.NLM_F_DUMP, family, func(b *netlink.Buffer) { b.Text(1, table) }, func(b []byte) {
			if netlink.Text(netlink.Find(b, 1)) == table {
				names = append(names, netlink.Text(netlink.Find(b, 3)))
			}
		})
	})
	return names, err
}

// RuleInfo is what the kernel tells of a rule.
type RuleInfo struct{ Chain, Comment string }

// Rules returns the rules of a table, those of one chain in their order.
func (c *Conn) Rules(table string) (rules []RuleInfo, err error) {
	err = netlink.Stable(func() error {
		rules = nil
		return c.dump(msgGetRule, unix.NLM_F_DUMP, family, func(b *netlink.Buffer) { b.Text(1, table) }, func(b []byte) {
			if netlink.Text(netlink.Find(b, 1)) == table {
				rules = append(rules, RuleInfo{netlink.Text(netlink.Find(b, 2)), commentOf(netlink.Find(b, 7))})
			}
		})
	})
	return rules, err
}

// Counters returns how many packets have come to the counters of each chain of a table.
func (c *Conn) Counters(table string) (packets map[string]uint64, err error) {
	err = netlink.Stable(func() error {
		packets = map[string]uint64{}
		return c.dump(msgGetRule, unix.NLM_F_DUMP, family, func(b *netlink.Buffer) { b.Text(1, table) }, func(b []byte) {
			if netlink.Text(netlink.Find(b, 1)) != table {
				return
			}
			for _, e := range netlink.Attributes(netlink.Find(b, 4)) {
				if netlink.Text(netlink.Find(e, nftaExprName)) == "counter" {
					packets[netlink.Text(netlink.Find(b, 2))] += netlink.BE(netlink.Find(netlink.Find(e, nftaExprData), 2))
				}
			}
		})
	})
	return packets, err
}

// commentOf reads user data as comment writes it.
func commentOf(b []byte) string {
	if len(b) < 2 || b[0] != 0 {
		return ""
	}
	return netlink.Text(b[2:])
}

// Elements returns the elements of a set without ranges in one field.
func (c *Conn) Elements(table, set string) ([]Element, error) {
	return c.ElementsOf(table, Set{Name: set})
}

// ElementsOf returns the elements of a set. While the kernel resizes a set's hash table a dump can miss elements or
// give some twice (net/netfilter/nft_set_hash.c, nft_rhash_walk): it is repeated until it has as many as the kernel
// counts. Kernels before 6.16 don't tell their count: there it is repeated until two dumps agree.
func (c *Conn) ElementsOf(table string, s Set) (es []Element, err error) {
	set := s.Name
	before := -1
	err = netlink.Stable(func() error {
		es = es[:0]
		type key struct {
			first, last string
			closes      bool
		}
		seen := map[key]bool{}
		err := c.dump(msgGetElem, unix.NLM_F_DUMP, family, func(b *netlink.Buffer) { b.Text(1, table); b.Text(2, set) },
			func(b []byte) {
				for _, v := range netlink.Attributes(netlink.Find(b, 3)) {
					e := element(v)
					if k := (key{e.Key, e.End, e.closes}); !seen[k] {
						seen[k] = true
						es = append(es, e)
					}
				}
			})
		if err != nil {
			return err
		}
		want, err := c.count(table, set)
		have := len(es)
		if want < 0 {
			want, before = before, have
		} else if s.flat() {
			have /= 2 // as the kernel counts them (nft_rbtree_usize)
		}
		if err == nil && want != have {
			return netlink.ErrInterrupted
		}
		return err
	})
	return s.join(es), err
}

// Timed returns the elements of a set of which they go by themselves, with what is left of their timeouts and their
// comments; none where the set isn't there.
func (c *Conn) Timed(table, set string) (es []Element, err error) {
	err = netlink.Stable(func() error {
		es = nil
		return c.dump(msgGetElem, unix.NLM_F_DUMP, family, func(b *netlink.Buffer) { b.Text(1, table); b.Text(2, set) },
			func(b []byte) {
				for _, v := range netlink.Attributes(netlink.Find(b, 3)) {
					e := element(v)
					e.Timeout = time.Duration(netlink.BE(netlink.Find(v, elemExpiration))) * time.Millisecond
					e.Comment = commentOf(netlink.Find(v, elemUserdata))
					es = append(es, e)
				}
			})
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return es, err
}

// Count returns how many elements a set has, about that many while others write it; 0 where it isn't there. Where the
// kernel doesn't tell it dumps the set.
func (c *Conn) Count(table, set string) (n int, err error) {
	if n, err = c.count(table, set); err == nil && n < 0 {
		n = 0
		err = c.dump(msgGetElem, unix.NLM_F_DUMP, family, func(b *netlink.Buffer) { b.Text(1, table); b.Text(2, set) },
			func(b []byte) {
				for range netlink.Attributes(netlink.Find(b, 3)) {
					n++
				}
			})
	}
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	if errors.Is(err, netlink.ErrInterrupted) {
		err = nil
	}
	return n, err
}

// count returns the number of a set's elements as the kernel counts them, -1 where it does not tell.
func (c *Conn) count(table, set string) (n int, err error) {
	n = -1
	err = c.dump(msgGetSet, 0, family, func(b *netlink.Buffer) { b.Text(1, table); b.Text(2, set) }, func(b []byte) {
		if v := netlink.Find(b, 20); v != nil { // NFTA_SET_COUNT
			n = int(number(v))
		}
	})
	return n, err
}

// element reads one element.
func element(b []byte) (e Element) {
	for t, v := range netlink.Attributes(b) {
		switch t {
		case elemKey:
			e.Key = string(netlink.Find(v, nftaDataValue))
		case elemKeyEnd:
			e.End = string(netlink.Find(v, nftaDataValue))
		case elemData:
			e.Data = string(netlink.Find(v, nftaDataValue))
			e.Verdict = verdictIn(v)
		case elemFlags:
			e.closes = number(v)&elemIntervalEnd != 0
		}
	}
	return e
}

// dump sends a request about tables of a family and calls f with the attributes of each message of the reply.
func (c *Conn) dump(kind, flags uint16, family uint8, request func(*netlink.Buffer), f func(attrs []byte)) error {
	head := func(b *netlink.Buffer) {
		*b = append(*b, family, 0, 0, 0)
		if request != nil {
			request(b)
		}
	}
	err := c.s.Request(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags, head, func(m netlink.Message) {
		if m.Type>>8 == unix.NFNL_SUBSYS_NFTABLES && len(m.Body) > header {
			f(m.Body[header:])
		}
	})
	if err != nil {
		return fmt.Errorf("nftables: read: %w", err)
	}
	return nil
}
