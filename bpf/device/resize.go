package device

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/kernel/bpf"
)

// copyFlows copies the entries of NAT maps that differ from these in their size alone, as an agent with another size
// leaves them. What is here already stays, but for a client that programs at work on those maps have masqueraded
// since it was copied.
func (m *Maps) copyFlows() error {
	if m.flowsOf == "" {
		return nil
	}
	specs, err := mapSpecs(m.sizes)
	if err != nil {
		return err
	}
	for _, name := range []string{deviceMapFlNatDst, deviceMapFlNatSrc} {
		spec := specs[name]
		own := pin(m.flowsOf, spec)
		paths, err := filepath.Glob(filepath.Join(filepath.Dir(own), pinNames[name]+"-*"))
		if err != nil {
			return err
		}
		for _, path := range paths {
			if path == own {
				continue
			}
			if err := copyFlows(m.named[name], path, m.flowsOf, spec.Copy()); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyFlows copies a pinned map's entries to another, if their maps have one spec but for their size.
func copyFlows(to *ebpf.Map, path, folder string, spec *ebpf.MapSpec) error {
	from, err := bpf.Pinned[Tuple, NatEntry](path)
	if from == nil {
		if errors.Is(err, bpf.ErrForm) {
			return nil
		}
		return err
	}
	defer from.Close()
	if spec.MaxEntries = from.MaxEntries(); pin(folder, spec) != path {
		return nil
	}
	var errs []error
	err = bpf.ReadAll(from, func(t Tuple, w NatEntry) {
		var here NatEntry
		err := to.Update(t, w, ebpf.UpdateNoExist)
		if errors.Is(err, ebpf.ErrKeyExist) && to.Lookup(t, &here) == nil &&
			deviceNatState(here.State)&^deviceNatState(w.State)&deviceNatStateMASQ_PENDING != 0 {
			err = to.Put(t, w)
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
			errs = append(errs, err)
		}
	})
	if err = errors.Join(append(errs, err)...); err != nil {
		return fmt.Errorf("bpf: copy flows from %s: %w", path, err)
	}
	return nil
}
