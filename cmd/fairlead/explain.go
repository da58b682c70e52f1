package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/node"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// explainCommand returns what becomes of a packet and why.
func explainCommand() *cobra.Command {
	var n nodeFlags
	var o output
	var each bool
	c := &cobra.Command{
		Use:   "explain FROM TO:PORT[/PROTOCOL]",
		Short: "Explain where a packet goes and why, and check that against the kernel",
		Long: `Explain what a node does with the first packet of a connection, and why: the frontend it matches, its allowed
source ranges, the endpoints it may go to, the source address that they see, and with --policy-mode the network
policies of both ends and the rules that decide. The result is checked against what the kernel holds in this
network namespace.

FROM is an address, a pod (namespace/name), a node (node/NAME, or its name), or "outside".
TO is an address, a Service (web, shop/web, web.shop or web.shop.svc.cluster.local), a pod or a node, with
a port by number or name. PROTOCOL is tcp, udp or sctp; without it that of the Service's port, else tcp.`,
		Example: `  fairlead explain --source examples/shop --node a shop/client shop/web:http
  fairlead explain --source examples/shop --node a outside a:30080
  fairlead explain --source examples/shop --node a 192.0.2.7 '[fd00:96::10]:53/udp'`,
		Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			w, err := n.read(c.Context(), true)
			if err != nil {
				return err
			}
			p, err := w.names().Packet(args[0], args[1])
			if err != nil {
				return err
			}
			if w.services.Node.PodInterfaces.Name != "" {
				if p.In, err = node.InterfaceTo(p.Src.Addr()); err != nil { // where its answers leave, it comes in
					return err
				}
			}
			a, err := mode.Check(c.Context(), w.mode, w.services)
			if err != nil {
				return err
			}
			e, err := explain(c.Context(), w, a, p, each)
			if err != nil {
				return err
			}
			return o.print(out(c), e, e.tree)
		},
	}
	n.add(c)
	o.add(c)
	c.Flags().BoolVar(&each, "all-backends", false,
		"show what policies decide for each endpoint, also where it is the same")
	return c
}

// explained is what explain prints.
type explained struct {
	From       string               `json:"from"`
	To         string               `json:"to"`
	Node       string               `json:"node"`
	Origin     string               `json:"origin"`
	Interface  string               `json:"interface,omitempty"` // that it comes in by, where pods are known by theirs
	Outcome    string               `json:"outcome"`
	Reason     string               `json:"reason"`
	Service    string               `json:"service,omitempty"`
	Via        string               `json:"via,omitempty"`
	Sources    []string             `json:"allowedSources,omitempty"`
	Policy     string               `json:"trafficPolicy,omitempty"`
	Pool       string               `json:"pool,omitempty"`
	Affinity   string               `json:"affinity,omitempty"`
	Candidates []explainedCandidate `json:"candidates,omitempty"`
	// further endpoints with which flows of UDP and SCTP stay
	Unselected []string `json:"unselected,omitempty"`
	Scheduler  string   `json:"scheduler,omitempty"`
	// of the Service asked for, if the frontend isn't served as it says
	Problems []source.Problem `json:"problems,omitempty"`
	Mode     string           `json:"mode"`
	Remarks  []string         `json:"modeNotes,omitempty"`
	// of the Service's clients on this node, where the mode counts them
	Counts *shownCount `json:"counts,omitempty"`
	Kernel string      `json:"kernel"`
	Remark string      `json:"note,omitempty"`
	// of each endpoint, or of the destination; those that are alike together
	Policies     []explainedPolicy `json:"policies,omitempty"`
	PolicyKernel string            `json:"policyKernel,omitempty"`

	steps    []verdict.Step
	unserved string // what is added to the reason that no frontend matches
}

type explainedCandidate struct {
	Address string `json:"address"`
	Pod     string `json:"pod,omitempty"`
	Local   bool   `json:"onThisNode"`
	Weight  uint16 `json:"weight,omitempty"`
	Sees    string `json:"seesSource"`
	DSR     bool   `json:"directServerReturn,omitempty"` // past this one
	Dropped bool   `json:"droppedByPolicies,omitempty"`
}

