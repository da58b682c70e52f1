package userspace

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	"fairlead.dev/fairlead/dataplane/service"
)

// Shares of the file descriptors that all connections and flows may have together: one frontend, one client address,
// and all of the node's own addresses. The last is larger since a Service that leads to itself has the node as its
// client.
const (
	frontendShare = 4
	clientShare   = 8
	nodeShare     = 2
)

// reportEvery is the shortest time between two reports of a bound.
const reportEvery = time.Minute

// bounds keeps frontends and clients within their shares. It may be used by several goroutines.
type bounds struct {
	frontend, client, node int64 // the most that each may have

	mu       sync.Mutex // guards what follows, and claimed of fronts
	clients  map[netip.Addr]int64
	refused  service.Rejections
	report   func(text string) // nil: not reported
	reported time.Time
}

// set derives the shares from the limit of all.
func (b *bounds) set(limit int64) {
	b.frontend, b.client, b.node = limit/frontendShare, limit/clientShare, limit/nodeShare
	b.clients = map[netip.Addr]int64{}
}

// claim is what a connection or a flow has of its frontend's and its client's share.
type claim struct {
	client netip.Addr // zero: the node's own addresses
	n      int64
}

// claim counts n file descriptors for a client of a front. It reports whether both have so many left; if not, it counts
// nothing.
func (b *bounds) claim(f *front, from netip.Addr, n int64, now time.Time) (claim, bool) {
	c, most := claim{from, n}, b.client
	if f.plane.view.Load().own[from] || from.IsLoopback() {
		c.client, most = netip.Addr{}, b.node
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case f.claimed+n > b.frontend:
		b.refused.Frontend++
		b.warn(now, "frontend %s has the most file descriptors that one may have, %d: further connections are refused",
			f.entry, b.frontend)
		return c, false
	case b.clients[c.client]+n > most:
		b.refused.Client++
		b.warn(now, "client %s of frontend %s has the most file descriptors that one may have, %d: its further "+
			"connections are refused",
			from, f.entry, most)
		return c, false
	}
	f.claimed += n
	b.clients[c.client] += n
	return c, true
}

// release takes back what claim counted.
func (b *bounds) release(f *front, c claim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f.claimed -= c.n
	if b.clients[c.client] -= c.n; b.clients[c.client] <= 0 {
		delete(b.clients, c.client)
	}
}

// warn reports a bound, in a goroutine of its own since loops don't wait, and not too often.
func (b *bounds) warn(now time.Time, format string, args ...any) {
	if b.report == nil || !b.reported.IsZero() && now.Sub(b.reported) < reportEvery {
		return
	}
	b.reported = now
	const more = "; raise the limit of this process (ulimit -n, LimitNOFILE) if they are wanted"
	go b.report("limit reached: " + fmt.Sprintf(format, args...) + more)
}

// Refused returns how many connections and flows were refused for want of a share.
func (p *Plane) Refused() service.Rejections {
	p.bounds.mu.Lock()
	defer p.bounds.mu.Unlock()
	return p.bounds.refused
}

// OnWarning has report called when a frontend or a client has reached its share, at most once a minute.
func (p *Plane) OnWarning(report func(text string)) {
	p.bounds.mu.Lock()
	defer p.bounds.mu.Unlock()
	p.bounds.report = report
}
