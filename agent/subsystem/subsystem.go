// Package subsystem is what an agent knows of its subsystems, Services, network policies and the pod network, and what
// they know of it.
//
// The agent holds a list of them. Whatever changes passes down the list twice: first each decides what follows, and
// finds in the model's Delta what those before it have decided; then each passes the whole Delta to its data planes.
// Subsystems don't know each other.
package subsystem

import (
	"context"
	"net/netip"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// Subsystem is one of the node's subsystems: its resolver, its data planes with their loops, and what belongs to it
// alone. Its methods may be called from any goroutine; Decide and Change are called for one Update after the other.
type Subsystem interface {
	// Decide records what an update says and adds to d what changes on the node by it. d is nil while the source has
	// not been read: then facts are recorded alone. It reports whether all is known that attached pods need.
	Decide(u Update, d *model.Delta) (known bool)
	// Change passes what was decided to the data planes. It returns at once.
	Change(u Update, d model.Delta)
	// SyncOwner waits until the parts of an owner that are wanted now are in the kernel. It returns what of them the
	// kernel rejects.
	SyncOwner(context.Context, model.Owner) error

	// Start begins what needs the agent, before the source is read.
	Start(Host)
	// FirstSync returns once the first state of the source is in the kernel. The error says what of it is not.
	FirstSync(context.Context) error
	// Close ends the loops and leaves the kernel as it is.
	Close() error

	Readiness() Readiness
	Problems() Problems
	// Loops returns the states of the loops, by data plane.
	Loops() map[string]Loop
	// Status fills in the subsystem's sections of the status page.
	Status(*State)
	// Decided fills in all that is decided now. Those before it in the list have done so.
	Decided(*inspect.Decided)
	Metrics() []prometheus.Collector
}

// Update is what subsystems are told at once.
type Update struct {
	Changes   []source.Change     // of objects
	Names     []source.Change     // domain names that DNS has resolved: then nothing else
	Batch     bool                // it comes from the source, and Unlisted counts
	Unlisted  []source.Kind       // kinds that policies need of which it is not known yet what there is
	Seen      time.Time           // when the cause was seen; zero: now
	Node      bool                // a fact of the node has changed, such as its addresses or its devices
	Addresses []netip.Addr        // of the node's interfaces; nil: as before
	Attached  []*model.Attachment // pods that have been given their addresses
	Ports     bool                // these may have host ports
	Detached  []*model.Attachment // pods that have them no more
}

// Host is the agent, as its subsystems use it.
type Host interface {
	// Go runs a loop until the agent ends. An error ends the agent; what names the loop in it.
	Go(what string, run func(context.Context) error)
	// Apply passes an update down the list of subsystems.
	Apply(Update)
	// LogProblems logs problems of the source and of Problems.Input and Problems.Node that are new.
	LogProblems()
	// Report reports all problems, as they may have changed.
	Report()
}

// Readiness is whether a subsystem has in the kernel what all its parts need.
type Readiness struct {
	Serving   bool
	Why       string // not, a clause; "" while nothing has been tried yet
	Undecided bool   // it is not known yet what is to be in the kernel
	Limited   bool   // pods that run may lack what they need by that
}

// Problems are what is wrong, by where people see it. All are reported as Events.
type Problems struct {
	Input  []source.Problem // of objects: counted, logged, on the status page. The same slice: nothing has changed
	Node   []source.Problem // of the node: logged, on the status page. Likewise
	Status []source.Problem // on the status page
	Events []source.Problem // nowhere else
}

// Loop is the state of the loop of a data plane, and what problems say of it.
type Loop struct {
	reconcile.Status
	Without string // what the node does not do without what all parts need: "serves no Service"
	// returns the reason and the message of the problem that an owner's parts are rejected; nil: the usual ones
	Rejected func(reconcile.Failing) (reason, message string)
}

// PodKey returns the key of a pod by "namespace/name".
func PodKey(pod string) source.Key {
	namespace, name, _ := strings.Cut(pod, "/")
	return source.Key{Kind: source.Pod, Namespace: namespace, Name: name}
}
