package ipset

import (
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

func elements(texts ...string) (l []Element) {
	for _, s := range texts {
		p, no := strings.CutPrefix(s, "!")
		p, device, _ := strings.Cut(p, ",")
		l = append(l, Element{netip.MustParsePrefix(p), no, device})
	}
	return l
}

// run runs a test's body in a namespace with a connection to its sets.
func run(t *testing.T, body func(c *Conn)) {
	netnstest.With(t, Open, func(c *Conn) {
		body(c)
	})
}

func TestKernelHoldsWhatIsWritten(t *testing.T) {
	run(t, func(c *Conn) {
		sets := map[Set][]Element{
			{Name: "fl_four"}: elements("10.0.0.0/8", "!10.0.0.1/32",
				"128.0.0.0/1", "0.0.0.0/1"),
			{Name: "fl_six", IPv6: true}:             elements("fd00::/8", "!fd00::1/128", "8000::/1"),
			{Name: "fl_timed", Timeout: time.Minute}: elements("0.0.0.0/1"),
			{Name: "fl_empty"}:                       nil,
			{Name: "fl_entry", Devices: true}: elements("10.0.0.1/32,pod0", "10.0.0.2/32,pod1", "10.0.0.2/32,pod0",
				"0.0.0.0/0,name-of-15-char"),
			{Name: "fl_entry6", IPv6: true, Devices: true}:      elements("fd00::1/128,pod0", "::/0,pod1"),
			{Name: strings.Repeat("fl_name_of_31_", 2) + "678"}: elements("10.0.0.1/32"),
		}
		var b Batch
		for s, l := range sets {
			b.Create(s)
			b.Create(s) // again: left as it is
			for _, e := range l {
				b.Put(s.Name, Element{e.Prefix, !e.NoMatch, e.Device})
				b.Put(s.Name, e)
			}
		}
		b.Delete("fl_four", elements("10.9.9.0/24")[0])
		if err := c.Apply(&b); err != nil {
			t.Error(err)
		}
		for s, l := range sets {
			set, got, ours, err := c.Read(s.Name)
			for _, e := range l {
				if !slices.Contains(got, e) {
					t.Errorf("%s lacks %v: has %v", s.Name, e, got)
				}
			}
			if err != nil || !ours || set != s || len(got) != len(l) {
				t.Errorf("%s: %+v, %v, %v, %v", s.Name, set, got, ours, err)
			}
		}
		counts, err := c.Counts("fl_")
		if err != nil || counts["fl_four"] != 4 || counts["fl_six"] != 3 || counts["fl_entry"] != 4 || len(counts) != 6 {
			t.Errorf("counts %v, %v", counts, err)
		}
		if err := c.HasDevices(); err != nil {
			t.Error(err)
		}
		b = Batch{}
		b.Create(Set{Name: "fl_six", IPv6: true, Timeout: time.Hour})
		b.Put("fl_none", elements("10.0.0.1/32")[0])
		b.Put("fl_four", elements("10.0.0.7/32")[0])
		if err := c.Apply(&b); err == nil || !strings.Contains(err.Error(), "create set fl_six") ||
			!strings.Contains(err.Error(), "fl_none") {
			t.Errorf("refusals: %v", err)
		}
		if counts, err := c.Counts("fl_"); err != nil || counts["fl_four"] != 5 {
			t.Errorf("what follows a refusal isn't tried: %v, %v", counts, err)
		}
	})
}

func TestSetsAreMadeForTheirElements(t *testing.T) {
	run(t, func(c *Conn) {
		var b Batch
		b.Create(Set{Name: "fl_four", Elements: 5000})
		size := func() string {
			out, err := exec.Command("ipset", "list", "-t", "fl_four").CombinedOutput()
			_, after, _ := strings.Cut(string(out), "hashsize ")
			if before, _, ok := strings.Cut(after, " "); ok && err == nil {
				return before
			}
			t.Errorf("ipset list: %v: %s", err, out)
			return ""
		}
		if err := c.Apply(&b); err != nil {
			t.Error(err)
		}
		made := size()
		b = Batch{}
		for i := range 5000 {
			b.Put("fl_four", Element{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32)})
		}
		if err := c.Apply(&b); err != nil {
			t.Error(err)
		}
		if filled := size(); made != "8192" || filled != made {
			t.Errorf("a set of 5000 elements was made with %s buckets and has %s: want 8192", made, filled)
		}
	})
}

func TestRefusedElementHoldsNoOther(t *testing.T) {
	run(t, func(c *Conn) {
		var b Batch
		b.Create(Set{Name: "fl_four"})
		const n = 3*mostElements/2 + 1
		for i := range n {
			e := Element{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32)}
			if i%100 == 7 {
				e.Prefix = netip.MustParsePrefix("fd00::1/128")
			}
			b.Put("fl_four", e)
		}
		if b.Len() != n+1 {
			t.Errorf("%d changes, want %d", b.Len(), n+1)
		}
		err := c.Apply(&b)
		if counts, e := c.Counts("fl_"); e != nil || counts["fl_four"] != n-4 {
			t.Errorf("%v, %v: want %d elements", counts, e, n-4)
		}
		if err == nil || strings.Count(err.Error(), "add to set fl_four: fd00::1/128") != 4 ||
			strings.Contains(err.Error(), "10.0.") {
			t.Errorf("refusals: %v", err)
		}
	})
}

func TestSetsOfOthersAreLeftAlone(t *testing.T) {
	run(t, func(c *Conn) {
		ipset := func(args ...string) {
			if out, err := exec.Command("ipset", args...).CombinedOutput(); err != nil {
				t.Errorf("ipset %v: %v: %s", args, err, out)
			}
		}
		ipset("create", "fl_bits", "bitmap:port", "range", "1-10")
		ipset("create", "fl_newer", "hash:net", "bucketsize", "2")
		ipset("create", "others", "hash:net")
		if names, err := c.Names("fl_"); err != nil || len(names) != 2 {
			t.Errorf("names %v, %v", names, err)
		}
		for _, n := range []string{"fl_bits", "fl_newer"} {
			if _, _, ours, err := c.Read(n); ours || err != nil {
				t.Errorf("%s is ours: %v, %v", n, ours, err)
			}
		}
		if err := Destroy("fl_"); err != nil {
			t.Error(err)
		}
		if names, err := c.Names(""); err != nil || !slices.Equal(names, []string{"others"}) {
			t.Errorf("names %v, %v", names, err)
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte{12, 0, 1, 128, 8, 0, 1, 64, 10, 0, 0, 1, 5, 0, 3, 0, 24, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if e, ok := parse(b); ok && !e.Prefix.IsValid() {
			t.Errorf("an invalid prefix of %x", b)
		}
	})
}
