package reachability

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
)

// GroupKind is what the members of a Group are.
type GroupKind string

// The kinds of groups.
const (
	Pods     GroupKind = "pods"
	Nodes    GroupKind = "nodes"
	External GroupKind = "external" // addresses outside of the cluster
)

// Group is ends of connections that policies can't tell apart: the pods of a workload, nodes, or addresses outside of
// the cluster. A workload is the pods of a namespace with the same labels, those of a revision or a single pod aside.
type Group struct {
	Name      string
	Kind      GroupKind
	Namespace string   // of pods
	Members   []string // sorted; a workload stands for the pods of its template
	// up to two of them, each as an end in every cluster that is compared
	samples [][]end
}

// revisions are labels that controllers give to the pods of one revision, or to a single pod.
var revisions = []string{
	"pod-template-hash", "controller-revision-hash", "pod-template-generation", "statefulset.kubernetes.io/pod-name",
	"apps.kubernetes.io/pod-index", "controller-uid", "batch.kubernetes.io/controller-uid", "job-name",
	"batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index",
}

// nameLabels are labels by which people call a workload, the best first.
var nameLabels = []string{"app.kubernetes.io/name", "app", "k8s-app", "name", "run"}

// maxExternal is how many groups of addresses outside of the cluster there are at most.
const maxExternal = 30

// groups returns the groups of the pods, nodes and outside addresses that all clusters have: policies can't tell the
// members of one apart in any of the clusters.
func groups(cs ...*Cluster) []*Group {
	out := podGroups(cs)
	slices.SortFunc(out, func(a, b *Group) int { return cmp.Or(cmp.Compare(a.Name, b.Name)) })
	return slices.Concat(out, nodeGroups(cs), externalGroups(cs))
}

// add adds a member to the group of a key.
func add(all map[string]*Group, key string, g Group, member string, ends []end) {
	of := all[key]
	if of == nil {
		of = &g
		all[key] = of
	}
	if n := len(of.Members); n == 0 || of.Members[n-1] != member { // several pods stand for one template
		of.Members = append(of.Members, member)
	}
	if len(of.samples) < 2 {
		of.samples = append(of.samples, ends)
	}
}

func podGroups(cs []*Cluster) []*Group {
	all, base := map[string]*Group{}, map[string]int{}
	for _, o := range cs[0].Names {
		v, ok := o.(*corev1.Pod)
		if !ok {
			continue
		}
		name := v.Namespace + "/" + v.Name
		labels := workload(v.Labels)
		key, ends := v.Namespace+"\x00"+fmt.Sprint(labels)+"\x00"+portsKey(v), make([]end, 0, len(cs))
		for _, c := range cs {
			of := v
			if c != cs[0] {
				of = c.pod(name)
			}
			if of == nil || len(c.podOwn(of)) == 0 {
				break
			}
			e := end{name: name, addrs: c.podOwn(of), pod: of}
			key, ends = key+"\x00"+c.signature(e.addrs), append(ends, e)
		}
		if len(ends) == len(cs) {
			g := Group{Name: v.Namespace + "/" + called(labels, v.Name), Kind: Pods, Namespace: v.Namespace}
			add(all, key, g, memberName(v), ends)
		}
	}
	out := slices.Collect(maps.Values(all))
	for _, g := range out {
		slices.Sort(g.Members)
		base[g.Name]++
	}
	for _, g := range out {
		if base[g.Name] > 1 {
			g.Name += " (" + few(g.Members, g.Namespace+"/") + ")"
		}
	}
	return out
}

// pod returns the pod of that name, nil if it doesn't count.
func (c *Cluster) pod(name string) *corev1.Pod {
	if c.byName == nil {
		c.byName = map[string]*corev1.Pod{}
		for _, v := range c.pods {
			c.byName[v.Namespace+"/"+v.Name] = v
		}
	}
	return c.byName[name]
}

