package model

import "testing"

func TestFairShare(t *testing.T) {
	for _, c := range []struct {
		total   int
		demands []int
		want    int // how much each may have at most; 0: there is enough
	}{
		{10, nil, 0}, {10, []int{10}, 0}, {10, []int{11}, 10}, {10, []int{5, 5}, 0}, {10, []int{6, 5}, 5},
		{10, []int{1, 20, 1}, 8}, {10, []int{2, 20, 30}, 4}, {0, []int{1}, 0},
	} {
		got := FairShare(c.total, c.demands)
		sum := 0
		for _, d := range c.demands {
			sum += min(d, got)
		}
		if c.want > 0 && got != c.want || sum > c.total {
			t.Errorf("%d for %v: %d each, want %d", c.total, c.demands, got, c.want)
		}
	}
}
