package ebpf

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/bpf"
)

// writes are the facts of one Write by kind. del has no fact that is put with another value.
type writes struct{ put, del map[Kind][]Fact }

func sorted(put, del []Fact) writes {
	w, stays := writes{map[Kind][]Fact{}, map[Kind][]Fact{}}, make(map[Key]bool, len(put))
	for _, f := range put {
		stays[f.Key] = true
		w.put[f.Key.Kind] = append(w.put[f.Key.Kind], f)
	}
	for _, f := range del {
		if !stays[f.Key] {
			w.del[f.Key.Kind] = append(w.del[f.Key.Kind], f)
		}
	}
	return w
}

// any reports whether facts of those kinds are put or deleted.
func (w writes) any(kinds ...Kind) bool {
	for _, k := range kinds {
		if len(w.put[k])+len(w.del[k]) > 0 {
			return true
		}
	}
	return false
}

// loosens reports whether entries are deleted whose absence might accept a packet: a program that is running may have
// found the pod or the peer as they were before.
func (w writes) loosens() bool {
	if len(w.put[KindSubject])+len(w.put[KindPeer])+len(w.put[KindNet]) == 0 {
		return false
	}
	return len(w.del[KindPort])+len(w.del[KindRange]) > 0 || slices.ContainsFunc(w.del[KindVerdict], func(f Fact) bool {
		return f.Value == dropped
	})
}

// Write implements dataplane.Plane. Entries are written one after another, so a peer may have its new identity while a
// pod has its old ruleset, or the other way round: as long as both change, what a peer table decides otherwise isn't
// trusted, and a new connection that would be accepted by it is dropped.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	w := sorted(put, del)
	if err := p.openMaps(w, del); err != nil || p.maps == nil {
		return err
	}
	return p.writers.Write(func() error { return p.writeAll(w) })
}

// writeAll writes everything.
func (p *Plane) writeAll(w writes) error {
	both := w.any(KindPeer, KindNet) && w.any(KindSubject, KindPort, KindRange)
	if both {
		p.maps.Set(policy.Writing, true)
	}
	changes := w.any(KindVerdict, KindPort, KindRange, KindExempt, KindPeer, KindNet, KindSubject, KindUnknown, KindSource,
		KindDevice, KindCut, KindCheck, KindIncomplete)
	if changes {
		p.maps.Set(policy.Changing, true)
	}
	err := p.write(w)
	if changes {
		p.maps.Reevaluate()
	}
	if err != nil {
		return err
	}
	p.maps.Set(policy.Writing|policy.Changing, false)
	return p.removeMaps(w)
}

// openMaps makes the maps, or opens those that exist. The remains of incomplete ones are removed first.
func (p *Plane) openMaps(w writes, del []Fact) error {
	if p.maps != nil {
		return nil
	}
	if len(w.put[KindMaps]) == 0 {
		_, err := p.readMaps(nil) // a plane that writes before it has read
		if err == nil && p.maps == nil && len(w.put) > 0 {
			err = fmt.Errorf("ebpf: no maps to write network policies to")
		}
		if err == nil && p.maps == nil {
			err = p.removeMaps(w)
		}
		return err
	}
	for _, f := range del {
		if f.Key == (Key{KindMaps, p.layout}) {
			if err := policy.RemoveMaps(p.mapsFolder()); err != nil {
				return err
			}
		}
	}
	m, err := policy.CreateMaps(p.mapsFolder(), p.sizes)
	if p.maps = m; err == nil {
		p.mapsMade()
		p.writers.Listen()
	}
	return err
}

// write writes entries and attaches the program, by rank, then removes what is not wanted, by falling rank.
func (p *Plane) write(w writes) error {
	for k := KindVerdict; k <= KindDevice; k++ {
		if err := p.put(w.put[k]); err != nil {
			return err
		}
	}
	if w.any(KindCut) {
		p.maps.Set(policy.Cut, len(w.put[KindCut]) > 0)
	}
	if w.any(KindCheck) {
		p.maps.Set(policy.Check, len(w.put[KindCheck]) > 0)
	}
	if len(w.put[KindHooks]) > 0 {
		if err := p.attach(w.put[KindHooks][0]); err != nil {
			return err
		}
	}
	if len(w.del[KindHooks]) > 0 {
		if err := p.detach(); err != nil {
			return err
		}
	}
	if w.loosens() {
		if err := p.grace.Wait(); err != nil {
			return err
		}
	}
	for k := KindDevice; k >= KindVerdict; k-- {
		if err := p.remove(w.del[k]); err != nil {
			return err
		}
	}
	return nil
}

// put writes entries of one map, those that fit. Of the others the error is a dataplane.Refused.
func (p *Plane) put(facts []Fact) error {
	entries := make([]policy.Entry, len(facts))
	for i, f := range facts {
		entries[i] = entry(f)
	}
	var refused dataplane.Refused[Key]
	for i := 0; i < len(facts); {
		n, err := p.maps.Put(entries[i:])
		if i += n; err == nil {
			break
		}
		if !bpf.Full(err) {
			return err
		}
		if refused.Facts == nil {
			refused.Facts = map[Key]error{}
		}
		refused.Facts[facts[i].Key] = err
		i++
	}
	if refused.Facts != nil {
		return &refused
	}
	return nil
}

// remove removes entries of one map.
func (p *Plane) remove(facts []Fact) error {
	if len(facts) == 0 {
		return nil
	}
	entries := make([]policy.Entry, len(facts))
	for i, f := range facts {
		entries[i] = entry(f)
	}
	return p.maps.Remove(entries)
}

// attach loads the program and attaches it to the hooks.
func (p *Plane) attach(f Fact) error {
	if f.Value != p.digest {
		return fmt.Errorf("ebpf: program %s of network policies: this version's is %s", f.Value, p.digest)
	}
	program, err := p.maps.Load()
	if err != nil {
		return err
	}
	defer program.Close()
	if there, err := policy.Attached(p.hooksFolder(), nil); p.maps.NewFlows || err == nil && there == "" {
		p.maps.Install(p.older)
	}
	p.maps.NewFlows = false
	err = p.ns.Do(func() error { return program.Attach(p.hooksFolder()) })
	p.hooked.Store(err == nil)
	if err != nil {
		return err
	}
	return p.pins.Join()
}

// detach removes the program from the hooks, then from the fast path, which doesn't call it without them.
func (p *Plane) detach() error {
	p.hooked.Store(false)
	if err := policy.Detach(p.hooksFolder()); err != nil {
		return err
	}
	return p.pins.Part()
}

// removeMaps removes maps that are not wanted.
func (p *Plane) removeMaps(w writes) error {
	for _, f := range w.del[KindMaps] {
		if f.Key.Name == p.layout {
			if err := p.forget(); err != nil {
				return err
			}
		}
		if err := policy.RemoveMaps(filepath.Join(p.folder, f.Key.Name)); err != nil {
			return err
		}
	}
	return nil
}