// workload returns the labels of a pod without those of a revision.
func workload(labels map[string]string) map[string]string {
	out := maps.Clone(labels)
	for _, l := range revisions {
		delete(out, l)
	}
	return out
}

// called returns the name of a workload with these labels.
func called(labels map[string]string, pod string) string {
	for _, l := range nameLabels {
		if labels[l] != "" {
			return labels[l]
		}
	}
	var l []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		l = append(l, k+"="+labels[k])
	}
	return cmp.Or(strings.Join(l, ","), pod)
}

// few returns the first of a list, and how many more there are.
func few(l []string, prefix string) string {
	s := strings.TrimPrefix(l[0], prefix)
	if len(l) > 1 {
		s += fmt.Sprintf(" + %d more", len(l)-1)
	}
	return s
}

func nodeGroups(cs []*Cluster) []*Group {
	all := map[string]*Group{}
	for _, name := range cs[0].names {
		key, ends := "", make([]end, 0, len(cs))
		for _, c := range cs {
			if len(c.own[name]) == 0 {
				break
			}
			e := end{name: nodePrefix + name, addrs: c.own[name]}
			key, ends = key+"\x00"+c.signature(e.addrs), append(ends, e)
		}
		if len(ends) == len(cs) {
			add(all, key, Group{Kind: Nodes}, nodePrefix+name, ends)
		}
	}
	out := slices.Collect(maps.Values(all))
	for _, g := range out {
		if g.Name = few(g.Members, ""); len(out) == 1 {
			g.Name = "other nodes"
		}
	}
	slices.SortFunc(out, func(a, b *Group) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// externalGroups returns "outside", and a group for each CIDR of a policy that is told apart from it.
func externalGroups(cs []*Cluster) []*Group {
	same := func(name string, addrs ...netip.Addr) []end {
		return slices.Repeat([]end{{name: name, addrs: addrs}}, len(cs))
	}
	key := func(addrs ...netip.Addr) (s string) {
		for _, c := range cs {
			s += c.signature(addrs) + "\x00"
		}
		return s
	}
	out := []*Group{{Name: Outside, Kind: External, Members: []string{Outside},
		samples: [][]end{same(Outside, outside[:]...)}}}
	known := map[string]bool{key(outside[0]): true, key(outside[1]): true}
	for _, c := range cs {
		for _, p := range c.pieces() {
			if k := key(p.Range.First); !known[k] && len(out) < maxExternal {
				known[k] = true
				out = append(out, &Group{Name: p.Name, Kind: External, Members: []string{p.Range.String()},
					samples: [][]end{same(p.Name, p.Range.First)}})
			}
		}
	}
	return out
}

// pieces returns the peers that are CIDRs of policies, or pieces of those, outside of the cluster.
func (c *Cluster) pieces() (out []*model.Peer) {
	of := func(p *model.Peer) {
		a := p.Range.First
		inside := slices.ContainsFunc(c.policies.Node.Pods, func(r netip.Prefix) bool { return r.Contains(a) })
		if c.pods[a] == nil && c.nodes[a] == "" && !inside {
			out = append(out, p)
		}
	}
	for _, p := range c.policies.Ranges {
		of(p)
	}
	for _, a := range slices.SortedFunc(maps.Keys(c.policies.Singles), netip.Addr.Compare) {
		of(c.policies.Singles[a])
	}
	return out
}

// between returns an end of each of two groups, of which one is pods: not one pod, nor a node and a pod on it. It
// returns false where there are none.
func between(from, to *Group, cluster int) (src, dst end, ok bool) {
	for _, s := range from.samples {
		for _, d := range to.samples {
			src, dst = s[cluster], d[cluster]
			if from.Kind == Nodes && dst.pod != nil && src.name == nodePrefix+dst.pod.Spec.NodeName ||
				from.Kind != Pods && to.Kind != Pods || src.name == dst.name {
				continue
			}
			return src, dst, true
		}
	}
	return src, dst, false
}
