package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/model"
)

// plan is what the policies of a part come to for pods with the same named ports: a ruleset. It is counted before
// anything of that is made.
type plan struct {
	*part
	charge
	key     digest
	ports   []port // of the pods, where rules of ingress are about named ports
	figures figures
	excess  string // why it drops everything; "": it is within the bounds of one ruleset
	classes int    // that have it
	built   bool
	ruleset *ruleset // nil: nothing decides, or it isn't built
	closed  *ruleset // what is in its place where it drops everything; nil: it isn't built
}

// selection is the policies that select a class with pods on this node.
type selection struct {
	digest   digest // of the policies' sequences
	policies []*policy
	users    int // classes
	parts    [2][model.PolicyStages]*part
}

// part is the policies of a selection that take part in a direction and stage.
type part struct {
	direction model.Direction
	stage     int
	policies  []*policy
	otherwise model.Verdict // where no rule matches
	named     bool          // some rules are about named ports
	created   int64         // of the youngest of the policies
	key       digest        // of the policies' sequences, the direction and the stage
}

// updatePlans sets the plans of c: those of the policies that select it, or none if it has no pods on this node.
func (r *Resolver) updatePlans(c *class) {
	h, now := c.here, (*selection)(nil)
	if h.pods > 0 {
		now = r.selectionOf(c)
		now.users++
	}
	if was := h.selection; was != nil {
		if was.users--; was.users == 0 {
			r.forget(was)
		}
	}
	h.selection, h.named = now, false
	for _, d := range []model.Direction{model.Egress, model.Ingress} {
		for stage := range model.PolicyStages {
			p, was := r.planOf(c, d, stage), h.plans[d][stage]
			if h.plans[d][stage] = p; p != nil {
				p.classes++
			}
			if was == nil {
				continue
			}
			if was.classes--; was.classes == 0 {
				r.idlePlans = append(r.idlePlans, was)
			}
		}
	}
}

// sequencesOf computes which objects policies are, and something more.
func sequencesOf(l []*policy, extra []byte) digest {
	b := make([]byte, 0, 8*len(l)+len(extra))
	for _, p := range l {
		b = binary.BigEndian.AppendUint64(b, p.sequence)
	}
	return sha256.Sum256(append(b, extra...))
}

// selectionOf returns the policies that select c.
func (r *Resolver) selectionOf(c *class) *selection {
	r.buffer = r.policiesOf(c, r.buffer[:0])
	if r.last != nil && slices.Equal(r.buffer, r.last.policies) {
		return r.last
	}
	d := sequencesOf(r.buffer, nil)
	if s := r.selections[d]; s != nil {
		r.last = s
		return s
	}
	policies := slices.Clone(r.buffer)
	s := &selection{digest: d, policies: policies}
	r.selections[d], r.last = s, s
	for _, p := range policies {
		if p.users++; p.users == 1 {
			r.selecting[p] = struct{}{}
		}
	}
	return s
}

// forget removes a selection that no class has.
func (r *Resolver) forget(s *selection) {
	delete(r.selections, s.digest)
	if r.last == s {
		r.last = nil
	}
	for _, p := range s.policies {
		if p.users--; p.users == 0 {
			delete(r.selecting, p)
		}
	}
}

// partOf returns the policies of s that take part in a stage. Of the last stage enforced NetworkPolicies are alone;
// audited ones come before the Baseline tier, which then decides.
func (r *Resolver) partOf(s *selection, d model.Direction, stage int) *part {
	if x := s.parts[d][stage]; x != nil {
		return x
	}
	x := &part{direction: d, stage: stage, otherwise: model.VerdictNext}
	s.parts[d][stage] = x
	enforced := false
	for _, p := range s.policies {
		if p.ref.Tier == model.TierNetworkPolicy && !p.ref.Audit && r.rules(p).applies[d] {
			enforced = true
		}
	}
	var baseline []*policy
	for _, p := range s.policies {
		if !r.rules(p).applies[d] {
			continue
		}
		switch p.ref.Tier {
		case model.TierAdmin:
			if stage == model.StageAdmin {
				x.policies = append(x.policies, p)
			}
		case model.TierBaseline:
			if stage == model.StageLast && !enforced {
				baseline = append(baseline, p)
			}
		default:
			if stage == model.StageLast && p.ref.Audit != enforced {
				x.policies = append(x.policies, p)
			}
		}
	}
	if enforced && stage == model.StageLast {
		x.otherwise = model.VerdictDrop
	}
	if x.policies = append(x.policies, baseline...); slices.Equal(x.policies, s.policies) {
		x.policies = s.policies
	}
	for _, p := range x.policies {
		x.named, x.created = x.named || p.compiled.named[d], max(x.created, p.created)
	}
	x.key = sequencesOf(x.policies, []byte{byte(d), byte(stage)})
	return x
}

