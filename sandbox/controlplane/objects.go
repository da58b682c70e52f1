package controlplane

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
)

// collections are where objects of a kind live: before and behind their namespace's name, or, of kinds without one, at
// all.
var collections = map[source.Kind][2]string{
	source.Service:       {"/api/v1/namespaces/", "/services"},
	source.EndpointSlice: {"/apis/discovery.k8s.io/v1/namespaces/", "/endpointslices"},
	source.Pod:           {"/api/v1/namespaces/", "/pods"},
	source.Node:          {"/api/v1/nodes", ""},
	source.Namespace:     {"/api/v1/namespaces", ""},
	source.NetworkPolicy: {"/apis/networking.k8s.io/v1/namespaces/", "/networkpolicies"},
}

func collection(o source.Object) (string, error) {
	c, ok := collections[source.KeyOf(o).Kind]
	if !ok {
		return "", fmt.Errorf("%s is of a kind that is not written", source.KeyOf(o))
	}
	return c[0] + o.GetNamespace() + c[1], nil
}

// Create makes an object, with the status that it has, if it has one that counts.
func (p *Plane) Create(ctx context.Context, o source.Object) error {
	at, err := collection(o)
	if err != nil {
		return err
	}
	if err := p.Call(ctx, First, http.MethodPost, at, o, nil); err != nil {
		return err
	}
	at += "/" + o.GetName() + "/status"
	switch o := o.(type) {
	case *corev1.Node:
		return p.Call(ctx, First, http.MethodPatch, at, map[string]any{"status": o.Status}, nil)
	case *corev1.Pod:
		return p.Call(ctx, First, http.MethodPatch, at, map[string]any{"status": o.Status}, nil)
	}
	return nil
}

// Apply changes an object to what it is now, by a merge patch: what it no longer has must be null in it, or part of a
// list.
func (p *Plane) Apply(ctx context.Context, o source.Object) error {
	at, err := collection(o)
	if err != nil {
		return err
	}
	return p.Call(ctx, First, http.MethodPatch, at+"/"+o.GetName(), o, nil)
}

// Load makes many objects, several at a time, in no order.
func (p *Plane) Load(ctx context.Context, objects []source.Object) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	todo := make(chan source.Object)
	var workers sync.WaitGroup
	for range 16 {
		workers.Go(func() {
			for o := range todo {
				if err := p.Create(ctx, o); err != nil {
					fail(err) // the first stays the cause
				}
			}
		})
	}
	for _, o := range objects {
		todo <- o // after a failure each fails at once
	}
	close(todo)
	workers.Wait()
	return context.Cause(ctx)
}
