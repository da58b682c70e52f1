package kube

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// Options say what to read, and where.
type Options struct {
	Access
	Node      string // this node's name
	ProxyName string // as in resolve.Config
	Nodes     bool   // all of them, not this node's alone
	// NeedsNodes reports whether an object needs all Nodes: they are read from the first one on, which waits for them, and
	// where there is none of this node's name. nil: none does, and they aren't.
	NeedsNodes func(source.Object) bool
	// Kinds are read as well: of Namespace, Pod, NetworkPolicy and ClusterNetworkPolicy. Each is Batch.Unlisted until it
	// has been listed, but for ClusterNetworkPolicies that the server doesn't serve.
	Kinds []source.Kind
	Pods  bool // nothing begins without this node's Pods; they are read too, where Kinds hasn't all

	Log *slog.Logger // of what is no problem; nil: nowhere
	// Wrap changes a configuration before connections are made, such as to count what they carry; nil: nothing does.
	Wrap func(*rest.Config)

	// NamespaceBytes and Bytes bound the weight of the Services, and of the EndpointSlices, of one namespace and of
	// all, in bytes of memory. Each should be above what one object can weigh: 16 MiB. 0 is the default.
	NamespaceBytes, Bytes int
}

// kinds returns what is asked for.
func (o Options) kinds() []resource {
	list := resources(o.Node, o.ProxyName)
	for i := range list {
		if o.Nodes && list[i].kind == source.Node {
			list[i].field = ""
		}
	}
	if o.Pods && !slices.Contains(o.Kinds, source.Pod) {
		r := pods()
		r.needed, r.field = true, fields.OneTermEqualSelector("spec.nodeName", o.Node).String()
		list = append(list, r)
	}
	for _, r := range policyResources() {
		if slices.Contains(o.Kinds, r.kind) {
			r.policies = r.kind != source.Pod || !o.Pods
			list = append(list, r)
		}
	}
	return list
}

// counting returns the field selector of the Pods that an agent needs among those that a field selector matches: not
// those that have ended, nor any before it has an address, or where pods are attached, before it has a node.
func (o Options) counting(field string) string {
	var l []fields.Selector
	for _, phase := range []corev1.PodPhase{corev1.PodFailed, corev1.PodSucceeded} {
		l = append(l, fields.OneTermNotEqualSelector("status.phase", string(phase)))
	}
	switch {
	case field != "":
		l = append(l, fields.ParseSelectorOrDie(field))
	case o.Pods:
		l = append(l, fields.OneTermNotEqualSelector("spec.nodeName", ""))
	default:
		l = append(l, fields.OneTermNotEqualSelector("status.podIP", ""))
	}
	return fields.AndSelectors(l...).String()
}

// Source reads the Kubernetes API.
type Source struct {
	options Options
	pause   time.Duration // in place of firstPause
	retry   time.Duration // in place of resource.retry
}

var _ source.Source = (*Source)(nil)

// New makes a source.
func New(o Options) *Source { return &Source{options: o} }

// patience is how long the first lists may take before it is said that they do.
const patience = 5 * time.Second

// Run returns what there is and then each change, until ctx ends. Only an access that can't be read at first is an
// error.
func (s *Source) Run(ctx context.Context, deliver func(source.Batch)) error {
	c, err := open(s.options)
	if err != nil {
		return err
	}
	kinds := s.options.kinds()
	n, words := newUpdates(kinds), strip.New()
	n.nodes.needed, words.Node = s.options.NeedsNodes, s.options.Node
	if s.options.Nodes {
		n.nodes.needed = nil // they are read from the start
	}
	var streams sync.WaitGroup
	defer streams.Wait()
	for _, r := range kinds {
		run := (*stream).run
		switch r.kind {
		case source.Pod:
			r.field = s.options.counting(r.field)
		case source.Node:
			run = (*stream).runNodes
		}
		st := newStream(r, c, n, words, s.options.budget(r.kind))
		st.pause, st.retry = cmp.Or(s.pause, st.pause), cmp.Or(s.retry, st.retry)
		streams.Go(func() { run(st, ctx) })
	}
	if slices.Contains(s.options.Kinds, source.ClusterNetworkPolicy) {
		streams.Go(func() { s.followOthers(ctx, c, n) })
	}
	defer time.AfterFunc(patience, n.delay).Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.notified:
		}
		if b, ok := n.collect(); ok {
			deliver(b)
		}
	}
}

// Load reads once: what Run reads, without its bounds, all Nodes, and Pods if asked for. Nodes and Pods that can't be
// read are a problem, as are policies that Fairlead doesn't evaluate.
func (s *Source) Load(ctx context.Context,
	withPods bool) (objects []source.Object, problems []source.Problem, err error) {
	c, err := open(s.options)
	if err != nil {
		return nil, nil, err
	}
	o := s.options
	o.Nodes, o.Pods = true, o.Pods && !withPods
	kinds := o.kinds()
	if withPods && !slices.Contains(o.Kinds, source.Pod) {
		kinds = append(kinds, pods())
	}
	words := strip.New()
	for _, r := range kinds {
		begin := time.Now()
		_, err := c.each(ctx, r, metav1.NamespaceAll, metav1.ListOptions{ResourceVersion: "0"}, func(o source.Object) {
			words.Strip(o)
			objects = append(objects, o)
		})
		if err != nil {
			reason := reasonOf(err)
			if r.optional && reason == NotServed {
				continue
			}
			if r.needed || reason != Forbidden && reason != NotServed {
				return nil, nil, fmt.Errorf("API server %s: list %s: %s: %s", c.host(), r.GroupResource(), plain(err),
					remedy(r, reason, err))
			}
			t := trouble{reason: reason, message: problemOf(c.host(), r, reason, err), since: begin}
			problems = append(problems, t.problem())
		}
	}
	if slices.Contains(o.Kinds, source.ClusterNetworkPolicy) {
		others, _ := c.otherPolicies(ctx) // a server that doesn't say which kinds it has is no reason to end here
		problems = append(problems, others...)
	}
	return objects, problems, nil
}
