package lab

import (
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/sandbox/generate"
)

// Profile says how much of everything is measured.
type Profile struct {
	Name     string
	Services []int // how many Services, rising
	Rounds   int   // of traffic; in each, every arm has a block of each operation
	Block    time.Duration
	Warm     time.Duration // before each block, not measured
	Cold     int           // cold syncs at each number of Services, and restarts
	Batches  int           // of in-process changes, each at the least and at the greatest number of Services
	Batch    int           // changes in a batch
	Files    int           // batches of saved files, each at every number of Services
	PerFiles int           // files in a batch, an even number
	Quiet    time.Duration // that the idle agents are watched, in windows of a fifth
	Rate     float64       // connections per second while losses are counted
	Calm     time.Duration // that losses are counted for while nothing changes
	Others   int           // files saved of other Services while losses are counted
	Own      int           // endpoints replaced of the Service that is connected to
	Kills    int           // times that the agent is killed and started again
}

// Quick is a run of about three minutes on two processors of 2024.
func Quick() Profile {
	return Profile{
		Name: "quick", Services: []int{1, 10, 100, 1000, 10000}, Rounds: 21, Block: 130 * time.Millisecond, Warm: 25 * time.Millisecond,
		Cold: 5, Batches: 20, Batch: 50, Files: 8, PerFiles: 40, Quiet: 10 * time.Second,
		Rate: 500, Calm: 2 * time.Second, Others: 500, Own: 1000, Kills: 1,
	}
}

// Full is a run of one to two hours.
func Full() Profile {
	return Profile{
		Name: "full", Services: []int{1, 10, 100, 1000, 10000}, Rounds: 101, Block: 500 * time.Millisecond, Warm: 100 * time.Millisecond,
		Cold: 21, Batches: 100, Batch: 100, Files: 50, PerFiles: 40, Quiet: 10 * time.Minute,
		Rate: 500, Calm: 30 * time.Second, Others: 10000, Own: 10000, Kills: 10,
	}
}

// check says what is wrong with the numbers of Services.
func (p Profile) check() error {
	if len(p.Services) == 0 || !slices.IsSorted(p.Services) || len(slices.Compact(slices.Clone(p.Services))) < len(p.Services) {
		return fmt.Errorf("numbers of Services %v: give at least one, each once, rising, such as 1,10,100", p.Services)
	}
	for _, n := range p.Services {
		if n < 1 {
			return fmt.Errorf("numbers of Services %v: %d is none", p.Services, n)
		}
		if err := generate.Check(n, endpoints); err != nil {
			return fmt.Errorf("numbers of Services %v: %w", p.Services, err)
		}
	}
	return nil
}

// most is the greatest number of Services.
func (p Profile) most() int { return p.Services[len(p.Services)-1] }

// few is the number of Services that the greatest is compared with: 10, or the least.
func (p Profile) few() int {
	if slices.Contains(p.Services, 10) {
		return 10
	}
	return p.Services[0]
}
