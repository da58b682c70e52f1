package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Cold is what a cold sync took: from the start of the program to the end of its first sync.
type Cold struct {
	Wall  time.Duration
	Sync  time.Duration // of that, within the sync: all was known, the kernel had to be told; as the program says itself
	Usage               // until then
}

// ColdSync starts a kube-proxy and waits until its first sync has ended. The Proxy is the caller's to stop.
func ColdSync(ctx context.Context, o Options) (p *Proxy, c Cold, err error) {
	if p, err = Start(ctx, o); err != nil {
		return nil, c, err
	}
	done, err := p.Ready(ctx)
	if err == nil {
		c.Wall = done.Sub(p.Started)
		c.Usage, err = p.Usage()
	}
	if err == nil {
		var m Metrics
		m, err = p.Synced(ctx, 1)
		c.Sync = m.Syncs.Sum
	}
	if err != nil {
		return nil, c, errors.Join(err, p.Stop())
	}
	return p, c, nil
}

// Synced waits until so many syncs have ended, and returns the metrics then. A sync is counted a moment after it is
// done.
func (p *Proxy) Synced(ctx context.Context, syncs uint64) (Metrics, error) {
	for {
		m, err := p.Metrics(ctx)
		switch {
		case err != nil:
			return m, err
		case m.Failures > 0:
			return m, fmt.Errorf("%s failed %g times to tell the kernel: %s", p, m.Failures, p.last())
		case m.Syncs.Count >= syncs:
			return m, nil
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return m, fmt.Errorf("wait until %s has synced %d times: %w: it has %d times", p, syncs, ctx.Err(), m.Syncs.Count)
		}
	}
}
