// Package inspect holds what a node decided as values, which an agent sends to the commands beside it: the same for
// every reader, however it was decided.
package inspect

import (
	"maps"
	"slices"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// Decided is everything that a node decided, and what people ask about it.
type Decided struct {
	Services *model.Snapshot   // with the policies, if they are enforced
	Network  *model.PodNetwork // nil: others connect the pods
	Reasons  map[model.Entry]Reasons
	Problems []source.Problem
	Lost     int // problems that kept an object from being read
	// Undecided is why policies have not been decided, "" if they have or are off: then Services has none.
	Undecided       string
	NetworkProblems []source.Problem // of Problems those of the pod network
}

// Reasons are why a frontend is as it is, each as the end of a sentence; "" for none.
type Reasons struct {
	TrafficPolicy string `json:",omitempty"` // that chose its pools
	Empty         string `json:",omitempty"` // why a pool has no backend
}

// OfServices returns what a resolver has decided of Services, with its problems.
func OfServices(r *service.Resolver) *Decided {
	d := &Decided{Services: r.Services(), Problems: r.Problems(), Reasons: map[model.Entry]Reasons{}}
	whyEmpty := r.WhyEmpty()
	for e, f := range d.Services.Frontends {
		why := Reasons{TrafficPolicy: r.TrafficPolicy(e)}
		if len(f.Internal.Pool.Backends) == 0 || len(f.External.Pool.Backends) == 0 {
			why.Empty = whyEmpty(e)
		}
		d.Reasons[e] = why
	}
	return d
}

// Harmless are the reasons of a source's problems that keep no object from being read.
var Harmless = []string{manifest.KindNotRead, source.PolicyNotEvaluated, source.PoliciesNotListed, manifest.Duplicate,
	manifest.NotWatched, manifest.StillOpen}

// Lost counts the problems of a source that kept an object from being read.
func Lost(problems []source.Problem) (n int) {
	for _, p := range problems {
		if !slices.Contains(Harmless, p.Reason) {
			n++
		}
	}
	return n
}

// sorted returns the entries of the frontends, sorted.
func (d *Decided) sorted() []model.Entry {
	return slices.SortedFunc(maps.Keys(d.Services.Frontends), model.Entry.Compare)
}
