// Package record records which pods open connections to which: each new connection of this node's pods, counted by
// client, server and port. It decides nothing, and is bounded in memory and on disk.
//
// Where the policy engine ebpf is at work its program counts them, those that policies deny on their own. Elsewhere
// connection tracking's events report them: a connection counts once its first packet has passed every rule of this
// node, so that what policies deny is not recorded. Those that were open before are found in either's table.
package record

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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
	Track   bool          // from connection tracking, which is switched on while recording where it is off
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
	feed
	conns *conntrack.Conn // reads the node's addresses
	names names
	start time.Time

	mu    sync.Mutex
	table table
}

// Run records in the calling thread's network namespace until ctx ends, and returns what Write was called with last.
func Run(ctx context.Context, o Options) (file *flowlog.File, err error) {
	feed, undo, warning, err := open(o.Track)
	if err != nil {
		return nil, fmt.Errorf("record flows: %w", err)
	}
	defer func() { err = errors.Join(err, feed.close(), undo()) }()
	r := &recorder{Options: o, feed: feed, start: time.Now(), names: names{node: o.Node}}
	r.table = newTable(&r.names, o.Entries, o.PerPod)
	if r.conns, err = conntrack.Open(); err != nil {
		return nil, fmt.Errorf("record flows: %w", err)
	}
	defer r.conns.Close()
	if err := r.record(ctx, warning); err != nil {
		return nil, fmt.Errorf("record flows: %w", err)
	}
	return r.write()
}

// open opens what reports connections of the calling thread's network namespace. It returns what undoes that, and a
// warning where something is left out.
func open(track bool) (f feed, undo func() error, warning string, err error) {
	undo = func() error { return nil }
	if !track {
		e, err := openEngine()
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return e, undo, "", err
		}
	}
	if undo, warning, err = prepare(track); err != nil {
		return nil, undo, "", err
	}
	if f, err = openTracking(); err != nil {
		return nil, undo, "", errors.Join(err, undo())
	}
	return f, undo, warning, nil
}

// add records a connection.
func (r *recorder) add(c connection) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.table.add(c)
}

// record records until ctx ends, or until one of its parts can't go on.
func (r *recorder) record(ctx context.Context, warning string) error {
	var parts sync.WaitGroup
	defer parts.Wait()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	known, once := make(chan struct{}), sync.Once{}
	parts.Go(func() {
		err := r.Source.Run(ctx, func(b source.Batch) {
			r.names.apply(b.Changes)
			if !b.Waiting && len(b.Unlisted) == 0 {
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
	if err := r.established(false, r.add); err != nil {
		return err
	}
	r.Ready(warning)
	parts.Go(func() { r.writeOften(ctx, stop) })
	lost := false
	err := r.run(ctx, func(c connection) {
		if lost {
			lost = false
			if err := r.established(true, r.add); err != nil { // of those that were lost, many are still in the table
				stop(err)
			}
		}
		r.add(c)
	}, func() { lost = true })
	stop(err)
	parts.Wait()
	if err = cause(ctx); err != nil { // the file has what was recorded until then
		_, failed := r.write()
		err = errors.Join(err, failed)
	}
	return err
}

// cause returns why a recording can't go on, nil where it just ends.
func cause(ctx context.Context) error {
	err := context.Cause(ctx)
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
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
	lost, err := r.lost()
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	f := r.table.file()
	r.mu.Unlock()
	f.Node, f.Start, f.End, f.Lost = r.Node, r.start.UTC(), time.Now().UTC(), lost
	return f, r.Write(f)
}
