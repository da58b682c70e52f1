package reconcile

import (
	"slices"

	"fairlead.dev/fairlead/dataplane"
)

// wantedPart returns what is wanted in place of a part: itself, unless it has a stand-in.
func (l *Loop[T, K, V]) wantedPart(p T) T {
	if s, ok := l.standIns[p]; ok {
		return s
	}
	return p
}

// failClosed has stand-ins wanted for the parts that depend on refused ones, and reports whether that changed anything.
// Those that are there stay until everything was tried (settled): a part that is refused again is not open in between.
func (l *Loop[T, K, V]) failClosed(settled bool) (changed bool) {
	if l.options.StandIns == nil {
		return false
	}
	stuck := slices.ContainsFunc(l.table.todo, refusedPut)
	if !stuck && (!settled || len(l.standIns) == 0) {
		return false
	}
	var wanted []T
	var standIns map[T]T
	if stuck {
		wanted = l.originals()
		standIns = l.options.StandIns(l.refusedParts(wanted), wanted, l.standIns)
	}
	for p, s := range standIns {
		if is := l.wantedPart(p); is != s {
			l.swap(is, s)
			changed = true
		}
	}
	for p, s := range l.standIns {
		switch _, stays := standIns[p]; {
		case stays:
		case settled:
			l.swap(s, p)
			changed = true
		default:
			standIns[p] = s
		}
	}
	if len(standIns) > 0 && changed {
		l.options.Log.Warn("the kernel refuses facts: what depends on them is closed", "parts", len(standIns))
	} else if len(l.standIns) > len(standIns) {
		l.options.Log.Info("the kernel has what it refused: nothing is closed any more")
	}
	l.standIns = standIns
	return changed
}

// closed returns the labels of the parts that have stand-ins, sorted.
func (l *Loop[T, K, V]) closed() (labels []string) {
	if l.options.Label == nil {
		return nil
	}
	for p := range l.standIns {
		labels = append(labels, l.options.Label(p))
	}
	slices.Sort(labels)
	return labels
}

// swap has one part wanted in place of another.
func (l *Loop[T, K, V]) swap(from, to T) {
	for _, f := range l.plane.Render(to) {
		l.table.want(to, f)
	}
	for _, f := range l.plane.Render(from) {
		l.table.drop(from, f)
	}
	l.gone = append(l.gone, from)
}

// originals returns the parts that the table has, whatever stands in for them.
func (l *Loop[T, K, V]) originals() []T {
	l.mu.Lock()
	defer l.mu.Unlock()
	parts := make([]T, 0, len(l.parts))
	for p, ph := range l.parts {
		if ph != coming {
			parts = append(parts, p)
		}
	}
	return parts
}

// refusedPut reports whether the kernel refused a fact that is wanted. Facts that only report are not meant.
func refusedPut[K dataplane.Key, V comparable](j *job[K, V]) bool {
	if j.why == nil || !j.puts() {
		return false
	}
	a, is := any(j.key).(dataplane.Advisory)
	return !is || !a.Advisory()
}

// refusedParts returns those of parts of which the kernel refused a fact, and with each those of the same owner and
// label: what they need may wait for it.
func (l *Loop[T, K, V]) refusedParts(parts []T) (refused []T) {
	units := map[unit]bool{}
	for _, p := range parts {
		for _, f := range l.render(l.wantedPart(p)) {
			if j := l.table.job(f.Key); j != nil && refusedPut(j) && j.value == f.Value {
				units[l.unitOf(p)] = true
				break
			}
		}
	}
	for _, p := range parts {
		if units[l.unitOf(p)] {
			refused = append(refused, p)
		}
	}
	return refused
}
