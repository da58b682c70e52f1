// Package service holds what a service data plane says of itself to those who choose among them. The planes are the
// packages below.
package service

import "fairlead.dev/fairlead/model"

// Abilities is what a service data plane can do. What it can't is decided before it, in resolve: a scheduler has a stated
// substitute, a frontend that is refused is not told to the plane, and both are named as problems of their Service.
type Abilities struct {
	Name       string                       // as --mode has it, such as nftables
	Summary    string                       // how it carries Service traffic: a clause
	Needs      string                       // what it needs of a kernel: a list of nouns
	Schedulers model.Schedulers             // Random is always among them
	Behind     model.Schedulers             // those of a second plane, for clients that this one can't serve; 0: there is none
	Cannot     func(*model.Frontend) string // why a frontend can't be served, or ""; nil serves all
	Long       func(*model.Frontend) string // why questions or answers that are longer than a packet of their path may be late or lost, or ""; of a nil Frontend, those that none takes; nil: they are not
	// Unmatched returns why it passes what a ClusterIP rejects or a ServiceCIDR drops, by protocol, or ""; nil: it doesn't.
	Unmatched func(model.Protocol) string
	HidesAll  bool            // backends never see the client's address, whatever Frontend.Hide says
	Direct    func() string   // why it can't have backends' nodes answer clients (Frontend.Direct), or ""; nil: it can't, and hides them
	Ends      bool            // its connections end with the agent, since they run through it
	Frontends int             // how many fit, and as many pools and source ranges; 0: no bound of its own
	Slots     int             // how many pools and backends fit; 0: no bound of its own
	Table     int             // entries of Maglev's table that it wants for each backend; 0: 100
	PerSlot   int             // how many of those take as much room as a backend; 0: one
	Batch     int             // facts in one Write at most; 0 leaves it to the loop
	Tracked   bool            // translates by the kernel's connection tracking, where stale flows must be cut
	Accepts   bool            // its rules accept what it forwards and packets to health checks, whatever a chain's policy
	Lacks     func() []string // what this kernel lacks that the plane can do without, and what follows: sentences; nil: nothing
	Prepare   func() error    // sets sysctls that the plane needs, for an agent in a container that can't write them; nil: it needs none
	Notes     []Note          // what else a user should know before choosing it
}

// Note is a sentence about a mode.
type Note struct {
	Text string
	// Concerns reports whether the note is about packets of an origin to a frontend; nil: it is about none in
	// particular.
	Concerns func(*model.Frontend, model.Origin) bool
}

// About returns the notes that concern packets of origin o to f.
func (a Abilities) About(f *model.Frontend, o model.Origin) (notes []string) {
	for _, n := range a.Notes {
		if n.Concerns != nil && n.Concerns(f, o) {
			notes = append(notes, n.Text)
		}
	}
	return notes
}

// Every concerns all packets.
func Every(*model.Frontend, model.Origin) bool { return true }

// WithAffinity concerns packets to frontends with session affinity.
func WithAffinity(f *model.Frontend, o model.Origin) bool { return f.Target(o).Pool.Affinity > 0 }

// WithRanges concerns packets to frontends with allowed source ranges.
func WithRanges(f *model.Frontend, _ model.Origin) bool { return len(f.Sources) > 0 }

// Scheduled returns what concerns packets to frontends with one of those schedulers.
func Scheduled(s model.Schedulers) func(*model.Frontend, model.Origin) bool {
	return func(f *model.Frontend, o model.Origin) bool { return s.Has(f.Target(o).Pool.Scheduler) }
}

// Over returns what concerns packets of a protocol.
func Over(p model.Protocol) func(*model.Frontend, model.Origin) bool {
	return func(f *model.Frontend, _ model.Origin) bool { return f.Entry.Protocol == p }
}

// Notes of planes whose packets are forwarded as any others are.
const (
	NoteForward = "If the node drops forwarded packets by default (policy DROP in FORWARD, as Docker sets it), other rules must " +
		"accept those to endpoints and their replies: /status has the problem ForwardPolicyDrop then."
	NoteInvalid = "Packets that connection tracking calls invalid are not dropped, as in kube-proxy's mode nftables: where these reset " +
		"connections, set conntrack.tcpBeLiberal. See fairlead_conntrack_invalid_packets_total."
)

// NotDirect says why backends' nodes can't answer clients themselves, or "".
func (a Abilities) NotDirect() string {
	if a.Direct == nil {
		return "answers must come back through the node that was asked"
	}
	return a.Direct()
}
