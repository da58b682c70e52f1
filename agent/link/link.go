// Package link is the source of the node's network devices: a part for each, changed by the kernel's events.
package link

import (
	"context"
	"errors"
	"time"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
)

// Source lists and watches the devices of a network namespace.
type Source struct {
	ns   *netns.Namespace
	conn *link.Conn
	held map[int]*model.Link // parts by index
}

// Open returns the source of the calling thread's network namespace.
func Open() (*Source, error) {
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	conn, err := link.Dial(ns)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return &Source{ns: ns, conn: conn, held: map[int]*model.Link{}}, nil
}

// Close closes the source.
func (s *Source) Close() error {
	s.conn.Close()
	return s.ns.Close()
}

// Update returns what has changed since the last call: at first, all devices.
func (s *Source) Update() (put, del []model.ServicePart, err error) {
	all, err := s.conn.Devices()
	if err != nil {
		return nil, nil, err
	}
	var now []model.Link
	for _, d := range all {
		now = append(now, model.Link{Index: d.Index, Name: d.Name, Loopback: d.Loopback})
	}
	put, del = s.update(now)
	return put, del, nil
}

func (s *Source) update(now []model.Link) (put, del []model.ServicePart) {
	seen := map[int]bool{}
	for _, l := range now {
		seen[l.Index] = true
		was := s.held[l.Index]
		if was != nil && *was == l {
			continue
		}
		if s.held[l.Index], put = &l, append(put, &l); was != nil {
			del = append(del, was)
		}
	}
	for i, was := range s.held {
		if !seen[i] {
			delete(s.held, i)
			del = append(del, was)
		}
	}
	return put, del
}

// Run calls change with each change until ctx ends. report is called with the error where devices can't be listed; it
// goes on then.
func (s *Source) Run(ctx context.Context, change func(put, del []model.ServicePart), report func(error)) error {
	events, err := link.WatchDevices(ctx, s.ns, link.Renamed())
	if err != nil {
		return err
	}
	for more := true; more; { // at first, what changed before it watched
		put, del, err := s.Update()
		if len(put)+len(del) > 0 {
			change(put, del)
		}
		var again <-chan time.Time
		if err != nil {
			report(err)
			again = time.After(retry)
		}
		select {
		case _, more = <-events:
		case <-again:
		}
	}
	return ctx.Err()
}

// retry is when devices that could not be listed are listed again.
const retry = time.Second
