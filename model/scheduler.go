package model

import (
	"fmt"
	"math/big"
	"slices"
	"strings"
)

// Scheduler is how a pool gives a new connection one of its backends.
type Scheduler uint8

// The schedulers. Those that know IPVS know most of them (ip_vs_*.c).
const (
	Random                   Scheduler = iota // any, each as likely as its weight
	RoundRobin                                // one after the other, whatever the weights
	WeightedRoundRobin                        // one after the other, each as often as its weight
	LeastConnections                          // the one with the fewest connections
	WeightedLeastConnections                  // the one with the fewest connections for its weight
	SourceHash                                // by a hash of the client's address
	DestinationHash                           // by a hash of the address that the client asked for
	ShortestExpectedDelay                     // the lowest (connections + 1) / weight
	NeverQueue                                // an idle one, else as ShortestExpectedDelay
	Maglev                                    // by consistent hashing of the client's address (Eisenbud et al., NSDI 2016)
	lastScheduler
)

// schedulerNames returns each scheduler's names: ours, then IPVS's.
var schedulerNames = [lastScheduler][2]string{
	Random:                   {"random", "random"},
	RoundRobin:               {"round-robin", "rr"},
	WeightedRoundRobin:       {"weighted-round-robin", "wrr"},
	LeastConnections:         {"least-connections", "lc"},
	WeightedLeastConnections: {"weighted-least-connections", "wlc"},
	SourceHash:               {"source-hash", "sh"},
	DestinationHash:          {"destination-hash", "dh"},
	ShortestExpectedDelay:    {"shortest-expected-delay", "sed"},
	NeverQueue:               {"never-queue", "nq"},
	Maglev:                   {"maglev", "mh"},
}

// instead reports what stands in for a scheduler that a data plane can't do. Every one can do Random or RoundRobin.
var instead = [lastScheduler]Scheduler{
	Random:                   WeightedRoundRobin,
	RoundRobin:               Random,
	WeightedRoundRobin:       RoundRobin,
	LeastConnections:         RoundRobin,
	WeightedLeastConnections: WeightedRoundRobin,
	SourceHash:               Maglev,
	DestinationHash:          Random,
	ShortestExpectedDelay:    WeightedLeastConnections,
	NeverQueue:               ShortestExpectedDelay,
	Maglev:                   SourceHash,
}

// String returns the scheduler's name, such as "round-robin".
func (s Scheduler) String() string {
	if s < lastScheduler {
		return schedulerNames[s][0]
	}
	return fmt.Sprintf("scheduler %d", uint8(s))
}

// IPVS returns the scheduler's name in IPVS, such as "rr".
func (s Scheduler) IPVS() string { return schedulerNames[s][1] }

// Hashes reports whether the scheduler selects for equal packets the same backend.
func (s Scheduler) Hashes() bool { return s == SourceHash || s == DestinationHash || s == Maglev }

// MaxEntries is the greatest size of Maglev's table: the largest prime of 16 bits, so that an index is one.
const MaxEntries = 65521

// TableSize returns the number of entries of Maglev's table for a pool of n backends: a prime, at least each for every
// backend as far as MaxEntries reaches. The sizes double, so that the table of a growing pool rarely changes its size,
// which moves nearly every client, and is never much larger than asked for.
func TableSize(n, each int) int {
	for _, prime := range []int{1009, 2003, 4001, 8009, 16001, 32003} {
		if each*n <= prime {
			return prime
		}
	}
	return MaxEntries
}

// CheckEntries returns what is wrong with a size of Maglev's table.
func CheckEntries(n int) error {
	if n < 0 || n > MaxEntries || n > 0 && !big.NewInt(int64(n)).ProbablyPrime(0) {
		return fmt.Errorf("%d is no size of a Maglev table: give a prime up to %d, such as 1021, 16381 or %d, at least a "+
			"hundred times the number of endpoints", n, MaxEntries, MaxEntries)
	}
	return nil
}

// ParseScheduler reads a scheduler by either of its names.
func ParseScheduler(name string) (Scheduler, error) {
	for s := range lastScheduler {
		if slices.Contains(schedulerNames[s][:], name) {
			return s, nil
		}
	}
	return 0, fmt.Errorf("%q is no scheduler; those are %s", name, AllSchedulers)
}

// Schedulers is a set of schedulers, a bit each (1 << Scheduler).
type Schedulers uint16

// AllSchedulers holds every scheduler.
const AllSchedulers = Schedulers(1<<lastScheduler - 1)

// SchedulersOf makes a set.
func SchedulersOf(list ...Scheduler) (s Schedulers) {
	for _, x := range list {
		s |= 1 << x
	}
	return s
}

// Has reports whether x is in the set.
func (s Schedulers) Has(x Scheduler) bool { return s&(1<<x) != 0 }

// Instead returns x if the set has it, else what stands in for it: the first of its chain of substitutes that the set
// has, or of Random's. For a set with none of these it is Random.
func (s Schedulers) Instead(x Scheduler) Scheduler {
	for _, start := range []Scheduler{x, Random} {
		x = start
		for range lastScheduler {
			if s.Has(x) {
				return x
			}
			x = instead[x]
		}
	}
	return Random
}

// List returns the set's members in order.
func (s Schedulers) List() (l []Scheduler) {
	for x := range lastScheduler {
		if s.Has(x) {
			l = append(l, x)
		}
	}
	return l
}

// String returns the members' names, comma-separated.
func (s Schedulers) String() string {
	var l []string
	for _, x := range s.List() {
		l = append(l, x.String())
	}
	return strings.Join(l, ", ")
}
