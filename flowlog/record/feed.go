package record

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/kernel/conntrack"
)

// connection is connections between two ends, as policies see them: behind the translation of the destination, before
// that of the source.
type connection struct {
	client, server netip.AddrPort
	protocol       uint8
	count          uint64 // 0: one that is open, and may have been counted when it was new
	denied         bool   // by policies of this node
	unclear        bool   // which end is the client
}

// feed is what reports connections of a network namespace.
type feed interface {
	// established calls add with those that are open; with closing, also those that end or have ended.
	established(closing bool, add func(connection)) error
	// run calls add with new ones until ctx ends, and lost where it knows that some are missing.
	run(ctx context.Context, add func(connection), lost func()) error
	// lost returns how many are missing.
	lost() (uint64, error)
	close() error
}

// tracking is the kernel's connection tracking as a feed.
type tracking struct {
	events *conntrack.Events
	marker *conntrack.Conn // reads the table
}

func openTracking() (t *tracking, err error) {
	t = &tracking{}
	if t.events, err = conntrack.Listen(eventBuffer); err != nil {
		return nil, err
	}
	if t.marker, err = conntrack.Open(); err != nil {
		return nil, errors.Join(err, t.events.Close())
	}
	return t, nil
}

func (t *tracking) established(closing bool, add func(connection)) error {
	return t.marker.Each(func(c conntrack.Tracked) {
		if closing || !c.Closing {
			add(tracked(c, 0))
		}
	})
}

func (t *tracking) run(ctx context.Context, add func(connection), lost func()) error {
	return t.events.Run(ctx, func(c conntrack.Tracked) { add(tracked(c, 1)) }, lost)
}

func (t *tracking) lost() (uint64, error) { return t.events.Lost() }

func (t *tracking) close() error {
	t.marker.Close()
	return t.events.Close()
}

// tracked returns a connection as connection tracking has it. Of one that is older than connection tracking the first
// packet is not known: the end with the lower port is taken for the server, and unclear is set where that doesn't say.
func tracked(c conntrack.Tracked, count uint64) connection {
	x := connection{client: c.Source, server: c.ReplySource, protocol: c.Protocol, count: count}
	const ephemeral = 32768 // and above (ip_local_port_range)
	switch low, high := min(x.client.Port(), x.server.Port()), max(x.client.Port(), x.server.Port()); {
	case !c.Midstream:
	case low >= ephemeral || high < ephemeral:
		x.unclear = true
	case x.client.Port() == low:
		x.client, x.server = x.server, x.client
	}
	return x
}

// engine is the policy engine ebpf as a feed: its program counts connections.
type engine struct{ *policy.Recorder }

// The engine counts connections for renewal, unless that is renewed; they are read in intervals.
const (
	renewal = 5 * time.Second
	reading = time.Second
)

// openEngine begins to count connections. Where the engine doesn't evaluate policies the error is fs.ErrNotExist.
func openEngine() (engine, error) {
	r, err := policy.OpenRecorder()
	if err != nil {
		return engine{}, err
	}
	if err := r.Renew(renewal); err != nil {
		return engine{}, errors.Join(err, r.Close())
	}
	return engine{r}, nil
}

func flow(f policy.Recorded) connection {
	return connection{client: netip.AddrPortFrom(f.Client, 0), server: f.Server, protocol: f.Protocol, count: f.Count,
		denied: f.Denied}
}

func (e engine) established(_ bool, add func(connection)) error {
	return e.Established(func(f policy.Recorded) { add(flow(f)) })
}

func (e engine) run(ctx context.Context, add func(connection), lost func()) error {
	every := time.NewTicker(reading)
	defer every.Stop()
	for missing := uint64(0); ; {
		select {
		case <-ctx.Done():
			return errors.Join(e.End(), e.Read(func(f policy.Recorded) { add(flow(f)) }))
		case <-every.C:
		}
		renewed := e.Renew(renewal)
		if errors.Is(renewed, fs.ErrNotExist) {
			renewed = errors.New("the policy engine ebpf stopped evaluating policies here, and so counts no connections: " +
				"the last policy was deleted, or the agent was replaced or has another engine: record again")
		}
		if err := errors.Join(renewed, e.Read(func(f policy.Recorded) { add(flow(f)) })); err != nil {
			return err
		}
		n, err := e.Lost()
		if err != nil {
			return err
		}
		if n > missing {
			missing = n
			lost()
		}
	}
}

func (e engine) lost() (uint64, error) { return e.Lost() }

func (e engine) close() error { return e.Close() }
