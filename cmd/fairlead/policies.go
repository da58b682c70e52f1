package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
)

// audited is what the kernel holds against what Services and policies need.
type audited struct {
	*mode.Audit                   // of both
	policies    *mode.PolicyAudit // nil where they are off
}

// audit compares the kernel with what is decided. Nothing is written for it.
func (w *snapshot) audit(ctx context.Context) (a audited, err error) {
	if a.Audit, err = mode.Check(ctx, w.mode, w.services); err != nil || w.services.Policies == nil {
		return a, err
	}
	if a.policies, err = mode.CheckPolicies(ctx, w.engine, w.services.Policies); err != nil {
		return a, err
	}
	p := a.policies
	a.Put, a.Del = append(a.Put, p.Put...), append(a.Del, p.Del...)
	a.Wanted += p.Held + len(p.Put)
	a.Held += p.Held + len(p.Del)
	return a, nil
}

// shownPolicies is what show prints of network policies.
type shownPolicies struct {
	Engine   string         `json:"engine"`
	Mode     string         `json:"mode"`
	Subjects []shownSubject `json:"subjects"` // addresses of pods on the node that policies select
	Free     int            `json:"free"`     // those that none selects
	Rulesets int            `json:"rulesets"`
	Peers    int            `json:"peers"` // addresses and ranges that policies name
}

type shownSubject struct {
	Pod     string   `json:"pod"`
	Address string   `json:"address"`
	Egress  []string `json:"egress,omitempty"`  // the policies that decide, by stage
	Ingress []string `json:"ingress,omitempty"` // likewise
	Kernel  string   `json:"kernel"`
}

// showPolicies gathers what show prints of network policies, nil where they are off.
func showPolicies(w *snapshot, a audited) *shownPolicies {
	p := w.services.Policies
	if p == nil {
		return nil
	}
	s := &shownPolicies{Engine: w.engine.Name, Mode: string(w.config.Own.Policy.Mode), Subjects: []shownSubject{},
		Rulesets: len(p.Rulesets), Peers: len(p.Singles) + len(p.Ranges)}
	subjects := slices.SortedFunc(maps.Values(p.Subjects), func(a, b *model.Subject) int {
		if c := strings.Compare(a.Pod, b.Pod); c != 0 {
			return c
		}
		return a.Addr.Compare(b.Addr)
	})
	for _, x := range subjects {
		row := shownSubject{Pod: x.Pod, Address: x.Addr.String(), Egress: rulesetNames(x.Out), Ingress: rulesetNames(x.In),
			Kernel: policyKernel(p, a.policies, x)}
		if len(row.Egress)+len(row.Ingress) == 0 {
			s.Free++
			continue
		}
		s.Subjects = append(s.Subjects, row)
	}
	return s
}

// rulesetNames returns the policies of each stage that decides.
func rulesetNames(stages [model.PolicyStages]*model.Ruleset) (names []string) {
	for _, rs := range stages {
		if rs != nil {
			names = append(names, rs.Name)
		}
	}
	return names
}

// policyKernel words what an audit found of what decides about a pod's packets.
func policyKernel(p *model.Policies, a *mode.PolicyAudit, x *model.Subject) string {
	parts := []model.PolicyPart{x}
	for _, rs := range slices.Concat(x.Out[:], x.In[:]) {
		if rs != nil {
			parts = append(parts, rs)
		}
	}
	missing, of := 0, 0
	for _, part := range parts {
		m, n := a.Lacks(part)
		missing, of = missing+m, of+n
	}
	if missing > 0 {
		return fmt.Sprintf("lacks %d of %d facts", missing, of)
	}
	if missing, of := a.Lacks(p.Node); missing > 0 {
		return fmt.Sprintf("not enforced: the node lacks %d of %d facts", missing, of)
	}
	return "in sync"
}

// policyTable prints which policies decide about the node's pods: a line for each pod whose addresses are alike.
func (s shown) policyTable(w *page) error {
	p := s.Policies
	if p == nil {
		return nil
	}
	fmt.Fprintf(w, "\nnetwork policies: mode %s, engine %s: %d rulesets, %d peers; no policy selects %d addresses of "+
		"pods on this node\n", p.Mode, p.Engine, p.Rulesets, p.Peers, p.Free)
	if len(p.Subjects) == 0 {
		return nil
	}
	rows := [][]string{{"POD", "ADDRESS", "EGRESS", "INGRESS", "KERNEL"}}
	for _, x := range p.Subjects {
		row := []string{x.Pod, x.Address, decides(x.Egress, "egress"), decides(x.Ingress, "ingress"), x.Kernel}
		if last := rows[len(rows)-1]; last[0] == row[0] && slices.Equal(last[2:], row[2:]) {
			last[1] += ", " + row[1]
			continue
		}
		rows = append(rows, row)
	}
	return w.table(rows)
}

// decides returns what decides in a direction for a column: "Admin deny-telnet; NetworkPolicy shop/web", or "all pass"
// for nothing.
func decides(rulesets []string, direction string) string {
	var l []string
	for _, name := range rulesets {
		l = append(l, strings.TrimPrefix(name, direction+" by "))
	}
	if l == nil {
		return "all pass"
	}
	return strings.Join(l, "; ")
}
