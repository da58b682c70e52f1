package services

import (
	"slices"
	"time"
)

// profile is how much of everything is measured.
type profile struct {
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

// quick is a run of about three minutes on two processors of 2024.
func quick() profile {
	return profile{
		Name: "quick", Services: []int{1, 10, 100, 1000, 10000}, Rounds: 17, Block: 130 * time.Millisecond,
		Warm: 25 * time.Millisecond,
		Cold: 5, Batches: 20, Batch: 50, Files: 8, PerFiles: 40, Quiet: 10 * time.Second,
		Rate: 500, Calm: 2 * time.Second, Others: 500, Own: 1000, Kills: 1,
	}
}

// full is a run of one to two hours.
func full() profile {
	return profile{
		Name: "full", Services: []int{1, 10, 100, 1000, 10000}, Rounds: 101, Block: 500 * time.Millisecond,
		Warm: 100 * time.Millisecond,
		Cold: 21, Batches: 100, Batch: 100, Files: 50, PerFiles: 40, Quiet: 10 * time.Minute,
		Rate: 500, Calm: 30 * time.Second, Others: 10000, Own: 10000, Kills: 10,
	}
}

// most is the greatest number of Services.
func (p profile) most() int { return p.Services[len(p.Services)-1] }

// few is the number of Services that the greatest is compared with: 10, or the least.
func (p profile) few() int {
	if slices.Contains(p.Services, 10) {
		return 10
	}
	return p.Services[0]
}
