package iptables

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/ipset"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/model"
)

// Variant is which of the two sets of iptables' commands is used.
type Variant = iptables.Variant

// The variants.
const (
	Legacy = iptables.Legacy
	NFT    = iptables.NFT
)

// Plane writes facts into one network namespace, of what a Join returns. It implements
// dataplane.Plane[model.PolicyPart, Key, string], dataplane.Joiner, dataplane.Watcher and dataplane.Cleaner.
type Plane struct {
	conn *iptables.Conn
	sets *ipset.Conn

	hasDevices func() error // returns why the kernel has no sets of prefixes by a device, nil if it has; called once

	mu   sync.Mutex
	held map[iptables.Family]*held // what the kernel holds; nil: not known
}

var (
	_ dataplane.Plane[model.PolicyPart, Key, string] = (*Plane)(nil)
	_ dataplane.Joiner[model.PolicyPart]             = (*Plane)(nil)
	_ dataplane.Watcher                              = (*Plane)(nil)
	_ dataplane.Cleaner                              = (*Plane)(nil)
)

// New opens the plane of the calling thread's network namespace, with the variant that is in use there.
func New() (*Plane, error) {
	v, err := iptables.Probe(context.Background(), Prefix)
	if err != nil {
		return nil, err
	}
	return NewVariant(v)
}

// NewVariant opens the plane of the calling thread's network namespace with a chosen variant.
func NewVariant(v Variant) (*Plane, error) {
	conn, err := iptables.Open(v, Prefix, filter)
	if err != nil {
		return nil, err
	}
	sets, err := ipset.Open()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &Plane{conn: conn, sets: sets, hasDevices: sync.OnceValue(sets.HasDevices),
		held: map[iptables.Family]*held{}}, nil
}

// Variant returns the variant in use.
func (p *Plane) Variant() Variant { return p.conn.Variant }

// Close closes the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error { return errors.Join(p.sets.Close(), p.conn.Close()) }

// Join implements dataplane.Joiner.
func (p *Plane) Join() func(put, del []model.PolicyPart) (puts, dels []model.PolicyPart) {
	var j Join
	return func(put, del []model.PolicyPart) (puts, dels []model.PolicyPart) {
		c := j.Apply(model.Change[model.PolicyPart]{Put: put, Del: del})
		return c.Put, c.Del
	}
}

// period is how often the sets are counted: the kernel has no event for their changes.
const period = 5 * time.Second

// Watch implements dataplane.Watcher: chains as iptables.Conn.Watch does, sets by how many elements they have.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	chains, err := p.conn.Watch(ctx)
	if err != nil {
		return nil, err
	}
	changes := make(chan struct{}, 1)
	go func() {
		defer close(changes)
		tick := time.NewTicker(period)
		defer tick.Stop()
		for changed, open := p.counted(), true; ; {
			if changed {
				netlink.Signal(changes)
			}
			select {
			case _, open = <-chains:
				if changed = true; !open {
					return
				}
			case <-tick.C:
				changed = p.counted()
			}
		}
	}()
	return changes, nil
}

// counted reports whether a set has another number of elements than it should, or can't be counted.
func (p *Plane) counted() (changed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for f, h := range p.held {
		counts, err := p.sets.Counts(setPrefix(f))
		if err != nil || !maps.Equal(counts, h.counts) {
			return true
		}
	}
	return false
}

// Read implements dataplane.Plane. A family that can't be read, while the other can, has no facts: a Write of them says
// why.
func (p *Plane) Read(ctx context.Context) ([]Fact, error) {
	facts, failed := p.read(ctx)
	if len(failed) > 0 && (ctx.Err() != nil || len(failed) == len(p.conn.Families)) {
		return nil, errors.Join(failed...)
	}
	return facts, nil
}

// read returns the facts of the families that can be read, and what is wrong with the others.
func (p *Plane) read(ctx context.Context) (facts []Fact, failed []error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.conn.Mark(); err != nil {
		return nil, []error{err, err}
	}
	for _, f := range p.conn.Families {
		l, err := p.load(ctx, f)
		if err != nil {
			failed = append(failed, err)
		}
		facts = append(facts, l...)
	}
	return facts, failed
}

// Clean implements dataplane.Cleaner, for both variants where they are installed.
func (p *Plane) Clean(ctx context.Context) error {
	other := NFT
	if p.Variant() == NFT {
		other = Legacy
	}
	var q *Plane
	opened := p.conn.Do(func() (err error) {
		q, err = NewVariant(other)
		return err
	})
	if opened == nil { // else nothing of ours can be there: not installed, or not in this kernel
		defer q.Close()
		if err := q.clean(ctx); err != nil {
			return err
		}
	}
	if err := p.clean(ctx); err != nil {
		return err
	}
	return p.conn.Do(func() error {
		return errors.Join(ipset.Destroy(setPrefix(iptables.IPv4)), ipset.Destroy(setPrefix(iptables.IPv6)))
	})
}

// clean removes the chains of the plane's variant, as far as it can be read.
func (p *Plane) clean(ctx context.Context) error {
	facts, failed := p.read(ctx)
	var chains []Fact
	for _, f := range facts {
		if f.Key.Kind != KindSet && f.Key.Kind != KindElement {
			chains = append(chains, f)
		}
	}
	return errors.Join(append(failed, p.Write(ctx, nil, chains))...)
}
