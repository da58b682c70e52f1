package policy

import (
	"cmp"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// policy is a NetworkPolicy or ClusterNetworkPolicy. Its rules are read when it first selects a pod of this node.
type policy struct {
	key      source.Key
	ref      model.PolicyRef
	sequence uint64 // of the object
	priority int32
	created  int64
	size     Bounds
	closed   string // why it allows nothing; "": it is within the bounds

	network *networkingv1.NetworkPolicy
	cluster *cnpv1.ClusterNetworkPolicy

	namespaces, labels selector // the subject
	subjectRead        bool
	badSubject         error
	compiled           *compiled
	users              int // selections that have it
}

// applyPolicy updates a NetworkPolicy.
func (r *Resolver) applyPolicy(key source.Key, o *networkingv1.NetworkPolicy) {
	n := r.namespace(key.Namespace)
	at, there := slices.BinarySearchFunc(n.policies, key.Name, func(p *policy, name string) int {
		return strings.Compare(p.key.Name, name)
	})
	if there {
		was := n.policies[at]
		n.size = n.size.minus(was.size)
		r.count(was, -1)
	}
	if o != nil {
		r.sequence++
		p := &policy{key: key, network: o, sequence: r.sequence, created: o.CreationTimestamp.Unix(), size: sizeOf(o),
			ref: model.PolicyRef{Tier: model.TierNetworkPolicy, Namespace: key.Namespace, Name: key.Name,
				Audit: r.audited(o.Annotations)}}
		p.closed = p.size.excess(r.limits.Policy)
		n.size = n.size.plus(p.size)
		if r.count(p, 1); there {
			n.policies[at] = p
		} else {
			n.policies = slices.Insert(n.policies, at, p)
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
func (r *Resolver) count(p *policy, n int) {
	if !p.ref.Audit {
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
	for _, p := range slices.SortedFunc(slices.Values(n.policies), func(a, b *policy) int {
		return cmp.Or(cmp.Compare(a.created, b.created), strings.Compare(a.key.Name, b.key.Name))
	}) {
		closed := p.size.excess(r.limits.Policy)
		if closed == "" {
			if with := sum.plus(p.size).excess(r.limits.Namespace); with != "" {
				closed = "with those that are older the namespace's policies have " + with
			} else {
				sum = sum.plus(p.size)
			}
		}
		if closed != p.closed { // another policy, so that what is remembered of this one is not used
			r.sequence++
			other := *p
			other.closed, other.compiled, other.sequence, other.users = closed, nil, r.sequence, 0
			n.policies[slices.Index(n.policies, p)] = &other
		}
	}
}

// applyCluster updates a ClusterNetworkPolicy.
func (r *Resolver) applyCluster(key source.Key, o *cnpv1.ClusterNetworkPolicy) {
	if was := r.cluster[key.Name]; was != nil {
		delete(r.cluster, key.Name)
		r.tiers[was.ref.Tier] = slices.DeleteFunc(r.tiers[was.ref.Tier], func(p *policy) bool { return p == was })
		r.count(was, -1)
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
	p := &policy{key: key, cluster: o, sequence: r.sequence, priority: o.Spec.Priority, size: sizeOfCluster(o),
		ref: model.PolicyRef{Name: key.Name, Audit: r.audited(o.Annotations)}}
	p.closed = p.size.excess(r.limits.Policy)
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
	p.subjectRead = true
	r.cluster[key.Name] = p
	tier := append(r.tiers[p.ref.Tier], p)
	slices.SortFunc(tier, func(a, b *policy) int {
		return cmp.Or(cmp.Compare(a.priority, b.priority), strings.Compare(a.key.Name, b.key.Name))
	})
	r.tiers[p.ref.Tier] = tier
	r.count(p, 1)
}

// selects reports whether p selects the pods of c. A NetworkPolicy is one of c's namespace.
func (p *policy) selects(c *class) bool {
	if !p.subjectRead {
		p.subjectRead = true
		p.labels, p.badSubject = readSelector(&p.network.Spec.PodSelector)
	}
	if p.cluster != nil && !p.namespaces.matches(c.namespace.labels) {
		return false
	}
	return p.labels.matches(c.labels) // one that can't be read selects all
}

// rules returns p's rules.
func (r *Resolver) rules(p *policy) *compiled {
	if p.compiled == nil {
		if p.network == nil {
			p.compiled = readCluster(p.cluster, p.ref, p.closed, r.config.UnknownPods != AllowUnknownPods)
			return p.compiled
		}
		p.compiled = readRules(p.network, p.ref, p.closed)
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
	for _, p := range c.namespace.policies {
		if p.selects(c) {
			out = append(out, p)
		}
	}
	return out
}