// explain decides and gathers.
func explain(ctx context.Context, w *snapshot, a *mode.Audit, p verdict.Packet, each bool) (explained, error) {
	v := verdict.Of(w.services, p)
	e := explainServices(w, a, v, p)
	if w.services.Policies == nil {
		return e, nil
	}
	audit, err := mode.CheckPolicies(ctx, w.engine, w.services.Policies)
	if err != nil {
		return e, err
	}
	x := &policyExplainer{snapshot: w, audit: audit, each: each}
	return e, x.explain(&e, v, p)
}

// explainServices gathers what becomes of p by Services.
func explainServices(w *snapshot, a *mode.Audit, v verdict.Verdict, p verdict.Packet) explained {
	e := explained{From: p.Src.Addr().String(), To: fmt.Sprintf("%s/%s", p.Dst, p.Protocol), Node: w.services.Node.Name,
		Origin: v.Origin.String(), Interface: p.In, Outcome: v.Action.String(), Reason: v.Reason, steps: v.Steps,
		Kernel: "in sync: it holds nothing for this packet"}
	e.Remark, e.Mode = w.remoteSource(p.Src.Addr()), w.mode.Name
	e.Problems = w.problemsOf(v.Frontend, model.Entry{Addr: p.Dst.Addr(), Port: p.Dst.Port(), Protocol: p.Protocol})
	f := v.Frontend
	if f == nil {
		e.unserved = resolve.UnservedAt(w.objects, p.Dst.Addr(), w.config.Own.ServiceProxyName)
		if len(v.Steps) == 1 {
			e.Reason += e.unserved
		}
		if v.Action != verdict.Pass && len(v.Steps) == 1 {
			e.Kernel = "is not compared for packets that match no frontend"
		}
		return e
	}
	if len(f.Target(v.Origin).Pool.Backends) == 0 {
		e.Reason += ": " + w.whyEmpty(f.Entry)
	}
	e.Policy, e.Remarks = resolve.TrafficPolicy(w.objects, f), w.mode.About(f, v.Origin)
	e.Service, e.Via, e.Pool, e.Kernel = f.Service, f.Via, f.Target(v.Origin).Pool.Name, kernelSays(w, a, f)
	if n, counted := w.counts(a)[f.Service]; counted {
		e.Counts = &shownCount{Service: f.Service, Connections: n.Connections, Refused: n.Refused}
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
	e.Scheduler = w.mode.Scheduler(v.Origin, f.Target(v.Origin).Pool.Scheduler).String()
	if f.Target(v.Origin).Pool.Ports {
		e.Scheduler += " and the client's port"
	}
	pods := w.names().Pods()
	for _, c := range v.Candidates {
		sees := e.From
		if c.Masqueraded {
			sees = "an address of node " + e.Node
		}
		e.Candidates = append(e.Candidates, explainedCandidate{Address: c.Backend.Addr.String(),
			Pod: pods[c.Backend.Addr.Addr()], Local: c.Backend.Local, Weight: c.Backend.Weight, Sees: sees,
			DSR: c.DSR && !c.Backend.Local})
	}
	return e
}

// problemsOf returns the problems of the Service that a frontend is of, or that would have one at the entry.
func (w *snapshot) problemsOf(f *model.Frontend, at model.Entry) (l []source.Problem) {
	for _, p := range w.problems {
		ours := f != nil && (p.Object == keyOf(f.Owner) ||
			f.Masquerade.Has(model.FromExternal) && p.Reason == resolve.DSRUnavailable)
		if ours || f == nil && p.Entry == at.String() {
			l = append(l, p)
		}
	}
	return l
}

// remoteSource states so if a is the address of a pod that runs on another node: its packets enter the network there.
func (w *snapshot) remoteSource(a netip.Addr) string {
	for _, o := range w.objects {
		v, ok := o.(*corev1.Pod)
		if !ok || v.Spec.NodeName == w.services.Node.Name || v.Spec.HostNetwork {
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

// branch is a line of explain's tree.
type branch struct {
	depth int
	text  string
}

// branches returns the lines of the tree for people.
func (e explained) branches() (l []branch) {
	add := func(depth int, format string, args ...any) {
		l = append(l, branch{depth, fmt.Sprintf(format, args...)})
	}
	by := ""
	if e.Interface != "" && e.Origin != "node" {
		by = ", by interface " + e.Interface
	}
	origins := map[string]string{"node": "the node itself", "pod": "a pod of this node's network", "external": "external"}
	add(0, "source, seen from node %s: %s%s", e.Node, origins[e.Origin], by)
	e.frontend(add)
	if len(e.Candidates) > 0 {
		forwarded := map[bool]string{true: "forwarded", false: "translated"}[e.Outcome == "forward"]
		add(0, "%s to one of %d endpoints, chosen by %s", forwarded, len(e.Candidates), e.Scheduler)
		for _, c := range e.Candidates {
			add(1, "%s", c.line())
		}
	}
	for _, p := range e.Policies {
		p.branches(len(e.Policies) == 1, add)
	}
	switch {
	case e.Outcome == "forward", e.Outcome == "drop" && len(e.Policies) > 0:
	case e.Outcome == "pass":
		add(0, "not translated: it follows the node's routes and other rules")
	default:
		add(0, "%s: %s", map[string]string{"reject": "rejected", "drop": "dropped"}[e.Outcome], e.Reason)
	}
	if e.Unselected != nil {
		add(0, "existing flows also stay with serving endpoints that get no new ones: %s", few(e.Unselected))
	}
	if e.Counts != nil {
		add(0, "clients so far: %d connections to an endpoint, %d rejected without one", e.Counts.Connections,
			e.Counts.Refused)
	}
	for _, p := range e.Problems {
		add(0, "problem: %s", p)
	}
	if e.PolicyKernel == "" {
		add(0, "kernel: %s", e.Kernel)
	} else {
		add(0, "kernel: Services %s; policies %s", e.Kernel, e.PolicyKernel)
	}
	return l
}

// frontend adds what is said of the frontend.
func (e explained) frontend(add func(depth int, format string, args ...any)) {
	for _, step := range e.steps {
		switch {
		case step.Stage == verdict.StageFrontend && e.Service == "":
			add(0, "%s", e.noFrontend())
		case step.Stage == verdict.StageFrontend:
			add(0, "frontend: %s of Service %s", e.Via, e.Service)
		case step.Stage == verdict.StageSources && e.Sources != nil:
			add(1, "allowed source ranges: %s", strings.Join(e.Sources, ", "))
		}
	}
	if e.Policy != "" {
		add(1, "%s", e.Policy)
	}
	if e.Affinity != "" {
		add(1, "session affinity: ClientIP, %s", e.Affinity)
	}
}

// noFrontend returns what is said where no frontend matches: the reason, unless the outcome's line has it.
func (e explained) noFrontend() string {
	if e.Outcome == "pass" || len(e.steps) > 1 {
		return "frontend: none: " + e.steps[0].Reason + e.unserved
	}
	return "frontend: none"
}

// line returns what is said of a candidate.
func (c explainedCandidate) line() string {
	words := []string{c.Address}
	if c.Pod != "" {
		words[0] += " pod " + c.Pod
	}
	if c.Local {
		words = append(words, "on this node")
	} else {
		words = append(words, "remote")
	}
	if c.Weight > 0 {
		words = append(words, fmt.Sprintf("weight %d", c.Weight))
	}
	words = append(words, "sees source "+c.Sees)
	if c.DSR {
		words = append(words, "its node answers the client directly")
	}
	if c.Dropped {
		words = append(words, "dropped by policies")
	}
	return strings.Join(words, ", ")
}

// tree prints for people.
func (e explained) tree(p *page) error {
	l := e.branches()
	err := p.paragraph("", "", e.From+" → "+e.To)
	for i, b := range l {
		last := true // of its depth below the same branch
		for _, next := range l[i+1:] {
			if next.depth <= b.depth {
				last = next.depth < b.depth
				break
			}
		}
		indent := strings.Repeat("│  ", b.depth)
		first, rest := indent+"├─ ", indent+"│  "
		if last {
			first, rest = indent+"└─ ", indent+"   "
		}
		err = errors.Join(err, p.paragraph(first, rest, b.text))
	}
	for _, n := range e.Remarks {
		err = errors.Join(err, p.paragraph("note: ", "      ", fmt.Sprintf("mode %s: %s", e.Mode, n)))
	}
	if e.Remark != "" {
		err = errors.Join(err, p.paragraph("note: ", "      ", e.Remark))
	}
	return err
}
