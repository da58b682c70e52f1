package reconcile

import (
	"context"
	"fmt"
	"iter"

	"fairlead.dev/fairlead/dataplane"
)

// difference is what would be written now. A fact whose value changes stands in both, old in Del and new in Put.
type difference[K dataplane.Key, V comparable] struct {
	Put  []dataplane.Fact[K, V] // by rising rank; within a rank in no order
	Del  []dataplane.Fact[K, V] // by falling rank
	Held int                    // facts that are true already and stay
}

// Plan is what would be written now, for people and for counting. A fact whose value changes is in both Put and Del.
type Plan[T any] struct {
	Put, Del []PlannedFact
	Held     int // facts that are true already and stay

	lacks func(T) (lacking, of int)
}

// PlannedFact is a fact that would be put or deleted.
type PlannedFact struct {
	Group string // the kind of fact, such as "chain"
	Name  string // the fact's key, such as "chain refuse"
}

// Lacks returns how many facts that a part needs the kernel lacks, and of how many.
func (p Plan[T]) Lacks(part T) (lacking, of int) { return p.lacks(part) }

// Plan reads what the kernel holds, compares it with all that Change was given, and writes nothing. It needs no Run;
// beside one, it waits until a write that is under way has ended.
func (l *Loop[T, K, V]) Plan(ctx context.Context) (Plan[T], error) {
	d, err := l.compare(ctx)
	if err != nil {
		return Plan[T]{}, err
	}
	p := Plan[T]{Put: planned(d.Put), Del: planned(d.Del), Held: d.Held}
	missing := make(map[K]bool, len(d.Put))
	for _, f := range d.Put {
		missing[f.Key] = true
	}
	p.lacks = func(part T) (lacking, of int) {
		facts := l.plane.Render(part)
		for _, f := range facts {
			lacking += int(one(missing[f.Key]))
		}
		return lacking, len(facts)
	}
	return p, nil
}

// planned returns what facts are for people.
func planned[K dataplane.Key, V comparable](facts []dataplane.Fact[K, V]) []PlannedFact {
	l := make([]PlannedFact, len(facts))
	for i, f := range facts {
		l[i] = PlannedFact{"fact", fmt.Sprint(f.Key)}
		if g, ok := any(f.Key).(dataplane.Grouped); ok {
			l[i].Group = g.Group()
		}
	}
	return l
}

// compare returns the difference between what the kernel holds and what is wanted.
func (l *Loop[T, K, V]) compare(ctx context.Context) (difference[K, V], error) {
	if err := l.acquire(ctx); err != nil {
		return difference[K, V]{}, fmt.Errorf("planning: %w", err)
	}
	defer l.release()
	l.drainQueue()
	l.accept()
	facts, err := l.plane.Read(ctx)
	if err != nil {
		return difference[K, V]{}, fmt.Errorf("planning: reading what the kernel holds: %w", err)
	}
	return l.table.plan(facts, l.wanted), nil
}

// plan compares what is wanted with facts, those that the kernel holds.
func (t *table[T, K, V]) plan(facts []dataplane.Fact[K, V],
	wanted iter.Seq[dataplane.Fact[K, V]]) (p difference[K, V]) {
	same := make(map[K]bool, len(facts))
	for _, f := range facts {
		if _, so := t.wants(f); so {
			same[f.Key] = true
		} else {
			p.Del = append(p.Del, f)
		}
	}
	p.Held = len(same)
	for f := range wanted {
		if _, so := t.wants(f); so && !same[f.Key] {
			same[f.Key] = true
			p.Put = append(p.Put, dataplane.Fact[K, V]{Key: f.Key, Value: f.Value})
		}
	}
	rising(p.Put)
	falling(p.Del)
	return p
}
