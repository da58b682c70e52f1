package advise

import (
	"context"
	"fmt"
	"sync"
	"time"

	"fairlead.dev/fairlead/source"
)

// churn counts the changes of endpoints that a source delivers.
type churn struct {
	from source.Source

	mu      sync.Mutex
	since   time.Time // when all that there was had been delivered
	changes int       // of EndpointSlices, since then
	failed  error
}

// follow counts until stop is called, which waits for the end.
func (c *churn) follow(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err := c.from.Run(ctx, c.collect)
		c.mu.Lock()
		c.failed = err
		c.mu.Unlock()
	}()
	return func() {
		cancel()
		<-ended
	}
}

func (c *churn) collect(b source.Batch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if b.Waiting {
		return
	}
	if c.since.IsZero() {
		c.since = time.Now()
		return
	}
	for _, x := range b.Changes {
		if x.Key.Kind == source.EndpointSlice {
			c.changes++
		}
	}
}

// rate returns the changes a second until now and what is to be said of them; otherwise is the rate where they could
// not be counted.
func (c *churn) rate(now time.Time, otherwise float64) (perSecond float64, remark string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	const own = "name the rate of busier times, such as roll-outs, with --changes."
	elapsed := now.Sub(c.since)
	if c.since.IsZero() || elapsed <= 0 {
		why := "the API server did not deliver them in time"
		if c.failed != nil {
			why = c.failed.Error()
		}
		return otherwise, fmt.Sprintf("How often endpoints change could not be counted (%s), %g a second are assumed: %s",
			why, otherwise, own)
	}
	perSecond = float64(c.changes) / elapsed.Seconds()
	return perSecond, fmt.Sprintf("Endpoints changed %d times in the %v that this took, %.2g times a second: %s",
		c.changes, elapsed.Round(time.Second), perSecond, own)
}
