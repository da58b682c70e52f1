package reachability

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source/manifest"
	"fairlead.dev/fairlead/verdict"
)

// The bounds of what one expectation comes to.
const (
	maxConnections = 50000
	maxFailures    = 10 // that are named
)

// Result is what was found of an expectation.
type Result struct {
	Expectation
	Evaluated int          // connections
	Failures  []Connection // the first that are not as expected
	Failed    int          // all of them
	Error     string       // why it could not be evaluated, "" if it was
}

// OK reports whether every connection is as expected.
func (r Result) OK() bool { return r.Error == "" && r.Failed == 0 }

// Lines returns what is wrong, a sentence a line.
func (r Result) Lines() (out []string) {
	if r.Error != "" {
		return []string{r.Error}
	}
	for _, k := range r.Failures {
		out = append(out, k.String())
	}
	if n := r.Failed - len(r.Failures); n > 0 {
		out = append(out, fmt.Sprintf("%d more connections of %d", n, r.Evaluated))
	}
	return out
}

// Connection is one that was evaluated.
type Connection struct {
	From   string `json:"from"`
	To     string `json:"to"`
	Port   string `json:"port"`
	Fate   Fate   `json:"fate"`
	Reason string `json:"reason"`
}

// String returns "shop/client → shop/db:5432/tcp is denied: …".
func (c Connection) String() string {
	return fmt.Sprintf("%s → %s:%s is %s: %s", c.From, c.To, c.Port, c.Fate, c.Reason)
}

// Check evaluates expectations. Each holds if all connections that it names are as it says.
func (c *Cluster) Check(l []Expectation) []Result {
	out := make([]Result, len(l))
	for i, e := range l {
		out[i] = Result{Expectation: e}
		if err := c.check(&out[i]); err != nil {
			out[i].Error = err.Error()
		}
	}
	return out
}

func (c *Cluster) check(r *Result) error {
	from, err := c.allEnds(r.From, false)
	if err != nil {
		return fmt.Errorf("from: %w", err)
	}
	to, err := c.allEnds(r.To, true)
	if err != nil {
		return fmt.Errorf("to: %w", err)
	}
	if r.By != "" {
		if err := c.knows(r.By); err != nil {
			return err
		}
	}
	for _, text := range r.Ports {
		for _, e := range to {
			l, p, err := c.at(e, text)
			if err != nil {
				return fmt.Errorf("port: %w", err)
			}
			for _, dst := range l {
				if err := c.checkAll(r, from, dst, p); err != nil {
					return err
				}
			}
		}
	}
	if r.Evaluated == 0 {
		return fmt.Errorf("it names no connection: both ends are one pod, whose own packets never leave it")
	}
	return nil
}

// allEnds returns what all texts name.
func (c *Cluster) allEnds(texts []string, destination bool) (out []end, err error) {
	for _, text := range texts {
		l, err := c.ends(text, destination)
		if err != nil {
			return nil, err
		}
		out = append(out, l...)
	}
	return out, nil
}

// checkAll evaluates the connections from each end to one.
func (c *Cluster) checkAll(r *Result, from []end, dst end, p port) error {
	for _, src := range from {
		if src.pod != nil && src.pod == dst.pod {
			continue
		}
		if r.Evaluated == maxConnections {
			return fmt.Errorf("it names more than %d connections: narrow it", maxConnections)
		}
		r.Evaluated++
		k, err := c.connect(src, dst, p, r.By)
		if err != nil {
			return err
		}
		if k.Fate == r.Expect {
			continue
		}
		if r.Failed++; len(r.Failures) < maxFailures {
			r.Failures = append(r.Failures, k)
		}
	}
	return nil
}

// connect evaluates a connection, over each family that both ends have. Where other policies decide than by says, its
// fate is Mixed.
func (c *Cluster) connect(src, dst end, p port, by string) (Connection, error) {
	k := Connection{From: src.name, To: dst.name, Port: "*"}
	if !p.every {
		k.Port = fmt.Sprintf("%d/%s", p.number, p.protocol)
	}
	for _, o := range c.outcomes(src, dst, p) {
		fate, reason, rules := o.Fate()
		if by != "" && (fate == Allowed || fate == Denied) && !slices.ContainsFunc(rules, func(r model.RuleRef) bool {
			return names(r.PolicyRef, by)
		}) {
			reason, fate = fmt.Sprintf("%s, not by %s: %s", fate, by, reason), Mixed
		}
		switch {
		case k.Fate == "":
			k.Fate, k.Reason = fate, reason
		case k.Fate != fate && k.Fate != Mixed:
			k.Fate, k.Reason = Mixed, fmt.Sprintf("%s: %s; %s: %s", k.Fate, k.Reason, fate, reason)
		}
	}
	if k.Fate == "" {
		return k, fmt.Errorf("%s and %s have no addresses of one family: those are %s and %s", src.name, dst.name,
			family(src.addrs[0]), family(dst.addrs[0]))
	}
	return k, nil
}

// names reports whether by names the policy p: namespace/name, the name of a ClusterNetworkPolicy, or either behind its
// tier.
func names(p model.PolicyRef, by string) bool {
	short := p.Name
	if p.Namespace != "" {
		short = p.Namespace + "/" + p.Name
	}
	return by == short || by == p.String()
}

// knows returns an error if no policy is named so.
func (c *Cluster) knows(by string) error {
	var all []string
	for _, o := range c.Names {
		ref, is := model.PolicyRef{Namespace: o.GetNamespace(), Name: o.GetName()}, false
		switch v := o.(type) {
		case *networkingv1.NetworkPolicy:
			ref.Tier, is = model.TierNetworkPolicy, true
		case *cnpv1.ClusterNetworkPolicy:
			is = true
			if v.Spec.Tier == cnpv1.BaselineTier {
				ref.Tier = model.TierBaseline
			}
		}
		if is && names(ref, by) {
			return nil
		}
		if is {
			all = append(all, strings.TrimPrefix(ref.Namespace+"/"+ref.Name, "/"))
		}
	}
	if like := manifest.Nearest(by, all); like != "" {
		return fmt.Errorf("by: there is no policy %q: did you mean %q?", by, like)
	}
	return fmt.Errorf("by: there is no policy %q: use namespace/name, or the name of a ClusterNetworkPolicy", by)
}

// outcomes returns what becomes of connections over each family that both ends have; to an address where nothing stands
// for a Service only if none does: a node port may be one of a single family.
func (c *Cluster) outcomes(src, dst end, p port) (out []Outcome) {
	served := false
	for _, to := range dst.addrs {
		i := slices.IndexFunc(src.addrs, func(a netip.Addr) bool { return a.Is4() == to.Is4() })
		switch {
		case i < 0:
		case p.every:
			for _, s := range c.spans(src.addrs[i], to) {
				s.Policy.Reason += " (" + s.String() + ")"
				out = append(out, Outcome{Paths: []Path{{Policy: s.Policy}}})
			}
		default:
			o := c.Decide(verdict.Packet{Src: netip.AddrPortFrom(src.addrs[i], 0), Dst: netip.AddrPortFrom(to, p.number),
				Protocol: p.protocol})
			served = served || o.Action != verdict.Pass
			out = append(out, o)
		}
	}
	if served {
		out = slices.DeleteFunc(out, func(o Outcome) bool { return o.Action == verdict.Pass })
	}
	return out
}