// name returns what rulesets of the part are called.
func (x *part) name() string { return rulesetName(x.direction, x.policies) }

// ofCluster reports whether all policies of the part are the cluster's.
func (x *part) ofCluster() bool {
	return !slices.ContainsFunc(x.policies, func(p *policy) bool { return p.cluster == nil })
}

// refsOf returns the policies' names.
func refsOf(policies []*policy) []model.PolicyRef {
	l := make([]model.PolicyRef, len(policies))
	for i, p := range policies {
		l[i] = p.ref
	}
	return l
}

// planOf returns the plan of c in one direction and stage, nil where nothing decides.
func (r *Resolver) planOf(c *class, d model.Direction, stage int) *plan {
	if c.here.selection == nil {
		return nil
	}
	x := r.partOf(c.here.selection, d, stage)
	if len(x.policies) == 0 {
		return nil
	}
	key, ports := x.key, []port(nil)
	switch {
	case x.named && d == model.Ingress:
		ports = c.named()
		key = sha256.Sum256(fmt.Appendf(key[:], " %v", ports))
	case x.named:
		c.here.named = true
		key = sha256.Sum256(fmt.Appendf(key[:], " %d", r.numbering))
	}
	p := r.plans[key]
	if p == nil {
		p = &plan{part: x, key: key, ports: ports}
		r.measure(p)
		r.plans[key] = p
	}
	return p
}

// dropPlans forgets plans that no class has.
func (r *Resolver) dropPlans() {
	for _, p := range r.idlePlans {
		if p.classes == 0 && r.plans[p.key] == p {
			delete(r.plans, p.key)
			r.wanted -= p.figures.cost()
		}
	}
	r.idlePlans = nil
}

// updateRulesets sets the rulesets of c to what its plans come to.
func (r *Resolver) updateRulesets(c *class) {
	h, changed := c.here, false
	for d := range h.plans {
		for stage, p := range h.plans[d] {
			rs, was := r.rulesetOf(c, p), h.rulesets[d][stage]
			if rs == was {
				continue
			}
			if rs != nil {
				rs.users++
			}
			if was != nil {
				if was.users--; was.users == 0 {
					r.idleRulesets = append(r.idleRulesets, was)
				}
			}
			h.rulesets[d][stage], changed = rs, true
		}
	}
	if changed {
		for p := range c.all() {
			if p.local {
				r.dirty(r.addressesOf(p)...)
			}
		}
	}
	if h.pods == 0 {
		c.here = nil
	}
}

// rulesetOf returns the ruleset that a plan of c comes to, nil where nothing decides.
func (r *Resolver) rulesetOf(c *class, p *plan) *ruleset {
	switch {
	case p == nil:
		return nil
	case p.excess != "" || r.rejections[rejectionKey{p, c.namespace}] != nil:
		if p.closed == nil || p.closed.gone {
			p.closed = r.close(p)
		}
		return p.closed
	case !p.built || p.ruleset != nil && p.ruleset.gone:
		p.ruleset, p.built = r.build(p), true
	}
	return p.ruleset
}

// removeRulesets removes rulesets that have no user any more.
func (r *Resolver) removeRulesets() {
	for _, rs := range r.idleRulesets {
		if rs.users > 0 || rs.gone {
			continue
		}
		delete(r.rulesets, rs.digest)
		r.portPieces -= rs.pieces
		r.release("ruleset", rs.digest)
		r.unused(rs.tables...)
		r.del(rs.model)
		*rs = ruleset{gone: true} // plans may still refer to it
	}
	r.idleRulesets = nil
}

// compare orders plans: that whose youngest policy is older comes first.
func (p *plan) compare(o *plan) int {
	return cmp.Or(cmp.Compare(p.created, o.created), cmp.Compare(p.direction, o.direction),
		cmp.Compare(p.stage, o.stage), slices.CompareFunc(p.policies, o.policies, func(a, b *policy) int {
			return a.ref.Compare(b.ref)
		}), slices.CompareFunc(p.ports, o.ports, comparePorts))
}
