package ebpf

import (
	"errors"

	"fairlead.dev/fairlead/dataplane"
)

// each puts all facts, and returns those that were refused as a dataplane.Refused.
func each(facts []Fact, put func(Fact) error) error {
	var refused map[Key]error
	for _, f := range facts {
		if err := put(f); err != nil {
			if refused == nil {
				refused = map[Key]error{}
			}
			refused[f.Key] = err
		}
	}
	if refused == nil {
		return nil
	}
	return &dataplane.Refused[Key]{Facts: refused}
}

// follow does what follows from a Write that ended at refused facts: what was put up to their kind is true, and stays
// so. All of them are of one kind.
func (p *Plane) follow(w *writes, err error) error {
	r, ok := errors.AsType[*dataplane.Refused[Key]](err)
	if !ok {
		return nil
	}
	last := KindMaps
	for k := range r.Facts {
		last = k.Kind
	}
	made := &writes{}
	for k := range last + 1 {
		for _, f := range w.put[k] {
			if r.Facts[f.Key] == nil {
				made.put[k] = append(made.put[k], f)
			}
		}
		for _, f := range w.del[k] { // what goes for good has not gone yet
			if w.stays[f.Key] && r.Facts[f.Key] == nil {
				made.del[k] = append(made.del[k], f)
			}
		}
	}
	return errors.Join(p.countChange(made), p.closeSockets(made), p.forgetLoads(made))
}
