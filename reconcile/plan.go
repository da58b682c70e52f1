package reconcile

import (
	"context"
	"fmt"

	"fairlead.dev/fairlead/dataplane"
)

// Plan is what would be written now. A fact whose value changes stands in both, old in Del and new in Put.
type Plan[K dataplane.Key, V comparable] struct {
	Put  []dataplane.Fact[K, V] // by rising rank; within a rank in no order
	Del  []dataplane.Fact[K, V] // by falling rank
	Held int                    // facts that are true already and stay
}

// Plan reads what the kernel holds, compares it with all that Change has told, and writes nothing. It needs no Run; beside
// one, it waits until a write that is under way has ended.
func (l *Loop[T, K, V]) Plan(ctx context.Context) (Plan[K, V], error) {
	if err := l.acquire(ctx); err != nil {
		return Plan[K, V]{}, fmt.Errorf("planning: %w", err)
	}
	defer l.release()
	l.take()
	facts, err := l.plane.Read(ctx)
	if err != nil {
		return Plan[K, V]{}, fmt.Errorf("planning: reading what the kernel holds: %w", err)
	}
	return l.table.plan(facts), nil
}

// plan compares what is wanted with facts, those that the kernel holds.
func (t *table[T, K, V]) plan(facts []dataplane.Fact[K, V]) (p Plan[K, V]) {
	same := make(map[K]bool, len(facts))
	for _, f := range facts {
		if e := t.entries[f.Key]; e != nil && e.wanted() && e.value == f.Value {
			same[f.Key] = true
		} else {
			p.Del = append(p.Del, f)
		}
	}
	for k, e := range t.entries {
		if e.wanted() && !same[k] {
			p.Put = append(p.Put, dataplane.Fact[K, V]{Key: k, Value: e.value})
		}
	}
	p.Held = len(same)
	rising(p.Put)
	falling(p.Del)
	return p
}
