// Package dataplane is the seam between what a node has decided (model) and what a kernel holds: facts and three verbs.
//
// A data plane says how the kernel is told, never what it is told: it holds no loop, no timer, no metric and no word of
// Kubernetes. The one loop that calls it is package reconcile.
package dataplane

import (
	"context"
	"fmt"
)

// Key names a fact. Two facts with the same key say different things about the same place.
type Key interface {
	comparable
	// Rank orders writes: a fact of a lower rank is true before one of a higher rank that needs it, and untrue after.
	Rank() int
}

// Fact is one thing that the kernel can hold: a set element, a chain, a map entry. A value that can't be read back word
// for word stands as a digest that can.
type Fact[K Key, V comparable] struct {
	Key   K
	Value V
	// Body is what Write needs beyond Key and Value, such as the rules of a chain of which Value is a digest; mostly
	// nil. Equal facts have bodies that write the same, so bodies are never compared. Render sets it and Read doesn't;
	// the loop drops it once the fact is written, and renders again where others undid that.
	Body any
}

// Equal reports whether f and o say the same, whatever their bodies.
func (f Fact[K, V]) Equal(o Fact[K, V]) bool { return f.Key == o.Key && f.Value == o.Value }

// Plane owns one slice of kernel state and makes it say what parts of the model need. T is the model's part, a pointer.
type Plane[T any, K Key, V comparable] interface {
	// Render returns the facts that a part needs. It is pure: equal parts give equal facts. Different parts may give
	// the same fact; two parts never give different values for one key.
	Render(T) []Fact[K, V]
	// Read returns every fact that the kernel holds in this plane's slice, also those that no part renders.
	Read(context.Context) ([]Fact[K, V], error)
	// Write makes the facts of put true and those of del untrue, all at once where the kernel can, else put by rising
	// rank, then del by falling rank. A fact whose value changes stands in both, old in del and new in put. A plane
	// that knows which facts the kernel refused returns Refused, so that the others need not wait for a search.
	Write(ctx context.Context, put, del []Fact[K, V]) error
}

// Refused is the error of a Write that names the facts of put that the kernel refused. Every other fact of put
// up to the highest rank of theirs is true. Nothing of a higher rank, and nothing of del that is not in put,
// was written.
type Refused[K Key] struct {
	Facts map[K]error // the reason by key, at least one
}

// Error implements error with one of the reasons and the number of the others.
func (r *Refused[K]) Error() string {
	for k, err := range r.Facts {
		if n := len(r.Facts) - 1; n > 0 {
			return fmt.Sprintf("%v: %v, and %d more facts refused", k, err, n)
		}
		return fmt.Sprintf("%v: %v", k, err)
	}
	return "no facts refused"
}

// Watcher is a Plane that learns when others write into its slice.
type Watcher interface {
	// Watch sends whenever another program may have changed the plane's slice, until ctx ends; then it closes the channel.
	// The plane's own writes don't count. It sends at once if one may have since the last Read.
	Watch(ctx context.Context) (<-chan struct{}, error)
}

// Cleaner is a Plane that can leave its slice of the kernel without anything read first, also what another version or
// a killed run has left there.
type Cleaner interface {
	// Clean removes everything that the plane ever wrote. Nothing there is no error.
	Clean(context.Context) error
}

// Drainer is a Cleaner that can drain.
type Drainer interface {
	// Drain stops accepting new connections and returns how many TCP connections are still open; at zero it cleans up.
	Drain(context.Context) (connections int, err error)
}

// Joiner is a Plane whose facts depend on several parts of the model together. Then parts of the plane's own stand for
// those, and Render is given them.
type Joiner[T any] interface {
	// Join returns a pure function that is given every change of the model, in their order, and returns what it comes to
	// for the plane: parts that it returned in puts before are in dels when they go.
	Join() func(put, del []T) (puts, dels []T)
}

// Foundation is a Key of facts some of which hold all others of the plane: where one gets another value, Write removes
// whatever was held, and makes what stands in put. A loop replaces it by one Write of all that is wanted.
type Foundation interface {
	// Foundation reports whether the fact holds all others.
	Foundation() bool
}

// Checker is a Plane that can try a Write. Which fact the kernel refuses is then found while what is held stays in
// force.
type Checker[K Key, V comparable] interface {
	// Check returns the error that Write would return, and changes nothing.
	Check(ctx context.Context, put, del []Fact[K, V]) error
}

// Advisory is a Key of facts some of which only name what is wrong.
type Advisory interface {
	// Advisory reports whether nothing depends on the fact.
	Advisory() bool
}

// Grouped is a Key that names the group of facts to which it belongs, for people: "chain", or the name of a set.
type Grouped interface {
	Group() string
}
