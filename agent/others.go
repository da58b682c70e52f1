package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/model"
)

// others is what other modes, or a kube-proxy, left in the calling thread's network namespace, and the TCP connections that began with it.
type others struct {
	mode    Mode
	log     *slog.Logger
	entries flows.Entries // ours, of the first batch; nil where the mode needs nothing kept

	cleaned bool   // what no connection needs is gone
	kept    int    // connections that went on when last counted
	told    string // the error that was logged last
}

// Tracks reports whether the mode's own rules have the kernel translate TCP connections.
func (m Mode) Tracks() bool {
	return m.Tracked && (m.tracked == nil || m.tracked(&model.Frontend{Entry: model.Entry{Protocol: model.TCP}}))
}

// keepOthers has TCP connections go on that the kernel translates by what others left, also once that goes. It comes before the mode's first
// write, which may take the place of another mode's.
func keepOthers(m Mode) error {
	if m.Tracks() {
		return nil
	}
	return flows.Keep(nftables.Table, "kube-proxy")
}

// clean removes what no connection needs, and gives how many need the rest. Modes that share a plane's name, or are variants of one, leave
// each other's.
func (o *others) clean(ctx context.Context) (connections int, err error) {
	uses := func(name string) bool {
		return slices.ContainsFunc(o.mode.planes, func(p opener) bool { return family(p.name) == family(name) })
	}
	var errs []error
	for _, m := range modes {
		for _, p := range m.planes {
			if p.name != m.Name || uses(p.name) || m.Name != family(m.Name) || o.cleaned && !p.retires {
				continue
			}
			if l, err := p.open(slog.New(slog.DiscardHandler)); err == nil {
				n, err := l.retire(ctx)
				connections += n
				errs = append(errs, err, l.Close())
			}
		}
	}
	err = errors.Join(errs...)
	o.cleaned = err == nil
	return connections, err
}

// family is the name of a plane without its variant.
func family(name string) string {
	name, _, _ = strings.Cut(name, "-")
	return name
}

// recount is how long to wait until the connections that go on are counted again.
const recount = 30 * time.Second

// release removes the rest once the connections that need it have ended.
func (o *others) release(ctx context.Context) {
	for ctx.Err() == nil {
		n, err := o.clean(ctx)
		kept, err2 := flows.Release(o.entries)
		n, err = n+kept, errors.Join(err, err2)
		if o.tell(n, err); n == 0 && err == nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(recount):
		}
	}
}

// tell logs what is new.
func (o *others) tell(connections int, err error) {
	if err != nil {
		if o.told != err.Error() {
			o.told = err.Error()
			o.log.Warn("removing another mode's rules failed, retrying", "error", err, "retry_in", recount)
		}
		return
	}
	switch {
	case connections > 0 && o.kept == 0:
		o.log.Info("connections of the previous mode go on as they began", "connections", connections)
	case connections == 0 && o.kept > 0:
		o.log.Info("the last connection of the previous mode has ended")
	}
	o.kept, o.told = connections, ""
}
