package inspect

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
)

// Policies is which network policies decide about the pods of a node.
type Policies struct {
	Engine   string    `json:"engine"`
	Mode     string    `json:"mode"`
	Subjects []Subject `json:"subjects"` // addresses of pods on the node that policies select
	Free     int       `json:"free"`     // those that none selects
	Rulesets int       `json:"rulesets"`
	Peers    int       `json:"peers"` // addresses and ranges that policies name
}

// Subject is an address of a pod that policies select.
type Subject struct {
	Pod     string   `json:"pod"`
	Address string   `json:"address"`
	Egress  []string `json:"egress,omitempty"`  // the policies that decide, by stage
	Ingress []string `json:"ingress,omitempty"` // likewise
	Kernel  string   `json:"kernel"`
}

// PolicyParts is how many parts of each kind network policies come to on a node: for the page /status, a metric and
// the commands.
type PolicyParts map[string]int

// NewPolicyParts returns the counts without any part: each kind is there.
func NewPolicyParts() PolicyParts {
	return PolicyParts{"devices": 0, "subjects": 0, "rulesets": 0, "peer_tables": 0, "peer_verdicts": 0, "peers": 0}
}

// Apply counts a change.
func (n PolicyParts) Apply(c model.Change[model.PolicyPart]) {
	for _, x := range c.Put {
		n.add(x, 1)
	}
	for _, x := range c.Del {
		n.add(x, -1)
	}
}

// add counts a part. What is said of the node alone is none.
func (n PolicyParts) add(x model.PolicyPart, count int) {
	switch x.(type) {
	case *model.Device:
		n["devices"] += count
	case *model.Subject:
		n["subjects"] += count
	case *model.Ruleset:
		n["rulesets"] += count
	case *model.PeerTable:
		n["peer_tables"] += count
	case *model.PeerVerdict:
		n["peer_verdicts"] += count
	case *model.Peer:
		n["peers"] += count
	}
}

// policies returns which policies decide, nil where they are off.
func (n *Node) policies(a *Audit) *Policies {
	p := n.Services.Policies
	if p == nil {
		return nil
	}
	parts := NewPolicyParts()
	parts.Apply(model.Change[model.PolicyPart]{Put: p.Parts()})
	s := &Policies{Engine: n.Engine.Name, Mode: n.PolicyMode, Subjects: []Subject{}, Rulesets: parts["rulesets"],
		Peers: parts["peers"]}
	subjects := slices.SortedFunc(maps.Values(p.Subjects), func(a, b *model.Subject) int {
		if c := strings.Compare(a.Pod, b.Pod); c != 0 {
			return c
		}
		return a.Addr.Compare(b.Addr)
	})
	for _, x := range subjects {
		row := Subject{Pod: x.Pod, Address: x.Addr.String(), Egress: rulesetNames(x.Out), Ingress: rulesetNames(x.In),
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
		return lacks(missing, of)
	}
	if missing, of := a.Lacks(p.Node); missing > 0 {
		return fmt.Sprintf("not enforced: the node lacks %d of %d facts", missing, of)
	}
	return InSync
}
