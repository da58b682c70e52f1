package inspect

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// Explanation is what becomes of a packet, and why.
type Explanation struct {
	From      string `json:"from"`
	To        string `json:"to"`
	Node      string `json:"node"`
	Origin    string `json:"origin"`
	Interface string `json:"interface,omitempty"` // that it comes in by, where pods are known by theirs
	Outcome   string `json:"outcome"`
	Reason    string `json:"reason"`
	Served
	// of the Service asked for, if the frontend isn't served as it says
	Problems []source.Problem `json:"problems,omitempty"`
	Mode     string           `json:"mode"`
	Remarks  []string         `json:"modeNotes,omitempty"`
	Kernel   string           `json:"kernel"`
	Remark   string           `json:"note,omitempty"`
	Evaluated

	Stages   []verdict.Step `json:"-"`
	Unserved string         `json:"-"` // what is added to the reason that no frontend matches
}

// Served is what an Explanation has where the packet matches a frontend.
type Served struct {
	Service    string      `json:"service,omitempty"`
	Via        string      `json:"via,omitempty"`
	Sources    []string    `json:"allowedSources,omitempty"`
	Policy     string      `json:"trafficPolicy,omitempty"`
	Pool       string      `json:"pool,omitempty"`
	Affinity   string      `json:"affinity,omitempty"`
	Candidates []Candidate `json:"candidates,omitempty"`
	// further endpoints with which flows of UDP and SCTP stay
	Unselected []string `json:"unselected,omitempty"`
	Scheduler  string   `json:"scheduler,omitempty"`
	// of the Service's clients on this node, where the mode counts them
	Counts *Count `json:"counts,omitempty"`
}

// Evaluated is what an Explanation has where policies are enforced.
type Evaluated struct {
	// of each endpoint, or of the destination; those that are alike together
	Policies     []Evaluation `json:"policies,omitempty"`
	PolicyKernel string       `json:"policyKernel,omitempty"`
}

// Candidate is an endpoint that the packet may go to.
type Candidate struct {
	Address string `json:"address"`
	Pod     string `json:"pod,omitempty"`
	Local   bool   `json:"onThisNode"`
	Weight  uint16 `json:"weight,omitempty"`
	Sees    string `json:"seesSource"`
	DSR     bool   `json:"directServerReturn,omitempty"` // past this one
	Dropped bool   `json:"droppedByPolicies,omitempty"`
}

// Explain returns what becomes of a packet. Endpoints for which policies decide alike are shown together, unless each
// is wanted.
func (n *Node) Explain(ctx context.Context, p verdict.Packet, each bool) (*Explanation, error) {
	a, err := n.Audit(ctx)
	if err != nil {
		return nil, err
	}
	v := verdict.Of(n.Services, p)
	e := n.explainServices(a, v, p)
	if n.Services.Policies == nil {
		return e, nil
	}
	x := &evaluator{Node: n, audit: a.policies, each: each}
	return e, x.explain(e, v, p)
}

// explainServices gathers what becomes of p by Services.
func (n *Node) explainServices(a *Audit, v verdict.Verdict, p verdict.Packet) *Explanation {
	e := &Explanation{From: p.Src.Addr().String(), To: fmt.Sprintf("%s/%s", p.Dst, p.Protocol), Node: n.Services.Node.Name,
		Origin: v.Origin.String(), Interface: p.In, Outcome: v.Action.String(), Reason: v.Reason, Stages: v.Steps,
		Kernel: "in sync: it holds nothing for this packet"}
	e.Remark, e.Mode = n.remoteSource(p.Src.Addr()), n.Mode.Name
	e.Problems = n.problemsOf(v.Frontend, model.Entry{Addr: p.Dst.Addr(), Port: p.Dst.Port(), Protocol: p.Protocol})
	f := v.Frontend
	if f == nil {
		e.Unserved = n.unserved(p.Dst.Addr())
		if len(v.Steps) == 1 {
			e.Reason += e.Unserved
		}
		if v.Action != verdict.Pass && len(v.Steps) == 1 {
			e.Kernel = "is not compared for packets that match no frontend"
		}
		return e
	}
	if len(f.Target(v.Origin).Pool.Backends) == 0 {
		e.Reason += ": " + n.Reasons[f.Entry].Empty
	}
	e.Policy, e.Remarks = n.Reasons[f.Entry].TrafficPolicy, n.Mode.About(f, v.Origin)
	e.Service, e.Via, e.Pool, e.Kernel = f.Service, f.Via, f.Target(v.Origin).Pool.Name, n.frontend(a, f)
	if c, counted := n.counts(a)[f.Service]; counted {
		e.Counts = &Count{Service: f.Service, Connections: c.Connections, Refused: c.Refused}
	}
	for _, s := range f.Sources {
		e.Sources = append(e.Sources, s.String())
	}
	if t := f.Target(v.Origin).Pool.Affinity; t > 0 {
		e.Affinity = t.String()
	}
	for _, b := range f.Target(v.Origin).Pool.Unselected {
		e.Unselected = append(e.Unselected, b.Addr.String())
	}
	e.Scheduler = n.Mode.Scheduler(v.Origin, f.Target(v.Origin).Pool.Scheduler).String()
	if f.Target(v.Origin).Pool.Ports {
		e.Scheduler += " and the client's port"
	}
	pods := n.Pods()
	for _, c := range v.Candidates {
		sees := e.From
		if c.Masqueraded {
			sees = "an address of node " + e.Node
		}
		e.Candidates = append(e.Candidates, Candidate{Address: c.Backend.Addr.String(),
			Pod: pods[c.Backend.Addr.Addr()], Local: c.Backend.Local, Weight: c.Backend.Weight, Sees: sees,
			DSR: c.DSR && !c.Backend.Local})
	}
	return e
}

// problemsOf returns the problems of the Service that a frontend is of, or that would have one at the entry.
func (n *Node) problemsOf(f *model.Frontend, at model.Entry) (l []source.Problem) {
	for _, p := range n.Problems {
		ours := f != nil && (p.Object == keyOf(f.Owner) ||
			f.Masquerade.Has(model.FromExternal) && p.Reason == service.DSRUnavailable)
		if ours || f == nil && p.Entry == at.String() {
			l = append(l, p)
		}
	}
	return l
}

// remoteSource states so if a is the address of a pod that runs on another node: its packets enter the network there.
func (n *Node) remoteSource(a netip.Addr) string {
	for _, o := range n.Objects {
		v, ok := o.(*corev1.Pod)
		if !ok || v.Spec.NodeName == n.Services.Node.Name || v.Spec.HostNetwork {
			continue
		}
		if slices.ContainsFunc(v.Status.PodIPs, func(ip corev1.PodIP) bool { return ip.IP == a.String() }) {
			return fmt.Sprintf("pod %s/%s runs on node %s, where its packets meet Services first: explain it there with "+
				"--node %s",
				v.Namespace, v.Name, v.Spec.NodeName, v.Spec.NodeName)
		}
	}
	return ""
}
