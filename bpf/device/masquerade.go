package device

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
)

// What the addresses of a prefix are to masquerading.
const (
	MasqueradePods   = uint32(deviceMasqRangeRANGE_PODS)   // this node's pods
	MasqueradeInside = uint32(deviceMasqRangeRANGE_INSIDE) // destinations that see pods' own addresses
	MasqueradeNodes  = uint32(deviceMasqRangeRANGE_NODES)  // own addresses of nodes that pods reach through the tunnel
	MasqueradeRemote = uint32(deviceMasqRangeRANGE_REMOTE) // pods of other nodes
)

// MasqueradeRanges is the map by which programs at devices know which packets leave the cluster. Whoever comes first
// makes it, its writer or those programs.
type MasqueradeRanges struct{ m *ebpf.Map }

// masqueradePin returns the path of the map's pin in a folder as Folder returns, and its form.
func masqueradePin(folder string) (string, *ebpf.MapSpec, error) {
	c, err := forDevices()
	if err != nil {
		return "", nil, fmt.Errorf("bpf: read the programs' object: %w", err)
	}
	m := c.Maps[deviceMapFlMasqRanges].Copy()
	return pin(filepath.Join(folder, bpf.LayoutPrefix), m), m, nil
}

// OpenMasqueradeRanges opens the map in a folder as Folder returns. Where there is none, the error is Absent.
func OpenMasqueradeRanges(folder string) (*MasqueradeRanges, error) {
	path, form, err := masqueradePin(folder)
	if err != nil {
		return nil, err
	}
	m, err := bpf.OpenMap(path, form)
	if err != nil {
		return nil, fmt.Errorf("bpf: map %s: %w", form.Name, err)
	}
	return &MasqueradeRanges{m}, nil
}

// MakeMasqueradeRanges opens the map in a folder, and makes it where there is none.
func MakeMasqueradeRanges(folder string) (*MasqueradeRanges, error) {
	r, err := OpenMasqueradeRanges(folder)
	if !bpf.Absent(err) {
		return r, err
	}
	path, form, err := masqueradePin(folder)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(bpf.MakeFolder(filepath.Dir(path)), bpf.Unpin(path)); err != nil {
		return nil, err
	}
	m, err := ebpf.NewMap(form)
	if err != nil {
		return nil, fmt.Errorf("bpf: make map %s: %w", form.Name, bpf.Explain(err))
	}
	err = m.Pin(path)
	if err == nil {
		return &MasqueradeRanges{m}, nil
	}
	m.Close()
	if errors.Is(err, fs.ErrExist) { // the programs came first
		return OpenMasqueradeRanges(folder)
	}
	return nil, fmt.Errorf("bpf: pin map %s: %w", form.Name, err)
}

// ID returns the kernel's number of the map, 0 where it can't be read.
func (r *MasqueradeRanges) ID() uint32 {
	i, err := r.m.Info()
	if err != nil {
		return 0
	}
	id, _ := i.ID()
	return uint32(id)
}

// Close closes the map. Pinned, it stays.
func (r *MasqueradeRanges) Close() error { return r.m.Close() }

// Put sets what the addresses of a prefix are.
func (r *MasqueradeRanges) Put(p netip.Prefix, is uint32) error {
	if err := r.m.Put(service.PrefixKey(p), is); err != nil {
		return fmt.Errorf("bpf: write prefix %s into map %s, which has room for %d: %w", p, deviceMapFlMasqRanges,
			r.m.MaxEntries(), err)
	}
	return nil
}

// Delete undoes Put. What isn't there is no error.
func (r *MasqueradeRanges) Delete(p netip.Prefix) error {
	if err := r.m.Delete(service.PrefixKey(p)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("bpf: delete prefix %s from map %s: %w", p, deviceMapFlMasqRanges, err)
	}
	return nil
}

// Each calls yield with each prefix.
func (r *MasqueradeRanges) Each(yield func(netip.Prefix, uint32)) error {
	return service.EachPrefix(r.m, yield)
}

// CleanMasqueradeRanges has programs at devices masquerade no flow that begins from now on, and removes the map where
// there are none of these.
func CleanMasqueradeRanges(folder string) error {
	r, err := OpenMasqueradeRanges(folder)
	if bpf.Absent(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer r.Close()
	var all []netip.Prefix
	if err := r.Each(func(p netip.Prefix, _ uint32) { all = append(all, p) }); err != nil {
		return err
	}
	for _, p := range all {
		if err := r.Delete(p); err != nil {
			return err
		}
	}
	if layouts, _ := filepath.Glob(filepath.Join(folder, bpf.LayoutPrefix+"*")); len(layouts) > 0 {
		return nil
	}
	path, _, err := masqueradePin(folder)
	if err != nil {
		return err
	}
	return bpf.RemoveFolder(path)
}
