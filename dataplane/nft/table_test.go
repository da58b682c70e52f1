package nft

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// example declares a table with every kind of set, and chains at hooks of a firewall.
func example(layout string) *Table[Key] {
	mark := nftables.Mark
	return &Table[Key]{
		Name: "example", Layout: layout, Comment: "an example", Of: func(k Key) Key { return k },
		Private: func(name string) bool { return strings.HasPrefix(name, "own") },
		Sets: map[string]nftables.Set{
			"pods":   {Name: "pods", Key: []nftables.Type{nftables.IPv4}, Data: []nftables.Type{nftables.Verdicts}},
			"flat":   {Name: "flat", Key: []nftables.Type{nftables.IPv4}, Data: []nftables.Type{mark}, Interval: true},
			"ranges": {Name: "ranges", Key: []nftables.Type{mark, nftables.IPv4}, Interval: true},
			"values": {Name: "values", Key: []nftables.Type{mark, nftables.Proto, nftables.Port},
				Data: []nftables.Type{mark, mark}},
			"seen": {Name: "seen", Key: []nftables.Type{nftables.IPv4, mark}, Dynamic: true, Size: 100,
				Timeout: 90 * time.Second},
			"timed": {Name: "timed", Key: []nftables.Type{mark}, Timeout: time.Hour},
			"own":   {Name: "own", Key: []nftables.Type{mark}},
		},
		Hooks: map[string]*nftables.Hook{
			"in":      {Type: "filter", Number: unix.NF_INET_LOCAL_IN, Priority: 10},
			"forward": {Type: "filter", Number: unix.NF_INET_FORWARD, Priority: -5},
			"out":     {Type: "filter", Number: unix.NF_INET_LOCAL_OUT},
		},
	}
}

func (t *Table[K]) everything() []Fact[K] {
	drop := [][]nftables.Expr{{nftables.Do(nftables.DropIt)}}
	lookup := [][]nftables.Expr{append(IPv4.Is(), IPv4.Address(IPv4.Src, 0), nftables.VMap("pods", nftables.R(0)))}
	prefix := netip.MustParsePrefix("10.0.0.0/13")
	return append(t.Frame(),
		t.Chain("in", lookup), t.Chain("forward", append(lookup, lookup...)), t.Chain("out", nil), t.Chain("pod1", drop),
		t.Element("pods", []byte{10, 0, 0, 1}, nftables.Goto("pod1").String()),
		t.Element("pods", []byte{10, 0, 0, 2}, nftables.DropIt.String()),
		t.Element("ranges", SourceRange(nftables.Word(nil, 7), prefix), ""),
		t.Element("flat", []byte{10, 0, 0, 0, 10, 0, 0, 9}, "abcd"),
		t.Element("flat", []byte{10, 0, 0, 10, 255, 255, 255, 255}, "efgh"),
		t.Element("values", EntryKey(nil, model.Entry{Addr: netip.MustParseAddr("0.0.0.1"), Protocol: 6, Port: 80}),
			"abcdefgh"))
}

// in runs a test in a namespace with a connection to its nf_tables.
func in(t *testing.T, test func(c *nftables.Conn)) {
	netnstest.With(t, nftables.Open, func(c *nftables.Conn) {
		test(c)
	})
}

func holds(t *testing.T, table *Table[Key], c *nftables.Conn, want []Fact[Key]) {
	t.Helper()
	held, err := table.Read(c, nil)
	if err != nil {
		t.Error(err)
	}
	in := func(l []Fact[Key], f Fact[Key]) bool { return slices.ContainsFunc(l, f.Equal) }
	for _, f := range want {
		if !in(held, f) {
			t.Errorf("missing %v: %q", f.Key, f.Value)
		}
	}
	for _, f := range held {
		if !in(want, f) {
			t.Errorf("extra %v: %q", f.Key, f.Value)
		}
	}
}

