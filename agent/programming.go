package agent

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// programming measures how long changes take from their arrival at the source until the data plane has written them.
type programming struct {
	took  prometheus.Histogram
	told  chan struct{} // holds one when there is something to wait for
	mu    sync.Mutex
	begun []time.Time // arrivals of changes that are not known to be written yet
}

func newProgramming() *programming {
	return &programming{told: make(chan struct{}, 1), took: prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "fairlead_programming_seconds", Help: "Time from a change's arrival until the kernel has it.",
		Buckets: prometheus.ExponentialBucketsRange(100e-6, 10, 41)})}
}

// begin notes that a change that arrived then is wanted from the data plane now. Zero means now.
func (p *programming) begin(arrived time.Time) {
	if arrived.IsZero() {
		arrived = time.Now()
	}
	p.mu.Lock()
	p.begun = append(p.begun, arrived)
	p.mu.Unlock()
	select {
	case p.told <- struct{}{}:
	default:
	}
}

// run observes, with a function that waits until all is written that was wanted before the call, until ctx ends.
func (p *programming) run(ctx context.Context, sync func(context.Context) error) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.told:
		}
		p.mu.Lock()
		begun := p.begun
		p.begun = nil
		p.mu.Unlock()
		sync(ctx) // what the kernel refuses is in the loop's status
		if ctx.Err() != nil {
			return nil
		}
		for _, t := range begun {
			p.took.Observe(time.Since(t).Seconds())
		}
	}
}
