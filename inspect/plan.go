package inspect

import (
	"time"

	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// Plan counts what a sync would change in the kernel.
type Plan struct {
	Node         string           `json:"node"`
	Put          int              `json:"put"`
	Replace      int              `json:"replace"`
	Delete       int              `json:"delete"`
	Unchanged    int              `json:"unchanged"`
	Transactions int              `json:"transactions"`
	Estimate     string           `json:"estimatedTime"`
	ByKind       map[string][]int `json:"byKind"` // put, replace, delete
	Operations   []string         `json:"operations,omitempty"`
	Problems     []source.Problem `json:"problems,omitempty"`
}

// What writing costs: measured with the lab's experiment services (2 cores, Linux 6.18).
const (
	perTransaction = 60 * time.Microsecond
	perFact        = 2 * time.Microsecond
	perWrite       = 4096 // facts in one transaction
)

// Plan returns what would be written where an audit found differences, each change of it only if operations are wanted.
func (n *Node) Plan(a *Audit, operations bool) *Plan {
	p := &Plan{Node: n.Services.Node.Name, ByKind: map[string][]int{}, Problems: n.Problems}
	gone := make(map[reconcile.PlannedFact]bool, len(a.Del))
	for _, fact := range a.Del {
		gone[fact] = true
	}
	count := func(what int, sign string, total *int, fact reconcile.PlannedFact) {
		if p.ByKind[fact.Group] == nil {
			p.ByKind[fact.Group] = make([]int, 3)
		}
		p.ByKind[fact.Group][what]++
		*total++
		if operations {
			p.Operations = append(p.Operations, sign+" "+fact.Name)
		}
	}
	for _, f := range a.Put {
		if gone[f] {
			delete(gone, f)
			count(1, "~", &p.Replace, f)
		} else {
			count(0, "+", &p.Put, f)
		}
	}
	for _, f := range a.Del {
		if gone[f] {
			count(2, "-", &p.Delete, f)
		}
	}
	p.Unchanged = a.Wanted - p.Put - p.Replace
	changes := p.Put + p.Replace + p.Delete
	p.Transactions = (changes + perWrite - 1) / perWrite
	p.Estimate = (time.Duration(p.Transactions)*perTransaction + time.Duration(changes)*perFact).String()
	return p
}
