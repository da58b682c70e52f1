package nftables

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/dataplane/service/servicetest"
	"fairlead.dev/fairlead/model"
)

// poolOf returns a pool of backends, by number, in the order given.
func poolOf(numbers ...int) *model.Pool {
	p := &model.Pool{}
	for _, n := range numbers {
		p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(servicetest.Address(10<<24, n), 80),
			Weight: 1})
	}
	return p
}

// sitting returns who sits where.
func sitting(p *model.Pool) (l []model.Backend) {
	for _, i := range slots(p) {
		l = append(l, p.Backends[i])
	}
	return l
}

func TestSlotsFollowSharesNotOrder(t *testing.T) {
	for _, numbers := range [][]int{{7}, {1, 2}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}} {
		p := poolOf(numbers...)
		p.Backends[0].Weight = 3
		got := sitting(p)
		slices.Reverse(p.Backends)
		if again := sitting(p); !slices.Equal(got, again) {
			t.Errorf("the order of %d backends changes their slots: %v, %v", len(numbers), got, again)
		}
		for _, b := range p.Backends {
			n := 0
			for _, s := range got {
				if s == b {
					n++
				}
			}
			if n != b.Share() {
				t.Errorf("%v has %d slots, its share is %d", b, n, b.Share())
			}
		}
	}
}

func TestFewSlotsChange(t *testing.T) {
	for _, c := range []struct {
		size    int
		replace float64 // slots that may change, on average
		add     float64
	}{{10, 3.2, 3.6}, {50, 5, 5.5}} {
		var replaced, added int
		const rounds = 200
		for range rounds {
			all := rand.Perm(1 << 16)[:c.size+1]
			before, after, more := sitting(poolOf(all[1:]...)), sitting(poolOf(all[:c.size]...)), sitting(poolOf(all...))
			for i := range before {
				if before[i] != after[i] {
					replaced++
				}
				if after[i] != more[i] {
					added++
				}
			}
		}
		r, a := float64(replaced)/rounds, float64(added)/rounds
		t.Logf("%d backends: %.1f slots change for one that replaces another, %.1f for one that comes", c.size, r, a)
		if r > c.replace || a > c.add {
			t.Errorf("of %d slots %.1f change when one backend replaces another, %.1f when one comes; want at most %v and %v",
				c.size, r, a, c.replace, c.add)
		}
	}
}

func BenchmarkAssignSlots(b *testing.B) {
	for _, n := range []int{10, 50} {
		p := poolOf(rand.Perm(1 << 16)[:n]...)
		b.Run("", func(b *testing.B) {
			for b.Loop() {
				slots(p)
			}
		})
	}
}
