// Package record records which pods open connections to which: each new connection of this node's pods, from connection
// tracking's events, counted by client, server and port. It decides nothing, and is bounded in memory and on disk.
//
// A connection counts once its first packet has passed every rule of this node, so that what policies of this node deny
// is not recorded. Those that were open before are found in the table.
package record

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/source"
)

// Options are what is recorded, and where it goes.
type Options struct {
	Node    string        // name of this node
	Source  source.Source // of Nodes and Pods
	Entries int           // the most flows that are recorded
	PerPod  int           // the most flows of one pod of this node
	Track   bool          // switch connection tracking on while recording, where it is off
	// called with what was recorded so far, once a minute and at the end
	Write func(*flowlog.File) error
	// called when recording has begun, with what is left out, "" if nothing is
	Ready func(warning string)
}

// eventBuffer is for events of some 60,000 connections.
const eventBuffer = 64 << 20

const (
	interval = time.Minute // between two writes
	firstly  = time.Minute // to wait for the objects
)

// recorder is one recording.
type recorder struct {
	Options
	events *conntrack.Events
	conns  *conntrack.Conn
	marker *conntrack.Marker // reads the table
	names  names
	start  time.Time

	mu    sync.Mutex
	table table
}

// Run records in the calling thread's network namespace until ctx ends, and returns what Write was called with last.
func Run(ctx context.Context, o Options) (file *flowlog.File, err error) {
	undo, warning, err := prepare(o.Track)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, undo()) }()
	r := &recorder{Options: o, start: time.Now(), names: names{node: o.Node}}
	r.table = newTable(&r.names, o.Entries, o.PerPod)
	if err := r.open(); err != nil {
		return nil, fmt.Errorf("record flows: %w", err)
	}
	defer r.close()
	if err := r.record(ctx, warning); err != nil {
		return nil, fmt.Errorf("record flows: %w", err)
	}
	return r.write()
}

func (r *recorder) open() (err error) {
	if r.events, err = conntrack.Listen(eventBuffer); err != nil {
		return err
	}
	if r.conns, err = conntrack.Open(); err == nil {
		r.marker, err = conntrack.OpenMarker()
	}
	if err != nil {
		r.close()
	}
	return err
}

func (r *recorder) close() {
	r.events.Close()
	if r.conns != nil {
		r.conns.Close()
	}
	if r.marker != nil {
		r.marker.Close()
	}
}

// record records until ctx ends, or until one of its parts can't go on.
func (r *recorder) record(ctx context.Context, warning string) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var parts sync.WaitGroup
	defer parts.Wait()
	known, once := make(chan struct{}), sync.Once{}
	parts.Go(func() {
		err := r.Source.Run(ctx, func(b source.Batch) {
			r.names.apply(b.Changes)
			if !b.Waiting {
				once.Do(func() { close(known) })
			}
		})
		if err != nil && ctx.Err() == nil {
			stop(err)
		}
	})
	select {
	case <-known:
	case <-ctx.Done():
		return cause(ctx)
	case <-time.After(firstly):
		stop(errors.New("the source has not delivered the pods within a minute: see its address and rights"))
		return cause(ctx)
	}
	if err := r.addresses(); err != nil {
		return err
	}
	if err := r.existing(false); err != nil {
		return err
	}
	r.Ready(warning)
	parts.Go(func() { r.writeOften(ctx, stop) })
	lost := false
	err := r.events.Run(ctx, func(t conntrack.Tracked) {
		if lost {
			lost = false
			if err := r.existing(true); err != nil { // of those that were lost, many are still in the table
				stop(err)
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.table.add(t, true)
	}, func() { lost = true })
	return errors.Join(err, cause(ctx))
}

// cause returns why a recording can't go on, nil where it just ends.
func cause(ctx context.Context) error {
	err := context.Cause(ctx)
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// existing adds the flows of connections that are in the table now, those that aren't known yet: those of TCP that end
// or have ended only if closed.
func (r *recorder) existing(closed bool) error {
	return r.marker.Each(func(t conntrack.Tracked) {
		if t.Closing && !closed {
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.table.add(t, false)
	})
}

// addresses reads the node's own addresses.
func (r *recorder) addresses() error {
	own, err := r.conns.Addresses()
	if err == nil {
		r.names.setOwn(own)
	}
	return err
}

// writeOften writes the file until ctx ends.
func (r *recorder) writeOften(ctx context.Context, stop func(error)) {
	every := time.NewTicker(interval)
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
		err := r.addresses()
		if err == nil {
			_, err = r.write()
		}
		if err != nil {
			stop(err)
		}
	}
}

// write writes what was recorded so far.
func (r *recorder) write() (*flowlog.File, error) {
	lost, err := r.events.Lost()
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	f := r.table.file()
	r.mu.Unlock()
	f.Node, f.Start, f.End, f.Lost = r.Node, r.start.UTC(), time.Now().UTC(), lost
	return f, r.Write(f)
}
