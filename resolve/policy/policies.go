package policy

import (
	"cmp"
	"slices"
	"strings"
	"unique"

	networkingv1 "k8s.io/api/networking/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// policy is a NetworkPolicy or ClusterNetworkPolicy.
type policy struct {
	ref      model.PolicyRef
	sequence uint64 // of the object
	created  int64
	closed   string              // why it allows nothing; "": it is within the bounds
	spec     unique.Handle[spec] // of a NetworkPolicy
	*reading                     // nil: it has been compared with no pod of this node
}

// stored is a NetworkPolicy of a namespace: most have had no pod of this node.
type stored struct {
	name    string
	spec    unique.Handle[spec]
	created uint32 // in seconds
	audit   bool
	policy  *policy // nil: no pod of this node has been in the namespace
}

func (s *stored) size() Bounds { return s.spec.Value().size }

// policyAt returns the policy of a place among n's.
func (r *Resolver) policyAt(n *namespace, at int) *policy {
	s := &n.policies[at]
	if s.policy == nil {
		r.sequence++
		s.policy = &policy{sequence: r.sequence, created: int64(s.created), spec: s.spec,
			closed: s.size().excess(r.limits.Policy), ref: model.PolicyRef{Tier: model.TierNetworkPolicy, Namespace: n.name,
				Name: s.name, Audit: s.audit}}
	}
	return s.policy
}

// spec is what a NetworkPolicy says, as it is stored: most policies of a cluster concern no pod of this node, and many
// say the same.
type spec struct {
	encoded string // a networkingv1.NetworkPolicySpec
	size    Bounds
}

func storeSpec(o *networkingv1.NetworkPolicy) unique.Handle[spec] {
	b, err := o.Spec.Marshal()
	if err != nil {
		panic(err) // it fails only where its buffer is too small
	}
	return unique.Make(spec{string(b), sizeOf(o)})
}

// decode returns the spec.
func (p *policy) decode() *networkingv1.NetworkPolicySpec {
	s := new(networkingv1.NetworkPolicySpec)
	if err := s.Unmarshal([]byte(p.spec.Value().encoded)); err != nil {
		panic(err) // it was encoded here
	}
	return s
}

// reading is what has been read of a policy: its subject, and its rules once it selects a pod of this node.
type reading struct {
	cluster  *cnpv1.ClusterNetworkPolicy // nil: it is a NetworkPolicy
	priority int32

	namespaces, labels selector // the subject
	badSubject         error
	compiled           *compiled
	users              int // selections that have it
}

// key returns the object's.
func (p *policy) key() source.Key {
	k := source.Key{Kind: source.NetworkPolicy, Namespace: p.ref.Namespace, Name: p.ref.Name}
	if p.ref.Namespace == "" {
		k.Kind = source.ClusterNetworkPolicy
	}
	return k
}

// applyPolicy updates a NetworkPolicy.
func (r *Resolver) applyPolicy(key source.Key, o *networkingv1.NetworkPolicy) {
	n := r.namespace(key.Namespace)
	at, there := slices.BinarySearchFunc(n.policies, key.Name, func(s stored, name string) int {
		return strings.Compare(s.name, name)
	})
	if there {
		was := &n.policies[at]
		n.size = n.size.minus(was.size())
		r.count(was.audit, -1)
	}
	if o != nil {
		s := stored{name: key.Name, spec: storeSpec(o), created: seconds(o.CreationTimestamp),
			audit: r.audited(o.Annotations)}
		n.size = n.size.plus(s.size())
		if r.count(s.audit, 1); there {
			n.policies[at] = s
		} else {
			n.policies = slices.Insert(n.policies, at, s)
		}
	} else if there {
		n.policies = slices.Delete(n.policies, at, at+1)
	}
	r.bound(n)
	for _, c := range n.classes {
		r.reselect(c)
	}
	r.drop(n)
}

// reselect marks c, if it has pods of this node, as selected by other policies.
func (r *Resolver) reselect(c *class) {
	if c.here != nil {
		r.dirtyLocal[c] = struct{}{}
	}
}

func (r *Resolver) audited(annotations map[string]string) bool {
	return r.config.Audit || annotations[AuditAnnotation] == "true"
}

// count counts the enforced policies of the cluster.
func (r *Resolver) count(audit bool, n int) {
	if !audit {
		r.policies += n
		r.staleNode = true
	}
}

// bound closes the policies of a namespace that are beyond its bound: the oldest stay.
func (r *Resolver) bound(n *namespace) {
	over := n.size.excess(r.limits.Namespace) != ""
	if !over && !n.over {
		return
	}
	n.over = over
	sum := Bounds{}
	policies := make([]*policy, len(n.policies))
	for i := range policies {
		policies[i] = r.policyAt(n, i)
	}
	for _, p := range slices.SortedFunc(slices.Values(policies), func(a, b *policy) int {
		return cmp.Or(cmp.Compare(a.created, b.created), strings.Compare(a.ref.Name, b.ref.Name))
	}) {
		size := p.spec.Value().size
		closed := size.excess(r.limits.Policy)
		if closed == "" {
			if with := sum.plus(size).excess(r.limits.Namespace); with != "" {
				closed = "with those that are older the namespace's policies have " + with
			} else {
				sum = sum.plus(size)
			}
		}
		if closed != p.closed { // another policy, so that what is remembered of this one is not used
			r.sequence++
			other := *p
			other.closed, other.reading, other.sequence = closed, nil, r.sequence
			n.policies[slices.Index(policies, p)].policy = &other
		}
	}
}

// applyCluster updates a ClusterNetworkPolicy.
func (r *Resolver) applyCluster(key source.Key, o *cnpv1.ClusterNetworkPolicy) {
	if was := r.cluster[key.Name]; was != nil {
		delete(r.cluster, key.Name)
		r.tiers[was.ref.Tier] = slices.DeleteFunc(r.tiers[was.ref.Tier], func(p *policy) bool { return p == was })
		r.count(was.ref.Audit, -1)
	}
	delete(r.unreadable, key)
	r.staleProblems = true
	if o != nil {
		r.addCluster(key, o)
	}
	for c := range r.local {
		r.dirtyLocal[c] = struct{}{}
	}
}

func (r *Resolver) addCluster(key source.Key, o *cnpv1.ClusterNetworkPolicy) {
	r.sequence++
	p := &policy{sequence: r.sequence, closed: sizeOfCluster(o).excess(r.limits.Policy),
		ref:     model.PolicyRef{Name: key.Name, Audit: r.audited(o.Annotations)},
		reading: &reading{cluster: o, priority: o.Spec.Priority}}
	var bad problems
	switch o.Spec.Tier {
	case cnpv1.AdminTier:
		p.ref.Tier = model.TierAdmin
	case cnpv1.BaselineTier:
		p.ref.Tier = model.TierBaseline
	default:
		bad.add("spec.tier", NotKnown, "%q: the policy applies to no pod; use Admin or Baseline", o.Spec.Tier)
	}
	var err error
	if p.namespaces, p.labels, err = readSubject(&o.Spec.Subject); err != nil {
		bad.add("spec.subject", NotKnown, "%v: the policy applies to no pod", err)
	}
	if bad.list != nil {
		r.unreadable[key] = bad.of(key)
		return
	}
	r.cluster[key.Name] = p
	tier := append(r.tiers[p.ref.Tier], p)
	slices.SortFunc(tier, func(a, b *policy) int {
		return cmp.Or(cmp.Compare(a.priority, b.priority), strings.Compare(a.ref.Name, b.ref.Name))
	})
	r.tiers[p.ref.Tier] = tier
	r.count(p.ref.Audit, 1)
}

// selects reports whether p selects the pods of c. A NetworkPolicy is one of c's namespace.
func (p *policy) selects(c *class) bool {
	if p.reading == nil {
		p.reading = &reading{}
		p.labels, p.badSubject = readSelector(&p.decode().PodSelector)
	}
	if p.cluster != nil && !p.namespaces.matches(c.namespace.labels) {
		return false
	}
	return p.labels.matches(c.labels) // one that can't be read selects all
}

// rules returns p's rules.
func (r *Resolver) rules(p *policy) *compiled {
	if p.compiled == nil {
		if p.cluster != nil {
			p.compiled = readCluster(p.cluster, p.ref, p.closed, r.config.UnknownPods != AllowUnknownPods)
			return p.compiled
		}
		p.compiled = readRules(p.decode(), p.ref, p.closed)
		if p.badSubject != nil {
			p.compiled.add("spec.podSelector", Invalid, "%v: the policy selects every pod of its namespace until this is "+
				"corrected", p.badSubject)
		}
	}
	return p.compiled
}

// policiesOf returns the policies that select c: the tiers' in order, then the NetworkPolicies by name.
func (r *Resolver) policiesOf(c *class, out []*policy) []*policy {
	for _, tier := range r.tiers {
		for _, p := range tier {
			if p.selects(c) {
				out = append(out, p)
			}
		}
	}
	for i := range c.namespace.policies {
		if p := r.policyAt(c.namespace, i); p.selects(c) {
			out = append(out, p)
		}
	}
	return out
}
