package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"fairlead.dev/fairlead/kernel/nlattr"
	"golang.org/x/sys/unix"
)

// errInterrupted says that the ruleset changed while it was read.
var errInterrupted = errors.New("nftables: the ruleset changed while it was read")

// Tables gives the names of the inet tables.
func (c *Conn) Tables() (names []string, err error) {
	err = c.stable(func() error {
		names = nil
		return c.dump(msgGetTable, unix.NLM_F_DUMP, func(*buffer) {}, func(b []byte) { names = append(names, nlattr.Text(nlattr.Find(b, 1))) })
	})
	return names, err
}

// SetInfo is what the kernel tells of a set, Schema as Set.Schema gives it.
type SetInfo struct{ Name, Schema string }

// Sets gives the sets of a table.
func (c *Conn) Sets(table string) (sets []SetInfo, err error) {
	err = c.stable(func() error {
		sets = nil
		return c.dump(msgGetSet, unix.NLM_F_DUMP, func(b *buffer) { b.str(1, table) }, func(b []byte) {
			data := number(nlattr.Find(b, 7))
			sets = append(sets, SetInfo{nlattr.Text(nlattr.Find(b, 2)), schema(number(nlattr.Find(b, 5)), data, number(nlattr.Find(b, 3)), number(nlattr.Find(nlattr.Find(b, 9), 1)))})
		})
	})
	return sets, err
}

// Chains gives the names of a table's chains.
func (c *Conn) Chains(table string) (names []string, err error) {
	err = c.stable(func() error {
		names = nil
		return c.dump(msgGetChain, unix.NLM_F_DUMP, func(b *buffer) { b.str(1, table) }, func(b []byte) {
			if nlattr.Text(nlattr.Find(b, 1)) == table {
				names = append(names, nlattr.Text(nlattr.Find(b, 3)))
			}
		})
	})
	return names, err
}

// RuleInfo is what the kernel tells of a rule.
type RuleInfo struct{ Chain, Comment string }

// Rules gives the rules of a table, those of one chain in their order.
func (c *Conn) Rules(table string) (rules []RuleInfo, err error) {
	err = c.stable(func() error {
		rules = nil
		return c.dump(msgGetRule, unix.NLM_F_DUMP, func(b *buffer) { b.str(1, table) }, func(b []byte) {
			if nlattr.Text(nlattr.Find(b, 1)) == table {
				rules = append(rules, RuleInfo{nlattr.Text(nlattr.Find(b, 2)), commentOf(nlattr.Find(b, 7))})
			}
		})
	})
	return rules, err
}

// commentOf reads user data as comment writes it.
func commentOf(b []byte) string {
	if len(b) < 2 || b[0] != 0 {
		return ""
	}
	return nlattr.Text(b[2:])
}

// Elements gives the elements of a set. While the kernel resizes a set's hash table a dump can miss elements or give
// some twice (net/netfilter/nft_set_hash.c, nft_rhash_walk): it is repeated until it has as many as the kernel counts.
// Kernels before 6.16 don't tell their count: there it is repeated until two dumps agree.
func (c *Conn) Elements(table, set string) (es []Element, err error) {
	before := -1
	err = c.stable(func() error {
		es = es[:0]
		seen := map[[2]string]bool{}
		err := c.dump(msgGetElem, unix.NLM_F_DUMP, func(b *buffer) { b.str(1, table); b.str(2, set) }, func(b []byte) {
			nlattr.Each(nlattr.Find(b, 3), func(_ uint16, v []byte) {
				if e := element(v); !seen[[2]string{e.Key, e.End}] {
					seen[[2]string{e.Key, e.End}] = true
					es = append(es, e)
				}
			})
		})
		if err != nil {
			return err
		}
		want, err := c.count(table, set)
		if want < 0 {
			want, before = before, len(es)
		}
		if err == nil && want != len(es) {
			return errInterrupted
		}
		return err
	})
	return es, err
}

// Count returns how many elements a set has, about that many while others write it; 0 where it isn't there. Where the
// kernel doesn't tell it dumps the set.
func (c *Conn) Count(table, set string) (n int, err error) {
	if n, err = c.count(table, set); err == nil && n < 0 {
		n = 0
		err = c.dump(msgGetElem, unix.NLM_F_DUMP, func(b *buffer) { b.str(1, table); b.str(2, set) }, func(b []byte) {
			nlattr.Each(nlattr.Find(b, 3), func(uint16, []byte) { n++ })
		})
	}
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	if errors.Is(err, errInterrupted) {
		err = nil
	}
	return n, err
}

// count gives the number of a set's elements as the kernel counts them, -1 where it does not tell.
func (c *Conn) count(table, set string) (n int, err error) {
	n = -1
	err = c.dump(msgGetSet, 0, func(b *buffer) { b.str(1, table); b.str(2, set) }, func(b []byte) {
		if v := nlattr.Find(b, 20); v != nil { // NFTA_SET_COUNT
			n = int(number(v))
		}
	})
	return n, err
}

// element reads one element.
func element(b []byte) (e Element) {
	nlattr.Each(b, func(t uint16, v []byte) {
		switch t {
		case elemKey:
			e.Key = string(nlattr.Find(v, nftaDataValue))
		case elemKeyEnd:
			e.End = string(nlattr.Find(v, nftaDataValue))
		case elemData:
			e.Data = string(nlattr.Find(v, nftaDataValue))
			if d := nlattr.Find(v, nftaDataVerdict); d != nil {
				e.Verdict = &Verdict{int32(number(nlattr.Find(d, nftaVerdictCode))), nlattr.Text(nlattr.Find(d, nftaVerdictChain))}
			}
		}
	})
	return e
}

// stable repeats a read until no change comes between, a bounded number of times.
func (c *Conn) stable(read func() error) error {
	const tries = 20
	for i := range tries {
		if err := read(); !errors.Is(err, errInterrupted) {
			return err
		}
		time.Sleep(time.Millisecond << min(i, 6))
	}
	return fmt.Errorf("%w, %d times", errInterrupted, tries)
}

// dump sends a request and calls f with the attributes of each answer.
func (c *Conn) dump(kind, flags uint16, request func(*buffer), f func(attrs []byte)) error {
	var b buffer
	at := header(&b, unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags|unix.NLM_F_ACK, 1, family, 0)
	request(&b)
	binary.NativeEndian.PutUint32(b[at:], uint32(len(b)))

	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := unix.Write(c.fd, b); err != nil {
		return fmt.Errorf("nftables: ask: %w", err)
	}
	var failed error
	for done := false; !done; {
		n, _, err := unix.Recvfrom(c.fd, c.reader, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("nftables: receive: %w", err)
		}
		eachMessage(c.reader[:n], func(kind, flags uint16, _ uint32, body []byte) {
			if flags&unix.NLM_F_DUMP_INTR != 0 && failed == nil {
				failed = errInterrupted
			}
			switch {
			case kind == unix.NLMSG_DONE || kind == unix.NLMSG_ERROR:
				done = true
				if e := unix.Errno(-int32(binary.NativeEndian.Uint32(body))); e != 0 && failed == nil {
					failed = fmt.Errorf("nftables: read: %w", e)
				}
			case kind>>8 == unix.NFNL_SUBSYS_NFTABLES && len(body) > 4:
				f(body[4:])
			}
		})
	}
	return failed
}
