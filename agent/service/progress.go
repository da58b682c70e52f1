package service

import (
	"context"
	"sync"
	"time"
)

// progress follows changes from the source into the kernel: what is on its way, since when, and how long it took.
type progress struct {
	metrics *proxyMetrics
	late    time.Duration // how long a change may wait
	started time.Time

	notified chan struct{} // holds one when something was queued
	mu       sync.Mutex
	oldest   time.Time // when the oldest change that waits came; zero: none waits
	updated  time.Time // when the kernel last became as wanted; zero: never
	waiting  queued
}

// queued is what waits for the kernel.
type queued struct {
	services, slices int         // objects that changed
	triggered        []time.Time // when what they tell of happened
	seen             []time.Time // when they came to the source, by batch; zero: now
}

func newProgress(m *proxyMetrics, late time.Duration) *progress {
	if late <= 0 {
		late = time.Minute
	}
	return &progress{metrics: m, late: late, started: time.Now(), notified: make(chan struct{}, 1)}
}

// queue records that changes are on their way.
func (p *progress) queue(q queued) {
	now := time.Now()
	p.mu.Lock()
	for _, came := range q.seen {
		if came.IsZero() {
			came = now
		}
		p.waiting.seen = append(p.waiting.seen, came)
		if p.oldest.IsZero() {
			p.oldest = came
		}
	}
	p.waiting.services += q.services
	p.waiting.slices += q.slices
	for _, t := range q.triggered {
		if t.After(p.started) { // what was there before says nothing of this agent
			p.waiting.triggered = append(p.waiting.triggered, t)
		}
	}
	p.metrics.requested(now, q)
	p.metrics.pending(p.waiting)
	p.mu.Unlock()
	select {
	case p.notified <- struct{}{}:
	default: // it will be seen with what waits already
	}
}

// mostWait is how long follow waits at most after a failure.
const mostWait = 5 * time.Second

// follow waits for the kernel to have what was queued, again and again until ctx ends. sync reports whether it has:
// facts that are refused alone don't count, they are told of as their owners'.
func (p *progress) follow(ctx context.Context, sync func(context.Context) bool) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.notified:
		}
		for wait := time.Second; !p.step(ctx, sync); wait = min(2*wait, mostWait) {
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
		}
	}
}

// step waits once for the kernel to have what is queued now, and reports whether it has.
func (p *progress) step(ctx context.Context, sync func(context.Context) bool) bool {
	p.mu.Lock()
	began, first := p.oldest, p.updated.IsZero()
	drained := p.waiting
	p.mu.Unlock()
	checked := time.Now()
	if !sync(ctx) {
		return false
	}
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.updated, p.oldest = now, time.Time{}
	p.waiting.services -= drained.services
	p.waiting.slices -= drained.slices
	p.waiting.triggered = p.waiting.triggered[len(drained.triggered):]
	p.waiting.seen = p.waiting.seen[len(drained.seen):]
	if len(p.notified) > 0 {
		p.oldest = checked // queued meanwhile
	}
	if !began.IsZero() {
		p.metrics.synced(now, now.Sub(began), first, drained)
	}
	p.metrics.pending(p.waiting)
	return true
}

// health returns when the kernel last was as wanted, and whether nothing waits for too long.
func (p *progress) health(now time.Time) (updated time.Time, healthy bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.updated, p.updated.IsZero() || p.oldest.IsZero() || now.Sub(p.oldest) < p.late
}
