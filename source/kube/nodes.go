package kube

import (
	"context"
	"slices"
	"sync"

	"fairlead.dev/fairlead/source"
)

// widening is the step from this node's Node to all Nodes. Each kubelet's report of its status goes to every agent that
// watches all Nodes: that is most of what an agent receives in a large cluster, and few objects need it.
type widening struct {
	needed func(source.Object) bool // Options.NeedsNodes; nil once one has come
	begin  chan struct{}            // closed then
	wide   bool                     // all Nodes are asked for
}

// see takes in an object that comes.
func (w *widening) see(o source.Object) {
	if o != nil && w.needed != nil && w.needed(o) {
		w.need()
	}
}

func (w *widening) need() {
	if w.needed != nil {
		w.needed = nil
		close(w.begin)
	}
}

// waits reports whether an object has come that needs all Nodes, which are not asked for yet.
func (w *widening) waits() bool {
	select {
	case <-w.begin:
		return !w.wide
	default:
		return false
	}
}

// waitsForNodes reports whether nothing may be delivered until all Nodes are listed: an object that needs them is among
// it. n.mu is held.
func (n *updates) waitsForNodes() bool {
	return n.nodes.waits() || n.nodes.wide && slices.Contains(n.missing(false), source.Node)
}

// widen begins to wait for all Nodes.
func (n *updates) widen() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.nodes.wide, n.listed[source.Node] = true, false
}

// runNodes follows what run follows, and all Nodes from the first object on that needs them.
func (s *stream) runNodes(ctx context.Context) {
	own, stop := context.WithCancel(ctx)
	defer stop()
	var running sync.WaitGroup
	running.Go(func() { s.run(own) })
	select {
	case <-ctx.Done():
	case <-s.nodes.begin:
	}
	stop()
	running.Wait()
	if ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	s.incoming = nil // the reflector doesn't wait for a list that it cancelled
	s.mu.Unlock()
	s.widen()
	r := s.resource
	r.field = ""
	all := newStream(r, s.client, s.updates, s.words, s.budget)
	all.pause = s.pause
	all.run(ctx)
}
