package ipam

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func prefixes(texts ...string) (l []netip.Prefix) {
	for _, t := range texts {
		l = append(l, netip.MustParsePrefix(t))
	}
	return l
}

func open(t testing.TB, folder, boot string, ranges ...string) *Pool {
	t.Helper()
	p, err := Open(folder, boot)
	if err != nil {
		t.Fatal(err)
	}
	p.SetRanges(prefixes(ranges...))
	return p
}

func allocate(t testing.TB, p *Pool, id string) string {
	t.Helper()
	r, err := p.Allocate(Record{ID: id, Interface: "eth0"})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Trim(fmt.Sprint(r.Addresses), "[]")
}

func release(t testing.TB, p *Pool, ids ...string) {
	t.Helper()
	for _, id := range ids {
		if err := p.Release(id); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLongestFreeFirst(t *testing.T) {
	folder := t.TempDir()
	p := open(t, folder, "x", "10.0.0.0/29") // 2 to 6
	for i, want := range []string{"10.0.0.2", "10.0.0.3", "10.0.0.4"} {
		if a := allocate(t, p, fmt.Sprint(i)); a != want {
			t.Errorf("%s, want %s", a, want)
		}
	}
	release(t, p, "2", "0")
	p = open(t, folder, "x", "10.0.0.0/29")
	for i, want := range []string{"10.0.0.5", "10.0.0.6", "10.0.0.4", "10.0.0.2"} {
		if a := allocate(t, p, fmt.Sprint("new", i)); a != want {
			t.Errorf("%s, want %s", a, want)
		}
		if i == 2 {
			p = open(t, folder, "x", "10.0.0.0/29")
		}
	}
	_, err := p.Allocate(Record{ID: "more", Interface: "eth0"})
	e, ok := errors.AsType[*Exhausted](err)
	if !ok || e.Used != 5 || !strings.Contains(err.Error(), "all 5 addresses of [10.0.0.0/29]") {
		t.Error(err)
	}
	release(t, p, "1", "1", "unknown")
	if a := allocate(t, p, "more"); a != "10.0.0.3" {
		t.Errorf("%s", a)
	}
}

// TestReusedUntilSettled is which addresses an attachment may find something left under.
func TestReusedUntilSettled(t *testing.T) {
	folder := t.TempDir()
	p := open(t, folder, "x", "10.0.0.0/30") // one address
	reused := func(id string) int {
		t.Helper()
		r, err := p.Allocate(Record{ID: id, Interface: "eth0"})
		if err != nil {
			t.Fatal(err)
		}
		return len(r.Reused)
	}
	settle := func(during func(left func(netip.Addr) bool) error) (err error, called bool) {
		err = p.Settle(func(left func(netip.Addr) bool) error { called = true; return during(left) })
		return err, called
	}
	one, done := netip.MustParseAddr("10.0.0.2"), func(func(netip.Addr) bool) error { return nil }
	if _, called := settle(done); called || reused("a") != 0 {
		t.Error("a new pool has something to settle")
	}
	release(t, p, "a")
	if reused("b") != 1 {
		t.Error("an address that was just released isn't reused")
	}
	release(t, p, "b")
	broken := errors.New("broken")
	if err, _ := settle(func(func(netip.Addr) bool) error { return broken }); err != broken || reused("c") != 1 {
		t.Errorf("after an error: %v, and nothing is reused", err)
	}
	release(t, p, "c")
	if err, called := settle(func(left func(netip.Addr) bool) error {
		before := left(one)
		reused("d")
		during := left(one)
		release(t, p, "d") // what d leaves may come too late
		if !before || during || !left(one) {
			t.Errorf("left while free, in use, free again: %v, %v, %v", before, during, left(one))
		}
		return nil
	}); err != nil || !called || reused("e") != 1 {
		t.Errorf("%v: an address that was released meanwhile is settled", err)
	}
	release(t, p, "e")
	if err, called := settle(done); err != nil || !called || reused("f") != 0 {
		t.Errorf("%v: a settled address is still reused", err)
	}
	p = open(t, folder, "x", "10.0.0.0/29")
	if err, called := settle(func(left func(netip.Addr) bool) error {
		if left(one) || !left(one.Next()) || left(netip.MustParseAddr("10.0.1.2")) {
			t.Error("of another process, it is not the free addresses of the range that are left")
		}
		return nil
	}); err != nil || !called || reused("g") != 0 {
		t.Errorf("%v: settled addresses of another process are reused", err)
	}
	if p = open(t, folder, "x", "10.0.0.0/29"); reused("h") != 1 {
		t.Error("an address that another process may have given out isn't reused")
	}
}

func TestBothFamiliesOrNone(t *testing.T) {
	p := open(t, t.TempDir(), "x", "10.0.0.0/30", "fd00::/64")
	if a := allocate(t, p, "a"); a != "10.0.0.2 fd00::2" {
		t.Errorf("%s", a)
	}
	if _, err := p.Allocate(Record{ID: "b", Interface: "eth0"}); err == nil || len(p.Records()) != 1 {
		t.Errorf("%v", err)
	}
	p.SetRanges(prefixes("10.0.0.0/30", "10.9.0.0/30", "fd00::/64"))
	if a := allocate(t, p, "b"); a != "10.9.0.2 fd00::3" {
		t.Errorf("%s", a)
	}
	p.SetRanges(prefixes("fd09::/64"))
	release(t, p, "b")
	if a := allocate(t, p, "c"); a != "fd09::2" {
		t.Errorf("%s", a)
	}
	if a := allocate(t, p, "a"); a != "10.0.0.2 fd00::2" {
		t.Errorf("one that has a record: %s", a)
	}
}

func TestAnotherBoot(t *testing.T) {
	folder := t.TempDir()
	allocate(t, open(t, folder, "x", "10.0.0.0/24"), "a")
	if l := open(t, folder, "x").Records(); len(l) != 1 {
		t.Errorf("%v", l)
	}
	if l := open(t, folder, "y").Records(); len(l) != 0 {
		t.Errorf("%v", l)
	}
}

func TestUnreadableRecords(t *testing.T) {
	folder := t.TempDir()
	allocate(t, open(t, folder, "x", "10.0.0.0/24"), "a")
	half := filepath.Join(folder, "attachment-0.json")
	if err := errors.Join(os.WriteFile(half+temporary, []byte("{"), 0o600),
		os.WriteFile(filepath.Join(folder, releasedFile), []byte("{"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if l := open(t, folder, "x").Records(); len(l) != 1 {
		t.Errorf("%v", l)
	}
	if err := os.WriteFile(half, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(folder, "x"); err == nil || !strings.Contains(err.Error(), half) {
		t.Errorf("%v", err)
	}
}

// TestNoAddressTwice allocates and releases at random, from anew every now and then.
func TestNoAddressTwice(t *testing.T) {
	folder := t.TempDir()
	r := rand.New(rand.NewPCG(1, 2))
	ranges := []string{"10.0.0.0/27", "10.0.1.0/29", "fd00::/64"}
	p := open(t, folder, "x", ranges...)
	held := map[string]string{}
	for range 5000 {
		id := fmt.Sprint(r.IntN(50))
		switch {
		case r.IntN(100) == 0:
			p = open(t, folder, "x", ranges...)
		case r.IntN(2) == 0:
			release(t, p, id)
			delete(held, id)
		default:
			rec, err := p.Allocate(Record{ID: id, Interface: "eth0"})
			if err != nil {
				if len(held) < 29+5 {
					t.Fatalf("%d in use: %v", len(held), err)
				}
				continue
			}
			now := fmt.Sprint(rec.Addresses)
			if was := held[id]; was != "" && was != now {
				t.Fatalf("%s had %s and has %s", id, was, now)
			}
			for o, a := range held {
				if o != id && (strings.HasPrefix(a, now[:strings.Index(now, " ")+1]) || a == now) {
					t.Fatalf("%s and %s have %s", id, o, a)
				}
			}
			held[id] = now
		}
	}
	if n := len(p.Records()); n != len(held) {
		t.Errorf("%d records of %d", n, len(held))
	}
}

// TestForgottenReleasesAreFoundAgain is about more addresses than are remembered.
func TestForgottenReleasesAreFoundAgain(t *testing.T) {
	p := open(t, t.TempDir(), "x", "10.0.0.0/29")
	for i := range 5 {
		allocate(t, p, fmt.Sprint(i))
	}
	release(t, p, "3")
	p.released[0] = nil
	if a := allocate(t, p, "new"); a != "10.0.0.5" {
		t.Errorf("%s", a)
	}
}

func FuzzParseRecord(f *testing.F) {
	f.Add([]byte(`{"id":"a/eth0","interface":"eth0","addresses":["10.0.0.2","fd00::2"]}`))
	f.Add([]byte(`{"addresses":[""]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := ParseRecord(b); err == nil && (r.ID == "" || slices.Contains(r.Addresses, netip.Addr{})) {
			t.Errorf("%+v", r)
		}
	})
}

func BenchmarkAllocateRelease(b *testing.B) {
	p := open(b, b.TempDir(), "x", "10.0.0.0/24", "fd00::/64")
	for b.Loop() {
		allocate(b, p, "a")
		release(b, p, "a")
	}
}

func TestRequestedAddresses(t *testing.T) {
	p := open(t, t.TempDir(), "x", "10.0.0.0/29", "fd00::/64")
	for _, c := range []struct{ id, requested, want string }{
		{"a", "10.0.0.2", "10.0.0.2 fd00::2"},
		{"b", "10.0.0.5 fd00::99", "10.0.0.5 fd00::99"},
		{"b", "10.0.0.6", "10.0.0.5 fd00::99"}, // the same attachment
		{"c", "10.0.0.5", "in use by b"},
		{"c", "10.0.0.6 fd00::99", "in use by b"},
		{"c", "10.0.0.0", "reserved"},
		{"c", "10.0.0.1", "reserved"},
		{"c", "10.0.0.7", "reserved"},
		{"c", "10.0.0.8", "pods of this node have addresses of [10.0.0.0/29 fd00::/64]"},
		{"c", "10.0.0.6 fd00::5", "10.0.0.6 fd00::5"},
		{"d", "", "10.0.0.3 fd00::3"},
	} {
		r := Record{ID: c.id, Interface: "eth0"}
		for a := range strings.FieldsSeq(c.requested) {
			r.Addresses = append(r.Addresses, netip.MustParseAddr(a))
		}
		r, err := p.Allocate(r)
		got := strings.Trim(fmt.Sprint(r.Addresses), "[]")
		if inUse, ok := errors.AsType[*InUse](err); ok {
			got = inUse.Error()
		} else if err != nil {
			t.Error(err)
		}
		if !strings.Contains(got, c.want) {
			t.Errorf("%s requests %q: %s, want %s", c.id, c.requested, got, c.want)
		}
	}
}

func TestReadAndUsage(t *testing.T) {
	folder := t.TempDir()
	if l, err := Read(filepath.Join(folder, "none"), "x"); err != nil || len(l) > 0 {
		t.Errorf("%v, %v", l, err)
	}
	p := open(t, folder, "x", "10.0.0.0/29", "fd00::/64")
	allocate(t, p, "b")
	allocate(t, p, "a")
	l, err := Read(folder, "x")
	if err != nil || len(l) != 2 || l[0].ID != "a" {
		t.Errorf("%v, %v", l, err)
	}
	for r, want := range map[string]string{"10.0.0.0/29": "2 used, 3 free", "fd00::/126": "2 used, 0 free",
		"fd00::/64": "2 used, more than 4294967295 free", "10.1.0.0/16": "0 used, 65533 free"} {
		u := UsageOf(netip.MustParsePrefix(r), l)
		if got := fmt.Sprintf("%d used, %s free", u.Used, u.FreeText()); got != want {
			t.Errorf("%s: %s, want %s", r, got, want)
		}
	}
	if l, err := Read(folder, "y"); err != nil || len(l) > 0 {
		t.Errorf("records of another boot: %v, %v", l, err)
	}
	if _, err := os.Stat(filepath.Join(folder, bootFile)); err != nil {
		t.Error("reading deleted something")
	}
}
