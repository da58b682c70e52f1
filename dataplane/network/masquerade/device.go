package masquerade

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/model"
)

// Range is a fact's key: a prefix that the programs at devices look up.
type Range netip.Prefix

// Rank implements dataplane.Key.
func (Range) Rank() int { return 0 }

// String returns the prefix.
func (r Range) String() string { return netip.Prefix(r).String() }

// RangeFact is a prefix with what its addresses are: device.MasqueradePods, device.MasqueradeInside, and with the
// latter device.MasqueradeNodes or device.MasqueradeRemote.
type RangeFact = dataplane.Fact[Range, uint32]

// DevicePlane writes facts for the programs at devices of Services' mode ebpf, which masquerade by them. It belongs to
// one network namespace. It implements dataplane.Plane[model.NetworkPart, Range, uint32], dataplane.Watcher and
// dataplane.Cleaner.
type DevicePlane struct {
	folder string
	ranges *device.MasqueradeRanges // nil until they are read or written
	id     atomic.Uint32            // the map's
}

var (
	_ dataplane.Plane[model.NetworkPart, Range, uint32] = (*DevicePlane)(nil)
	_ dataplane.Watcher                                 = (*DevicePlane)(nil)
	_ dataplane.Cleaner                                 = (*DevicePlane)(nil)
)

// NewDevice opens the plane of the calling thread's network namespace.
func NewDevice() (*DevicePlane, error) {
	folder, _, err := bpf.Folder()
	return &DevicePlane{folder: folder}, err
}

// Close closes the plane's handle. The kernel keeps what was written.
func (p *DevicePlane) Close() error {
	if p.ranges == nil {
		return nil
	}
	defer func() { p.ranges = nil }()
	p.id.Store(0)
	return p.ranges.Close()
}

// Render implements dataplane.Plane. Without masquerading there are no facts.
func (*DevicePlane) Render(part model.NetworkPart) (l []RangeFact) {
	inside := func(p netip.Prefix) { l = append(l, RangeFact{Key: Range(p), Value: device.MasqueradeInside}) }
	switch v := part.(type) {
	case *model.Network:
		if v.Masquerade == nil {
			return nil
		}
		for _, r := range v.Ranges {
			l = append(l, RangeFact{Key: Range(r), Value: device.MasqueradePods})
		}
		for _, r := range v.Masquerade.Except {
			if !covered(v.Ranges, r) { // the longest prefix counts, and pods are inside anyway
				inside(r)
			}
		}
	case *model.Route:
		if v.PodsOnly {
			return []RangeFact{{Key: Range(v.To), Value: device.MasqueradeInside | device.MasqueradeNodes}}
		}
		l = append(l, RangeFact{Key: Range(v.To), Value: device.MasqueradeInside | device.MasqueradeRemote})
		if v.Hop == model.Direct { // the node is on the link, and sees pods' own addresses
			inside(netip.PrefixFrom(v.Via, v.Via.BitLen()))
		}
	}
	return l
}

// covered reports whether one of the ranges has all addresses of r.
func covered(ranges []netip.Prefix, r netip.Prefix) bool {
	for _, o := range ranges {
		if o.Bits() <= r.Bits() && o.Contains(r.Addr()) {
			return true
		}
	}
	return false
}

// Read implements dataplane.Plane.
func (p *DevicePlane) Read(context.Context) (l []RangeFact, err error) {
	if err := p.Close(); err != nil {
		return nil, err
	}
	p.ranges, err = device.OpenMasqueradeRanges(p.folder)
	if bpf.Absent(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	p.id.Store(p.ranges.ID())
	err = p.ranges.Each(func(r netip.Prefix, is uint32) { l = append(l, RangeFact{Key: Range(r), Value: is}) })
	return l, err
}

// Write implements dataplane.Plane.
func (p *DevicePlane) Write(_ context.Context, put, del []RangeFact) (err error) {
	if p.ranges == nil {
		if p.ranges, err = device.MakeMasqueradeRanges(p.folder); err != nil {
			return err
		}
		p.id.Store(p.ranges.ID())
	}
	refused, stays := map[Range]error{}, map[Range]bool{}
	put = slices.Clone(put) // this node's pods last: without them nothing is masqueraded
	slices.SortFunc(put, func(a, b RangeFact) int { return cmp.Compare(b.Value, a.Value) })
	for _, f := range put {
		stays[f.Key] = true
		if err := p.ranges.Put(netip.Prefix(f.Key), f.Value); err != nil {
			refused[f.Key] = err
		}
	}
	if len(refused) > 0 {
		return &dataplane.Refused[Range]{Facts: refused}
	}
	for _, f := range del {
		if !stays[f.Key] {
			err = errors.Join(err, p.ranges.Delete(netip.Prefix(f.Key)))
		}
	}
	return err
}

// CutFlows removes the flows of the programs at devices to and from addresses.
func (p *DevicePlane) CutFlows(of func(netip.Addr) bool) error {
	return device.CutFlows(p.folder, of)
}

// HeldAtDevices reports whether programs at devices have ranges to masquerade by, in the calling thread's network
// namespace.
func HeldAtDevices() (held bool, err error) {
	if bpf.ProbeDevices() != nil {
		return false, nil
	}
	p, err := NewDevice()
	if err != nil {
		return false, err
	}
	facts, err := p.Read(context.Background())
	return len(facts) > 0, errors.Join(err, p.Close())
}

// checkEvery is how often Watch checks whether the programs still get the map that was written.
const checkEvery = 5 * time.Second

// Watch implements dataplane.Watcher.
func (p *DevicePlane) Watch(ctx context.Context) (<-chan struct{}, error) {
	signals := make(chan struct{}, 1)
	go func() {
		defer close(signals)
		tick := time.NewTicker(checkEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if !p.lost() {
				continue
			}
			select {
			case signals <- struct{}{}:
			default:
			}
		}
	}()
	return signals, nil
}

// lost reports whether the map that was read or written is no longer that of the programs.
func (p *DevicePlane) lost() bool {
	ours := p.id.Load()
	held, err := device.OpenMasqueradeRanges(p.folder)
	if err != nil {
		return ours != 0
	}
	defer held.Close()
	return ours != held.ID()
}

// Clean implements dataplane.Cleaner.
func (p *DevicePlane) Clean(context.Context) error {
	if err := p.Close(); err != nil {
		return err
	}
	if err := device.CleanMasqueradeRanges(p.folder); err != nil {
		return fmt.Errorf("masquerade by programs at devices: %w", err)
	}
	return nil
}
