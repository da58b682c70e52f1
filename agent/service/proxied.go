package service

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// proxied evaluates policies for connections that a mode's plane proxies itself: no hook of the kernel sees both the
// client and the endpoint.
type proxied struct {
	planes  []*mode.Plane // that proxy connections
	changed chan struct{} // holds one when policies changed

	mu    sync.RWMutex
	now   *model.Policies
	local map[*model.Pool]struct{} // those with endpoints on this node
}

// restrict has the planes that proxy connections evaluate policies, and returns what does that; nil where there is no
// such plane.
func (s *Planes) restrict() *proxied {
	c := &proxied{changed: make(chan struct{}, 1), now: model.NewPolicies(), local: map[*model.Pool]struct{}{}}
	for _, p := range s.planes {
		if p.Restrict(c.allows) {
			c.planes = append(c.planes, p)
		}
	}
	if c.planes == nil {
		return nil
	}
	return c
}

// run has connections cut that a change of policies denies, until ctx ends.
func (c *proxied) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.changed:
		}
		c.mu.RLock()
		cuts := c.now.Node.CutMark != 0
		c.mu.RUnlock()
		for _, p := range c.planes {
			if cuts {
				p.Cut(c.denies)
			}
		}
	}
}

// denies reports whether policies deny an open connection of a client to an endpoint.
func (c *proxied) denies(p model.Protocol, client, endpoint netip.AddrPort) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return verdict.Denied(c.now, verdict.Packet{Src: client, Dst: endpoint, Protocol: p})
}

// allows reports whether policies let a client connect to an endpoint, as far as either is a pod of this node.
func (c *proxied) allows(p model.Protocol, client, endpoint netip.AddrPort) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return verdict.Policy(c.now, verdict.Packet{Src: client, Dst: endpoint, Protocol: p}).Verdict != model.VerdictDrop
}

// change records what changed.
func (c *proxied) change(services model.Change[model.ServicePart], policies model.Change[model.PolicyPart]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now.Apply(policies)
	if !policies.Empty() {
		select {
		case c.changed <- struct{}{}:
		default: // what waits already will do
		}
	}
	for _, x := range services.Del {
		if pool, ok := x.(*model.Pool); ok {
			delete(c.local, pool)
		}
	}
	for _, x := range services.Put {
		pool, ok := x.(*model.Pool)
		if ok && slices.ContainsFunc(pool.Backends, func(b model.Backend) bool { return b.Local }) {
			c.local[pool] = struct{}{}
		}
	}
}

// problems returns the problem that policies isolate endpoints of Services which clients on other nodes reach from
// those nodes' addresses.
func (c *proxied) problems(node string) []source.Problem {
	c.mu.RLock()
	defer c.mu.RUnlock()
	isolated := map[string]struct{}{}
	for pool := range c.local {
		for _, b := range pool.Backends {
			s := c.now.Subjects[b.Addr.Addr()]
			if b.Local && s != nil && s.In != [model.PolicyStages]*model.Ruleset{} {
				isolated[pool.Owner.String()] = struct{}{}
			}
		}
	}
	if len(isolated) == 0 {
		return nil
	}
	names := slices.Sorted(maps.Keys(isolated))
	text := strings.Join(names[:min(3, len(names))], ", ")
	if n := len(names) - 3; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return []source.Problem{{Object: source.Key{Kind: source.Node, Name: node}, Reason: "PoliciesSeeNodes",
		Message: fmt.Sprintf("policies decide about ingress of this node's endpoints of %s, and clients on other nodes, "+
			"whose agents connect for them (mode userspace), come from the addresses of those nodes: rules by selector of "+
			"pods don't match them; choose another mode, or allow the nodes' addresses", text)}}
}
