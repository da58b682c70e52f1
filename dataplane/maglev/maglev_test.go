package maglev

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/model"
)

// backends returns n neighbours, of the weights in turn.
func backends(n int, weights ...uint16) (l []model.Backend) {
	for i := range n {
		b := model.Backend{Addr: netip.AddrPortFrom(netip.AddrFrom4(
			[4]byte(binary.BigEndian.AppendUint32(nil, 10<<24+1+uint32(i)))), 8080)}
		if len(weights) > 0 {
			b.Weight = weights[i%len(weights)]
		}
		l = append(l, b)
	}
	return l
}

// counts returns how many entries each backend has.
func counts(t []uint16, n int) []int {
	c := make([]int, n)
	for _, i := range t {
		c[i]++
	}
	return c
}

func TestEachBackendHasItsShare(t *testing.T) {
	for _, c := range []struct {
		n       int
		weights []uint16
	}{{1, nil}, {2, nil}, {3, nil}, {10, nil}, {100, nil}, {600, nil}, {3, []uint16{1, 2, 5}}, {10, []uint16{1, 256}},
		{50, []uint16{3, 7}}, {100, []uint16{1, 1, 2}}} {
		t.Run(fmt.Sprint(c.n, c.weights), func(t *testing.T) {
			b := backends(c.n, c.weights...)
			total := 0
			for _, x := range b {
				total += x.Share()
			}
			for i, k := range counts(Table(b, Size), c.n) {
				want := float64(Size) * float64(b[i].Share()) / float64(total)
				if off := math.Abs(float64(k) - want); off > max(1.01, want/100) {
					t.Errorf("backend %d of share %d has %d entries, want %.0f ± 1 %%", i, b[i].Share(), k, want)
				}
			}
		})
	}
}

// lost returns the part of entries that belong to another backend once backend gone has left.
func lost(b []model.Backend, gone int) float64 {
	before := Table(b, Size)
	rest := slices.Delete(slices.Clone(b), gone, gone+1)
	moved := 0
	for i, now := range Table(rest, Size) {
		if b[before[i]] != rest[now] {
			moved++
		}
	}
	return float64(moved) / Size
}

func TestFewEntriesMoveWhenOneBackendGoes(t *testing.T) {
	for _, c := range []struct {
		n     int
		extra float64 // beyond the leaver's own 1/n, of all entries
	}{{2, .005}, {3, .005}, {10, .005}, {30, .005}, {50, .005}, {100, .01}, {300, .01}, {600, .01}} {
		worst, sum := 0.0, 0.0
		tries := min(c.n, 20)
		for i := range tries {
			l := lost(backends(c.n), i*c.n/tries) - 1/float64(c.n)
			worst, sum = max(worst, l), sum+l
		}
		t.Logf("%d backends: %.2f %% of entries move, and %.2f %% more, at most %.2f %%", c.n, 100/float64(c.n),
			100*sum/float64(tries), 100*worst)
		if worst > c.extra {
			t.Errorf("of %d backends one goes: %.2f %% more entries move than were its own, want ≤ %.1f %%", c.n, 100*worst,
				100*c.extra)
		}
	}
}

func TestTableIsAFunctionOfTheBackends(t *testing.T) {
	if Table(nil, Size) != nil {
		t.Error("a table without backends has entries")
	}
	b := backends(7, 1, 2)
	if !slices.Equal(Table(b, 251), Table(slices.Clone(b), 251)) {
		t.Error("two tables of the same backends differ")
	}
}

func BenchmarkTable(b *testing.B) {
	for _, n := range []int{2, 10, 100, 600} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			l := backends(n)
			for b.Loop() {
				Table(l, Size)
			}
		})
	}
}

func TestFewSizes(t *testing.T) {
	for _, c := range []struct{ n, each, want int }{{1, 100, 1009}, {10, 100, 1009}, {11, 100, 2003}, {101, 100, 16001},
		{5000, 100, Size}, {10, 1000, 16001}, {33, 1000, Size}} {
		if got := Entries(&model.Pool{Backends: backends(c.n)}, c.each); got != c.want {
			t.Errorf("%d for each of %d backends: %d entries, want %d", c.each, c.n, got, c.want)
		}
	}
}

func TestHowManyMoveByNumberOfEntries(t *testing.T) {
	for each, most := range map[int]float64{100: 0.04, 1000: 0.01} {
		all := backends(10)
		before := Table(all, Entries(&model.Pool{Backends: all}, each))
		after := Table(append(slices.Clone(all[:4]), all[5:]...), Entries(&model.Pool{Backends: all[1:]}, each))
		moved, stayed := 0, 0
		for i, b := range before {
			if b == 4 {
				continue
			}
			stayed++
			if was := all[b]; append(slices.Clone(all[:4]), all[5:]...)[after[i]] != was {
				moved++
			}
		}
		if share := float64(moved) / float64(stayed); share > most {
			t.Errorf("with %d entries for each: %.2f %% of the clients whose backend stays are moved", each, 100*share)
		} else {
			t.Logf("with %d entries for each: %.2f %%", each, 100*share)
		}
	}
}
