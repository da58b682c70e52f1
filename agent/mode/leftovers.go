package mode

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/dataplane/network/masquerade"
	"fairlead.dev/fairlead/dataplane/service/nftables"
)

// Leftovers is what other modes, or a kube-proxy, left in the calling thread's network namespace, and the TCP
// connections that began with it.
type Leftovers struct {
	Mode    Mode
	Engine  string // whose policies stay; "": no engine's
	Log     *slog.Logger
	Entries flows.Entries // ours, of the first batch; nil where the mode needs nothing kept

	Enforced bool // policies are in force: other engines' may go

	cleaned   bool   // what no connection needs is gone
	remaining int    // connections that went on when last counted
	notified  string // the error that was logged last
}

// PreserveConnections has TCP connections go on that the kernel translates by what others left, also once that goes. It
// comes before the mode's first write, which may take the place of another mode's.
func PreserveConnections(m Mode) error {
	if m.Tracks() {
		return nil
	}
	return flows.Preserve(nftables.Table, masquerade.Table, "kube-proxy")
}

// Clean removes what no connection needs, and returns how many need the rest. Modes that share a plane's name, or are
// variants of one, leave each other's.
func (o *Leftovers) Clean(ctx context.Context) (connections int, err error) {
	uses := func(x opener) bool {
		return slices.ContainsFunc(o.Mode.planes, func(p opener) bool { return p.kind == x.kind })
	}
	var errs []error
	for _, m := range All() {
		for _, p := range m.planes {
			if p.name != m.Name || uses(p) || p.name != p.kind || o.cleaned && !p.drains {
				continue
			}
			if l, err := p.open(slog.New(slog.DiscardHandler)); err == nil {
				n, err := l.Drain(ctx)
				connections += n
				errs = append(errs, err, l.Close())
			}
		}
	}
	if !o.cleaned {
		if o.Enforced {
			errs = append(errs, cleanEngines(ctx, o.Engine))
		}
		if o.Mode.MasqueradesAtDevices() {
			errs = append(errs, cleanMasquerade(ctx, true))
		}
	}
	err = errors.Join(errs...)
	o.cleaned = err == nil && o.Enforced
	return connections, err
}

// Recount is how long to wait until the connections that go on are counted again.
const Recount = 30 * time.Second

// Release removes the rest once the connections that need it have ended.
func (o *Leftovers) Release(ctx context.Context) {
	for ctx.Err() == nil {
		n, err := o.Clean(ctx)
		remaining, err2 := flows.Release(o.Entries, o.Mode.MasqueradesAtDevices())
		n, err = n+remaining, errors.Join(err, err2)
		if o.notify(n, err); n == 0 && err == nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(Recount):
		}
	}
}

// notify logs what is new.
func (o *Leftovers) notify(connections int, err error) {
	if err != nil {
		if o.notified != err.Error() {
			o.notified = err.Error()
			o.Log.Warn("removing another mode's rules failed, retrying", "error", err, "retry_in", Recount)
		}
		return
	}
	switch {
	case connections > 0 && o.remaining == 0:
		o.Log.Info("connections of the previous mode continue by its rules", "connections", connections)
	case connections == 0 && o.remaining > 0:
		o.Log.Info("the last connection of the previous mode has ended")
	}
	o.remaining, o.notified = connections, ""
}
