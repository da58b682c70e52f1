package names

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"
)

func addr(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}) }

// The addresses of a name, the names of a domain and all names are bounded: the first to expire go, and are counted.
func TestCacheIsBounded(t *testing.T) {
	now := time.Now()
	c := newCache()
	for i := range maxAddresses + 5 {
		if changed := c.learn("d", "n", []netip.Addr{addr(i)}, now.Add(time.Duration(i)*time.Second)); len(changed) != 1 {
			t.Fatalf("address %d: %v", i, changed)
		}
	}
	if l := c.addresses("n"); len(l) != maxAddresses || slices.Contains(l, addr(4)) || c.evicted != 5 {
		t.Errorf("%d addresses, %d evicted", len(l), c.evicted)
	}
	c = newCache()
	for i := range maxPerDomain + 1 {
		c.learn("*.d", fmt.Sprintf("n%d.d", i), []netip.Addr{addr(1)}, now.Add(time.Duration(i)*time.Second))
	}
	if c.names["n0.d"] != nil || len(c.names) != maxPerDomain || c.evicted != 1 {
		t.Errorf("%d names, %d evicted", len(c.names), c.evicted)
	}
	for i := 0; len(c.names) < maxNames; i++ {
		c.learn(fmt.Sprintf("e%d", i), fmt.Sprintf("e%d", i), []netip.Addr{addr(1)}, now)
	}
	if changed := c.learn("f", "f", []netip.Addr{addr(1)}, now); !slices.Equal(changed, []string{"n1.d", "f"}) {
		t.Errorf("%v: want the first name to expire of the largest domain to go", changed)
	}
	if len(c.names) != maxNames {
		t.Errorf("%d names", len(c.names))
	}
}

// An address expires by its own time, unless a connection uses it; a name without one is gone.
func TestAddressesExpire(t *testing.T) {
	now := time.Now()
	c := newCache()
	c.learn("n", "n", []netip.Addr{addr(1)}, now.Add(time.Second))
	c.learn("n", "n", []netip.Addr{addr(2)}, now.Add(time.Hour))
	if changed := c.learn("n", "n", []netip.Addr{addr(1)}, now); changed != nil {
		t.Errorf("%v: a shorter time changes nothing", changed)
	}
	if c.due(now) || !c.due(now.Add(time.Second)) {
		t.Error("it expires at another time")
	}
	inUse := func(used bool) func(netip.Addr) bool { return func(netip.Addr) bool { return used } }
	if changed, gone := c.expire(now.Add(time.Minute), inUse(true), time.Minute); changed != nil || gone > 0 {
		t.Errorf("in use: %v, %d", changed, gone)
	}
	changed, gone := c.expire(now.Add(2*time.Minute), inUse(false), time.Minute)
	if !slices.Equal(changed, []string{"n"}) || gone != 1 || !slices.Equal(c.addresses("n"), []netip.Addr{addr(2)}) {
		t.Errorf("%v, %d: %v", changed, gone, c.addresses("n"))
	}
	if changed, _ = c.expire(now.Add(2*time.Hour), inUse(false), time.Minute); len(c.names)+len(c.domains) > 0 {
		t.Errorf("%v: %v", changed, c.names)
	}
}

// An answer counts for one query of the same port, ID and question, and not for ever; a pod has a bounded number of
// them, and teaches at a bounded rate.
func TestQueries(t *testing.T) {
	now := time.Now()
	q := queries{}
	sent := query{40000, 7, question{"n", 1}, now}
	q.add(addr(1), sent)
	q.add(addr(1), sent)
	for _, other := range []query{{40001, 7, question{"n", 1}, now}, {40000, 8, question{"n", 1}, now},
		{40000, 7, question{"m", 1}, now}, {40000, 7, question{"n", 28}, now}, {40000, 7, question{"n", 1},
			now.Add(patience + 1)}} {
		if q.awaited(addr(1), other) {
			t.Errorf("%+v counts", other)
		}
	}
	if q.awaited(addr(2), sent) || !q.awaited(addr(1), sent) || q.awaited(addr(1), sent) || len(q) > 0 {
		t.Error("it counts for another pod, or not once")
	}
	for i := range maxQueries + 10 {
		q.add(addr(1), query{uint16(i), 7, question{"n", 1}, now})
	}
	if len(q[addr(1)]) != maxQueries || q.awaited(addr(1), query{9, 7, question{"n", 1}, now}) {
		t.Errorf("%d queries", len(q[addr(1)]))
	}
	r, n := &rate{left: rateBurst}, 0
	for range 2 * rateBurst {
		if r.allows(now) {
			n++
		}
	}
	if n != rateBurst || !r.allows(now.Add(time.Second)) {
		t.Errorf("%d at once", n)
	}
}
