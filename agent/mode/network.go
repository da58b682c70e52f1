package mode

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/netip"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/network/attachment"
	"fairlead.dev/fairlead/dataplane/network/guard"
	"fairlead.dev/fairlead/dataplane/network/masquerade"
	"fairlead.dev/fairlead/dataplane/network/route"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// NetworkPlane is an open plane of the pod network: its loop.
type NetworkPlane struct {
	reconcile.Runner[model.NetworkPart]
	Name    string
	dropped func() (map[string]uint64, error) // nil: it drops nothing
	cut     func(func(netip.Addr) bool) error // nil: it has no flows
}

// NetworkDropped returns how many packets planes have dropped, by reason.
func NetworkDropped(planes []NetworkPlane) (map[string]uint64, error) {
	for _, p := range planes {
		if p.dropped != nil {
			return p.dropped()
		}
	}
	return nil, nil
}

// CutFlows removes the flows that planes hold to and from addresses.
func CutFlows(planes []NetworkPlane, of func(netip.Addr) bool) (err error) {
	for _, p := range planes {
		if p.cut != nil {
			err = errors.Join(err, p.cut(of))
		}
	}
	return err
}

// networkPlane is what a plane of the pod network must be.
type networkPlane[K dataplane.Key, V comparable] interface {
	dataplane.Plane[model.NetworkPart, K, V]
	dataplane.Cleaner
	io.Closer
}

// MasqueradesAtDevices reports whether the mode's programs at devices masquerade what pods send out of the cluster;
// else nf_tables does.
func (m Mode) MasqueradesAtDevices() bool {
	return m.Name == "ebpf" && m.options.PodNetwork && ebpf.Packets()
}

// OpenNetwork opens the planes of the pod network for the calling thread's network namespace. atDevices is
// Mode.MasqueradesAtDevices.
func OpenNetwork(log *slog.Logger, atDevices bool) ([]NetworkPlane, error) {
	routes, err := openNetworkPlane("network-route", log, route.New)
	if err != nil {
		return nil, err
	}
	attachments, err := openNetworkPlane("network-attachment", log, attachment.New)
	if err != nil {
		return nil, errors.Join(err, routes.Close())
	}
	guards, err := openNetworkPlane("network-guard", log, guard.New)
	if err != nil {
		return nil, errors.Join(err, routes.Close(), attachments.Close())
	}
	masquerades, err := openMasquerade(log, atDevices)
	if err != nil {
		return nil, errors.Join(err, routes.Close(), attachments.Close(), guards.Close())
	}
	return []NetworkPlane{routes, attachments, guards, masquerades}, nil
}

// openMasquerade opens the plane that masquerades.
func openMasquerade(log *slog.Logger, atDevices bool) (NetworkPlane, error) {
	if atDevices {
		return openNetworkPlane("network-masquerade", log, masquerade.NewDevice)
	}
	return openNetworkPlane("network-masquerade", log, masquerade.New)
}

// cleanMasquerade removes what the other plane has written, of those that masquerade, once this one has.
func cleanMasquerade(ctx context.Context, atDevices bool) error {
	if !atDevices && !ebpf.Packets() {
		return nil // there never was one
	}
	p, err := openMasquerade(slog.New(slog.DiscardHandler), !atDevices)
	if err != nil {
		return err
	}
	return errors.Join(p.Clean(ctx), p.Close())
}

func openNetworkPlane[K dataplane.Key, V comparable, P networkPlane[K, V]](name string, log *slog.Logger,
	open func() (P, error)) (NetworkPlane, error) {
	p, err := open()
	if err != nil {
		return NetworkPlane{}, err
	}
	isNetwork := func(p model.NetworkPart) bool { _, is := p.(*model.Network); return is }
	plane := NetworkPlane{Runner: reconcile.New(p, reconcile.Options[model.NetworkPart]{Owner: model.NetworkOwner,
		Label: model.NetworkLabel, Base: isNetwork, Log: log.With("plane", name)}), Name: name}
	if d, is := any(p).(interface {
		Dropped() (map[string]uint64, error)
	}); is {
		plane.dropped = d.Dropped
	}
	if c, is := any(p).(interface {
		CutFlows(func(netip.Addr) bool) error
	}); is {
		plane.cut = c.CutFlows
	}
	return plane, nil
}

// PodDiffers returns how a pod's inside, in whose network namespace the calling thread is, isn't as it was made; "": it
// is.
func PodDiffers(a *model.Attachment) (string, error) { return attachment.Differs(a) }

// AttachedPods returns how many pods are connected by the calling thread's network namespace.
func AttachedPods(ctx context.Context) (pods int, err error) {
	p, err := attachment.New()
	if err != nil {
		return 0, err
	}
	defer p.Close()
	facts, err := p.Read(ctx)
	byIPVLAN := map[bool]int{} // routes of a family
	for _, f := range facts {
		switch {
		case f.Key.Kind == attachment.KindDevice:
			pods++
		case f.Key.Kind == attachment.KindRoute && f.Value.Device == model.ChildDevice:
			byIPVLAN[f.Key.Addr.Is4()]++
		}
	}
	return pods + max(byIPVLAN[true], byIPVLAN[false]), err
}

// CleanNetwork removes the pod network from the calling thread's network namespace: pods on it lose theirs.
func CleanNetwork(ctx context.Context) error {
	planes, err := OpenNetwork(slog.New(slog.DiscardHandler), false)
	for _, p := range planes {
		err = errors.Join(err, p.Clean(ctx), p.Close())
	}
	return errors.Join(err, cleanMasquerade(ctx, false))
}

// NetworkAudit is what a node's pod network should be against what its kernel holds. Nothing was written for it.
type NetworkAudit struct {
	Audit
	AtDevices bool // programs at devices masquerade, else nf_tables
	plans     []reconcile.Plan[model.NetworkPart]
}

// Lacks returns how many facts that a part needs the kernel lacks, and of how many.
func (a *NetworkAudit) Lacks(part model.NetworkPart) (missing, of int) {
	for _, p := range a.plans {
		m, n := p.Lacks(part)
		missing, of = missing+m, of+n
	}
	return missing, of
}

// CheckNetwork audits the pod network of the calling thread's network namespace, which should be made of these parts.
func CheckNetwork(ctx context.Context, parts []model.NetworkPart) (*NetworkAudit, error) {
	a := &NetworkAudit{}
	held, err := masquerade.HeldAtDevices()
	if err != nil {
		return nil, err
	}
	a.AtDevices = held
	planes, err := OpenNetwork(slog.New(slog.DiscardHandler), held)
	for _, p := range planes {
		p.Change(parts, nil)
		plan, failed := p.Plan(ctx)
		if err = errors.Join(err, failed, p.Close()); err != nil {
			continue
		}
		a.plans = append(a.plans, plan)
		a.Put, a.Del = append(a.Put, plan.Put...), append(a.Del, plan.Del...)
		a.Wanted += plan.Held + len(plan.Put)
		a.Held += plan.Held + len(plan.Del)
	}
	return a, err
}
