package model

import "testing"

func TestParseScheduler(t *testing.T) {
	for _, s := range AllSchedulers.List() {
		for _, name := range []string{s.String(), s.IPVS()} {
			if got, err := ParseScheduler(name); got != s || err != nil {
				t.Errorf("%q: %v, %v", name, got, err)
			}
		}
	}
	for _, name := range []string{"", "RR", "fastest", "scheduler 10"} {
		if s, err := ParseScheduler(name); err == nil {
			t.Errorf("%q is %v", name, s)
		}
	}
}

func TestInstead(t *testing.T) {
	for _, c := range []struct {
		can             Schedulers
		requested, gets Scheduler
	}{
		{AllSchedulers, NeverQueue, NeverQueue},
		{SchedulersOf(Random), NeverQueue, Random},
		{SchedulersOf(RoundRobin), Random, RoundRobin},
		{SchedulersOf(RoundRobin, WeightedRoundRobin), Random, WeightedRoundRobin},
		{SchedulersOf(Random, SourceHash), Maglev, SourceHash},
		{SchedulersOf(Random, Maglev), SourceHash, Maglev},
		{SchedulersOf(Random, RoundRobin), LeastConnections, RoundRobin},
		{SchedulersOf(Random), SourceHash, Random},
		{0, Maglev, Random},
	} {
		if got := c.can.Instead(c.requested); got != c.gets {
			t.Errorf("of %q, %v stands in for %v, not %v", c.can, got, c.requested, c.gets)
		}
	}
}