func TestKernelHoldsWhatIsWritten(t *testing.T) {
	in(t, func(c *nftables.Conn) {
		table := example("layout 1")
		all := table.everything()
		write := func(put, del []Fact[Key]) {
			t.Helper()
			if err := table.Write(c, put, del); err != nil {
				t.Error(err)
			}
		}
		write(all, nil)
		holds(t, table, c, all)
		other := table.Chain("pod1", [][]nftables.Expr{{nftables.Do(nftables.Return)}})
		verdict := table.Element("pods", []byte{10, 0, 0, 2}, nftables.Accept.String())
		changed := append(slices.DeleteFunc(slices.Clone(all), func(f Fact[Key]) bool {
			return f.Key == other.Key || f.Key == verdict.Key
		}), other, verdict)
		write([]Fact[Key]{other, verdict}, slices.DeleteFunc(slices.Clone(all), func(f Fact[Key]) bool {
			return f.Key != other.Key && f.Key != verdict.Key
		}))
		holds(t, table, c, changed)
		rest := slices.DeleteFunc(slices.Clone(changed), func(f Fact[Key]) bool { return f.Key.Kind > KindSet })
		write(nil, slices.DeleteFunc(slices.Clone(changed), func(f Fact[Key]) bool { return f.Key.Kind <= KindSet }))
		holds(t, table, c, rest)
		write(nil, rest)
		holds(t, table, c, nil)
		write(all, nil)
		var tx nftables.Tx // what is private, and what packets write, is no fact
		tx.AddChain(table.Name, nftables.Chain{Name: "own chain"})
		tx.AddElements(table.Name, "own", []nftables.Element{{Key: "abcd"}})
		if err := c.Commit(&tx); err != nil {
			t.Error(err)
		}
		holds(t, table, c, all)
		if err := errors.Join(table.Clean(c), table.Clean(c)); err != nil {
			t.Error(err)
		}
		holds(t, table, c, nil)
	})
}

func TestTableOfAnotherLayoutIsMadeAnew(t *testing.T) {
	in(t, func(c *nftables.Conn) {
		old, now := example("layout 1"), example("layout 1")
		pods := now.Sets["pods"]
		pods.Key = []nftables.Type{nftables.IPv4, nftables.Port}
		now.Sets["pods"] = pods
		if err := old.Write(c, old.everything(), nil); err != nil {
			t.Error(err)
		}
		held, err := now.Read(c, nil)
		if err != nil || len(held) != 1 || held[0].Key.Kind != KindTable || !strings.Contains(held[0].Value, "set pods is") {
			t.Errorf("%v, %v", held, err)
		}
		all := now.Frame()
		if err := now.Write(c, all, held); err != nil {
			t.Error(err)
		}
		holds(t, now, c, all)
	})
}

func TestWatch(t *testing.T) {
	in(t, func(c *nftables.Conn) {
		other, err := nftables.Open()
		if err != nil {
			t.Error(err)
			return
		}
		defer other.Close()
		table := example("layout 1")
		if err := c.Mark(); err != nil {
			t.Error(err)
		}
		changes, err := table.Watch(t.Context(), c)
		if err != nil {
			t.Error(err)
			return
		}
		if err := table.Write(c, table.everything(), nil); err != nil {
			t.Error(err)
		}
		select {
		case <-changes:
			t.Error("an own write counts")
		case <-time.After(50 * time.Millisecond):
		}
		if err := table.Write(other, nil, []Fact[Key]{table.Element("pods", []byte{10, 0, 0, 2}, "drop")}); err != nil {
			t.Error(err)
		}
		<-changes
	})
}

func TestTableThatCannotBeOwnedIsMadeAnew(t *testing.T) {
	in(t, func(c *nftables.Conn) {
		table := example("layout 1")
		all := table.everything()
		if err := table.Write(c, all, nil); err != nil { // as another program's restore makes it
			t.Error(err)
		}
		table.Flags = nftables.Owned | nftables.Persistent
		held, err := table.Read(c, nil)
		if err != nil || len(held) != 1 || held[0].Value == table.Layout {
			t.Errorf("%v, %v: want a table of another value alone", held, err)
		}
		if err := table.Write(c, all, held); err != nil {
			t.Error(err)
		}
		holds(t, table, c, all)
		if flags, _, err := c.FlagsOf(table.Name); flags != table.Flags || err != nil {
			t.Errorf("flags %#x, %v", flags, err)
		}
		if err := table.Write(c, nil, held); err != nil { // the table goes
			t.Error(err)
		}
		if there, err := table.Exists(c); there || err != nil {
			t.Errorf("the table is there: %v, %v", there, err)
		}
	})
}

func TestOwnedTableIsItsOwnersAlone(t *testing.T) {
	in(t, func(c *nftables.Conn) {
		table := example("layout 1")
		table.Flags = nftables.Owned
		all := table.everything()
		if err := table.Write(c, all, nil); err != nil {
			t.Error(err)
		}
		other, err := nftables.Open()
		if err != nil {
			t.Error(err)
			return
		}
		defer other.Close()
		holds(t, table, other, all)
		if err := table.Clean(other); !errors.Is(err, unix.EPERM) {
			t.Errorf("another removes it: %v", err)
		}
		if err := table.Write(c, nil, all[len(all)-1:]); err != nil {
			t.Error(err)
		}
		holds(t, table, c, all[:len(all)-1])
	})
}
