package mode

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/netip"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// ServicePlane is what a service plane must be.
type ServicePlane[K dataplane.Key, V comparable] interface {
	dataplane.Plane[model.ServicePart, K, V]
	dataplane.Cleaner
	io.Closer
}

// Plane is an open plane of a mode: its loop, and what it counts. Changes are those of the whole node.
type Plane struct {
	reconcile.Runner[model.ServicePart]
	Name   string
	Serves func(*model.Frontend) bool // the frontends that it is given; nil: all
	Impl   any                        // the dataplane.Plane
}

// opener makes a plane for the calling thread's network namespace.
type opener struct {
	name   string
	kind   string // the name, without the variant where it is one of several
	batch  int
	open   func(*slog.Logger) (*Plane, error)
	drains bool // the plane is a dataplane.Drainer
}

// opens returns the opener of a plane that has those capabilities and is given the frontends that it takes, nil for
// all.
func opens[K dataplane.Key, V comparable, P ServicePlane[K, V]](c model.Capabilities, open func() (P, error),
	matches func(*model.Frontend) bool) opener {
	_, drains := any(*new(P)).(dataplane.Drainer)
	return opener{c.Name, c.Name, c.Batch, func(log *slog.Logger) (*Plane, error) {
		p, err := open()
		if err != nil {
			return nil, err
		}
		log = log.With("plane", c.Name)
		if w, ok := any(p).(warner); ok {
			w.OnWarning(func(text string) { log.Warn(text) })
		}
		l := reconcile.New(p, reconcile.Options[model.ServicePart]{Owner: model.OwnerOf, Label: model.LabelOf, Base: isNode,
			Weight: weigh, Log: log, MaxFacts: c.Batch})
		run := reconcile.Runner[model.ServicePart](l)
		if d, ok := any(p).(deviceUser); ok && d.UsesDevices() {
			if run, err = withLinks(run, log); err != nil {
				return nil, errors.Join(err, p.Close())
			}
		}
		return &Plane{&partial{Runner: run, Share: Share{Serves: matches}}, c.Name, matches, p}, nil
	}, drains}
}

// isNode reports whether a part is what all others of a plane need.
func isNode(p model.ServicePart) bool {
	_, is := p.(*model.ServiceNode)
	return is
}

// weigh returns about how much of a plane a part takes: an entry of a map for each frontend, backend, and entry of
// Maglev's table.
func weigh(p model.ServicePart) int {
	switch v := p.(type) {
	case *model.Pool:
		if n := len(v.Backends); v.Scheduler != model.Maglev {
			return n
		} else if v.Entries > 0 {
			return v.Entries
		} else {
			return 100 * n
		}
	case *model.Frontend:
		return 1 + len(v.Sources)
	case *model.ClusterIP:
		return 1
	}
	return 0
}

// Open opens the mode's planes for the calling thread's network namespace. Each is the fallback of the next.
func (m Mode) Open(log *slog.Logger) (l []*Plane, err error) {
	for _, o := range m.planes {
		p, err := o.open(log)
		if err != nil {
			for _, open := range l {
				err = errors.Join(err, open.Close())
			}
			return nil, err
		}
		l = append(l, p)
	}
	return l, nil
}

// limited is a plane that is given what stands in for schedulers that it doesn't have.
type limited[K dataplane.Key, V comparable] struct {
	ServicePlane[K, V]
	schedulers model.Schedulers
}

// Render implements dataplane.Plane.
func (l limited[K, V]) Render(p model.ServicePart) []dataplane.Fact[K, V] {
	return l.ServicePlane.Render(service.Within(l.schedulers, p))
}

// within limits a plane; one that watches still does.
func within[K dataplane.Key, V comparable](p ServicePlane[K, V], s model.Schedulers) ServicePlane[K, V] {
	l := limited[K, V]{p, s}
	if w, ok := p.(dataplane.Watcher); ok {
		return struct {
			limited[K, V]
			dataplane.Watcher
		}{l, w}
	}
	return l
}

// warner is a plane that reports what its operator should know and no fact says. Its reports come at any time.
type warner interface {
	OnWarning(report func(text string))
}

