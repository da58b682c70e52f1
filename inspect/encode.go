package inspect

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// line is one value of a Decided as JSON: one field of it is set. What several values share is a line of its own before
// them, and they name it by its ID, so that pointers are the same again once it is read.
type line struct {
	Node        *model.ServiceNode `json:",omitempty"` // the first line
	Pool        *model.Pool        `json:",omitempty"`
	Frontend    *frontend          `json:",omitempty"`
	ClusterIP   *model.ClusterIP   `json:",omitempty"`
	HealthCheck *model.HealthCheck `json:",omitempty"`

	PolicyNode  *model.PolicyNode `json:",omitempty"` // policies are enforced
	Device      *model.Device     `json:",omitempty"`
	Identity    *model.Identity   `json:",omitempty"`
	PeerTable   *model.PeerTable  `json:",omitempty"`
	Ruleset     *ruleset          `json:",omitempty"`
	Peer        *peer             `json:",omitempty"`
	PeerVerdict *peerVerdict      `json:",omitempty"`
	Subject     *subject          `json:",omitempty"`

	Network        *model.PodNetwork `json:",omitempty"`
	Problem        *problem          `json:",omitempty"`
	NetworkProblem *problem          `json:",omitempty"`
	End            *end              `json:",omitempty"` // the last line: without it something is missing
}

// Fields that are deeper in what is embedded are hidden by those of their name here (encoding/json).
type (
	frontend struct {
		*model.Frontend
		Internal, External target
		Reasons            Reasons
	}
	target struct {
		Pool  uint64
		Empty model.Action
	}
	ruleset struct {
		*model.Ruleset
		Ports   []portEntry
		Default portEntry
	}
	portEntry struct {
		model.PortEntry
		PeerTable uint64
	}
	peer struct {
		*model.Peer
		Identity *uint64
	}
	peerVerdict struct {
		PeerTable, Identity uint64
		Decision            model.Decision
	}
	subject struct {
		*model.Subject
		Out, In [model.PolicyStages]*uint64
	}
	problem struct {
		source.Problem
		Public, Entry string // hidden from people's JSON
	}
	end struct {
		Lost      int
		Undecided string `json:",omitempty"`
	}
)

// Encode writes d, a line of JSON for each value.
func (d *Decided) Encode(w io.Writer) error {
	b := bufio.NewWriter(w)
	e := json.NewEncoder(b)
	e.SetEscapeHTML(false)
	if err := d.each(func(l line) error { return e.Encode(l) }); err != nil {
		return fmt.Errorf("send what was decided: %w", err)
	}
	return b.Flush()
}

// each calls f with each line, until one returns an error.
func (d *Decided) each(f func(line) error) (err error) {
	emit := func(l line) {
		if err == nil {
			err = f(l)
		}
	}
	emit(line{Node: d.Services.ServiceNode})
	for _, p := range d.Services.Pools() {
		emit(line{Pool: p})
	}
	for _, at := range d.sorted() {
		v := d.Services.Frontends[at]
		emit(line{Frontend: &frontend{v, target{v.Internal.Pool.ID, v.Internal.Empty},
			target{v.External.Pool.ID, v.External.Empty}, d.Reasons[at]}})
	}
	for _, a := range slices.SortedFunc(maps.Keys(d.Services.ClusterIPs), netip.Addr.Compare) {
		emit(line{ClusterIP: d.Services.ClusterIPs[a]})
	}
	for _, h := range d.Services.HealthChecks {
		emit(line{HealthCheck: h})
	}
	if d.Services.Policies != nil {
		sent := map[uint64]bool{}
		for _, p := range d.Services.Policies.Parts() {
			policyLines(p, sent, emit)
		}
	}
	if d.Network != nil {
		emit(line{Network: d.Network})
	}
	for _, p := range d.Problems {
		emit(line{Problem: &problem{p, p.Public, p.Entry}})
	}
	for _, p := range d.NetworkProblems {
		emit(line{NetworkProblem: &problem{p, p.Public, p.Entry}})
	}
	emit(line{End: &end{d.Lost, d.Undecided}})
	return err
}

// policyLines calls emit with a part of policies, and before it with its identity, unless that is sent.
func policyLines(part model.PolicyPart, sent map[uint64]bool, emit func(line)) {
	identity := func(i *model.Identity) *uint64 {
		if i == nil {
			return nil
		}
		if !sent[i.ID] {
			sent[i.ID] = true
			emit(line{Identity: i})
		}
		return &i.ID
	}
	switch p := part.(type) {
	case *model.PolicyNode:
		emit(line{PolicyNode: p})
	case *model.Device:
		emit(line{Device: p})
	case *model.PeerTable:
		emit(line{PeerTable: p})
	case *model.Ruleset:
		r := &ruleset{Ruleset: p, Default: portOf(p.Default)}
		for _, e := range p.Ports {
			r.Ports = append(r.Ports, portOf(e))
		}
		emit(line{Ruleset: r})
	case *model.Peer:
		emit(line{Peer: &peer{p, identity(p.Identity)}})
	case *model.PeerVerdict:
		emit(line{PeerVerdict: &peerVerdict{p.PeerTable.ID, *identity(p.Identity), p.Decision}})
	case *model.Subject:
		s := &subject{Subject: p}
		for i := range model.PolicyStages {
			s.Out[i], s.In[i] = rulesetID(p.Out[i]), rulesetID(p.In[i])
		}
		emit(line{Subject: s})
	}
}

func portOf(e model.PortEntry) portEntry { return portEntry{e, e.PeerTable.ID} }

func rulesetID(r *model.Ruleset) *uint64 {
	if r == nil {
		return nil
	}
	return &r.ID
}
