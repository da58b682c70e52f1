package kube

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// Options say what to read, and where.
type Options struct {
	Access
	Node      string // this node's name
	ProxyName string // as in resolve.Config
	Nodes     bool   // all of them, not this node's alone
}

// kinds gives what is asked for.
func (o Options) kinds() []resource {
	list := resources(o.Node, o.ProxyName)
	for i := range list {
		if o.Nodes && list[i].kind == source.Node {
			list[i].field = ""
		}
	}
	return list
}

// Source reads the Kubernetes API.
type Source struct{ options Options }

var _ source.Source = (*Source)(nil)

// New makes a source.
func New(o Options) *Source { return &Source{o} }

// patience is how long the first lists may take before it is said that they do.
const patience = 5 * time.Second

// Run gives what there is and then each change, until ctx ends. Only an access that can't be read at first is an error.
func (s *Source) Run(ctx context.Context, deliver func(source.Batch)) error {
	c, err := open(s.options.Access)
	if err != nil {
		return err
	}
	kinds := s.options.kinds()
	n, words := newNews(kinds), strip.New()
	var streams sync.WaitGroup
	defer streams.Wait()
	for _, r := range kinds {
		st := &stream{resource: r, client: c, news: n, words: words, known: map[types.NamespacedName]uint64{}}
		streams.Go(func() { st.run(ctx) })
	}
	defer time.AfterFunc(patience, n.delay).Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.told:
		}
		if b, ok := n.take(); ok {
			deliver(b)
		}
	}
}

// Load reads once: what Run reads, all Nodes, and Pods if asked for. Nodes and Pods that can't be read are a problem.
func (s *Source) Load(ctx context.Context, withPods bool) (objects []source.Object, problems []source.Problem, err error) {
	c, err := open(s.options.Access)
	if err != nil {
		return nil, nil, err
	}
	o := s.options
	o.Nodes = true
	kinds := o.kinds()
	if withPods {
		kinds = append(kinds, pods())
	}
	words := strip.New()
	for _, r := range kinds {
		begin := time.Now()
		list, err := c.lists(ctx, r, metav1.ListOptions{ResourceVersion: "0"})
		if err != nil {
			reason := reasonOf(err)
			if r.needed || reason != Forbidden && reason != NotServed {
				return nil, nil, fmt.Errorf("API server %s: list %s: %s", c.host(), r.GroupResource(), plain(err))
			}
			t := trouble{reason: reason, message: problemOf(c.host(), r, reason, err), since: begin}
			problems = append(problems, t.problem())
			continue
		}
		err = meta.EachListItem(list, func(item runtime.Object) error {
			o := item.(source.Object)
			words.Strip(o)
			objects = append(objects, o)
			return nil
		})
		if err != nil {
			return nil, nil, fmt.Errorf("API server %s: list %s: %w", c.host(), r.GroupResource(), err)
		}
	}
	return objects, problems, nil
}