// Counts returns what became of pools' clients, by the pools' IDs; nil where the plane counts nothing. As all that
// follow, it may be called at any time.
func (p *Plane) Counts() (map[uint64]service.Count, error) {
	if c, ok := p.Impl.(interface {
		Counts() (map[uint64]service.Count, error)
	}); ok {
		return c.Counts()
	}
	return nil, nil
}

// Packets returns what became of packets at the node's devices; nil where the plane serves none there.
func (p *Plane) Packets() ([]service.Outcome, error) {
	if c, ok := p.Impl.(interface {
		Packets() ([]service.Outcome, error)
	}); ok {
		return c.Packets()
	}
	return nil, nil
}

// FastPath returns whether packets to pods bypass the host stack; nil where the plane has no programs at devices.
func (p *Plane) FastPath() (*service.FastPath, error) {
	if c, ok := p.Impl.(interface {
		FastPath() (*service.FastPath, error)
	}); ok {
		return c.FastPath()
	}
	return nil, nil
}

// Restrict has a plane that connects clients itself connect them only to endpoints for which allow reports true, and
// reports whether the plane is one.
func (p *Plane) Restrict(allow func(p model.Protocol, client, endpoint netip.AddrPort) bool) bool {
	r, ok := p.Impl.(interface {
		Restrict(func(p model.Protocol, client, endpoint netip.AddrPort) bool)
	})
	if ok {
		r.Restrict(allow)
	}
	return ok
}

// Cut has a plane that connects clients itself end the connections for which denied reports true.
func (p *Plane) Cut(denied func(p model.Protocol, client, endpoint netip.AddrPort) bool) {
	if c, ok := p.Impl.(interface {
		Cut(func(p model.Protocol, client, endpoint netip.AddrPort) bool)
	}); ok {
		c.Cut(denied)
	}
}

// Rejections returns how many connections the plane rejected beyond a limit; nil where it has none.
func (p *Plane) Rejections() *service.Rejections {
	if c, ok := p.Impl.(interface{ Refused() service.Rejections }); ok {
		r := c.Refused()
		return &r
	}
	return nil
}

// RuleCounts returns what the plane's rules counted; nil where they count nothing.
func (p *Plane) RuleCounts() (*service.RuleCounts, error) {
	if c, ok := p.Impl.(interface {
		Counted() (*service.RuleCounts, error)
	}); ok {
		return c.Counted()
	}
	return nil, nil
}

// Affinity returns how much of its capacity for session affinity the plane uses; nil where it has no limit.
func (p *Plane) Affinity() ([]service.AffinityUse, error) {
	if c, ok := p.Impl.(interface {
		Affinity() ([]service.AffinityUse, error)
	}); ok {
		return c.Affinity()
	}
	return nil, nil
}

// audit adds to a what the plane holds against what it was given.
func (p *Plane) audit(ctx context.Context, a *Audit) error {
	plan, err := p.Plan(ctx)
	if err != nil {
		return err
	}
	counts, err := p.Counts()
	if err != nil {
		return err
	}
	a.addCounts(counts)
	if packets, err := p.Packets(); err != nil {
		return err
	} else if packets != nil {
		a.Packets = packets
	}
	if path, err := p.FastPath(); err != nil {
		return err
	} else if path != nil {
		a.FastPath = path
	}
	a.Put, a.Del = append(a.Put, plan.Put...), append(a.Del, plan.Del...)
	a.Wanted += plan.Held + len(plan.Put)
	a.Held += plan.Held + len(plan.Del)
	a.plans = append(a.plans, plan)
	return nil
}

// FailureMetric is a metric of kube-proxy that counts a plane's failures.
type FailureMetric struct{ Name, Help string }

var (
	restoreFailures = FailureMetric{"kubeproxy_sync_proxy_rules_iptables_restore_failures_total",
		"Failed iptables-restore runs; each counts for both families."}
	transactionFailures = FailureMetric{"kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
		"Failed transactions; each counts for both families."}
)

// FailureMetrics are kube-proxy's metrics of failures by the planes' names.
var FailureMetrics = map[string]FailureMetric{
	"iptables": restoreFailures, "iptables-legacy": restoreFailures, "iptables-nft": restoreFailures,
	"nftables": transactionFailures,
}
