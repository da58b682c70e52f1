package reachability

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// Replay is what policies make of recorded flows.
type Replay struct {
	Evaluated int     `json:"flowsEvaluated"`
	Denied    int     `json:"flowsCut"`
	Unknown   int     `json:"flowsOfUnknownPods"` // of pods that are gone, with all of their workload
	Cut       []Flows `json:"cut"`
}

// Flows are recorded flows from one workload or address to a port of another that the same rules deny.
type Flows struct {
	From        string   `json:"from"`
	To          string   `json:"to"`
	Port        string   `json:"port"`
	Connections uint64   `json:"connections"`
	Example     string   `json:"example"`
	Reason      string   `json:"reason"`
	Rules       []string `json:"rules"`
}

// replayer evaluates flows.
type replayer struct {
	*Cluster
	log       *flowlog.Log
	workloads *workloads
	running   map[*Workload]*corev1.Pod // a pod of each workload that has one, the first by name
}

// Replay evaluates recorded flows by the policies of c. A pod that is gone is evaluated as another one of its workload.
func (c *Cluster) Replay(l *flowlog.Log) *Replay {
	r := &replayer{c, l, newWorkloads(c, l), map[*Workload]*corev1.Pod{}}
	for _, v := range c.pods {
		w := r.workloads.byPod[v.Namespace+"/"+v.Name]
		if first := r.running[w]; w != nil && (first == nil || v.Name < first.Name) {
			r.running[w] = v
		}
	}
	out, cut := &Replay{Cut: []Flows{}}, map[string]*Flows{}
	for _, f := range l.Flows {
		o, known := r.evaluate(f)
		if !known {
			out.Unknown++
			continue
		}
		if out.Evaluated++; o.Verdict != model.VerdictDrop {
			continue
		}
		out.Denied++
		k := Flows{From: r.called(f.Client), To: r.called(f.Server), Port: portText(f.Flow), Example: f.Key().String(),
			Reason: o.Reason, Rules: []string{}}
		for _, by := range o.By {
			k.Rules = append(k.Rules, by.String())
		}
		key := strings.Join([]string{k.From, k.To, k.Port, strings.Join(k.Rules, ",")}, "\x00")
		if cut[key] == nil {
			cut[key] = &k
		}
		cut[key].Connections += f.Count
	}
	for _, key := range slices.Sorted(maps.Keys(cut)) {
		out.Cut = append(out.Cut, *cut[key])
	}
	return out
}

// portText returns a flow's port as "80/tcp", or its protocol.
func portText(f flowlog.Flow) string {
	if !flowlog.HasPorts(f.Protocol) {
		return "protocol " + f.Protocol.String()
	}
	return Span{Protocol: f.Protocol, First: f.Port, Last: f.Port}.String()
}

// called returns the name of an end's workload, else its address or the pod's name.
func (r *replayer) called(e flowlog.End) string {
	e = r.named(e)
	if w := r.workloads.byPod[e.Pod]; w != nil {
		return w.Namespace + "/" + w.Name
	}
	return e.String()
}

// evaluate returns what policies decide about a flow: those of its ends that it passed when it was recorded. It returns
// false where an end is not known any more.
func (r *replayer) evaluate(f flowlog.Seen) (o verdict.PolicyOutcome, known bool) {
	f.Client, f.Server = r.named(f.Client), r.named(f.Server)
	egress, ingress := halves(r.log, f, r.nodeOf(r.log))
	if f.Client.Pod == "" && !f.SeenBy(r.nodeOf(r.log)(f.Server)) {
		ingress = false // its own node sees which address the client has there
	}
	src, ok := r.address(f.Client)
	dst, also := r.address(f.Server)
	if !ok || !also {
		return o, false
	}
	p := verdict.Packet{Src: netip.AddrPortFrom(src, 0), Dst: netip.AddrPortFrom(dst, f.Port), Protocol: f.Protocol}
	if egress {
		o = verdict.Egress(r.view(r.NodeOf(src)), p)
	}
	if ingress {
		o = verdict.Ingress(r.view(r.NodeOf(dst)), p, o)
	}
	return o, true
}

// address returns the address that stands for an end now: a pod's of that name, else of its workload.
func (r *replayer) address(e flowlog.End) (netip.Addr, bool) {
	if e.Pod == "" {
		return e.Addr, true
	}
	v := cmp.Or(r.pod(e.Pod), r.running[r.workloads.byPod[e.Pod]])
	if v == nil {
		return e.Addr, false
	}
	for _, a := range r.podOwn(v) {
		if a.Is4() == e.Addr.Is4() {
			return a, true
		}
	}
	return e.Addr, false
}
