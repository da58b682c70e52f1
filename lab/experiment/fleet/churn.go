package fleet

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/sandbox/controlplane"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// The rates of a usual cluster, of each node.
const (
	heartbeat = 5 * time.Minute // KubeletConfiguration's nodeStatusReportFrequency
	lifetime  = 24 * time.Hour  // of a pod: an assumption
)

// churn changes a cluster's objects as kubelets and controllers of so many nodes do, whatever the cluster's own size.
type churn struct {
	fleet  generate.Fleet
	plane  *controlplane.Plane
	next   int         // pods that were replaced, the first ones first
	reborn map[int]int // pods by their index: how often they were replaced
	mu     sync.Mutex
	beats  int
	writes atomic.Int64
}

func newChurn(f generate.Fleet, p *controlplane.Plane) *churn {
	return &churn{fleet: f, plane: p, reborn: map[int]int{}}
}

// each is how often something happens that every one of n does in a time.
func each(n int, in time.Duration) time.Duration { return in / time.Duration(n) }

// run changes objects as those of so many nodes change, for a time, and returns how many writes that were.
func (c *churn) run(ctx context.Context, nodes int, d time.Duration) (int64, error) {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	before := c.writes.Load()
	var work sync.WaitGroup
	begin := func(do func(context.Context) error) {
		work.Go(func() {
			if err := do(ctx); err != nil {
				fail(err)
			}
		})
	}
	beats, pods := time.NewTicker(each(nodes, heartbeat)), time.NewTicker(each(nodes*c.fleet.Pods, lifetime))
	defer beats.Stop()
	defer pods.Stop()
	for end := time.After(d); ; {
		select {
		case <-beats.C:
			begin(c.beat)
		case <-pods.C:
			i, generation := c.nextPod()
			begin(func(ctx context.Context) error { return c.replace(ctx, i, generation) })
		case <-end:
			work.Wait()
			return c.writes.Load() - before, context.Cause(ctx)
		case <-ctx.Done():
			work.Wait()
			return c.writes.Load() - before, context.Cause(ctx)
		}
	}
}

func (c *churn) call(ctx context.Context, method, path string, body any) error {
	c.writes.Add(1)
	return c.plane.Call(ctx, controlplane.First, method, path, body, nil)
}

// beat has a kubelet report that nothing changed.
func (c *churn) beat(ctx context.Context) error {
	c.mu.Lock()
	n := c.fleet.Node(c.beats%c.fleet.Nodes, time.Now())
	c.beats++
	c.mu.Unlock()
	return c.call(ctx, http.MethodPatch, "/api/v1/nodes/"+n.Name+"/status",
		map[string]any{"status": map[string]any{"conditions": n.Status.Conditions}})
}

// nextPod returns the pod to replace, one of each Service in turn, and how often it was before.
func (c *churn) nextPod() (i, generation int) {
	services := c.fleet.Services()
	i = c.next % services * generate.Replicas
	generation = c.reborn[i]
	c.next++
	c.reborn[i]++
	return i, generation
}

// replace replaces a pod as a rolling update does: the new one comes, is ready, and the old one goes.
func (c *churn) replace(ctx context.Context, i, generation int) error {
	old, young := c.fleet.Pod(i, generation), c.fleet.Pod(i, generation+1)
	at := "/api/v1/namespaces/" + old.Namespace + "/pods"
	unbound := young.DeepCopy()
	unbound.Spec.NodeName, unbound.Status = "", corev1.PodStatus{}
	service := i / generate.Replicas
	endpoint := func(p *corev1.Pod, ready, terminating bool) discoveryv1.Endpoint {
		return generate.Endpoint(p, ready, terminating)
	}
	status := func(p *corev1.Pod) error {
		return c.call(ctx, http.MethodPatch, at+"/"+p.Name+"/status", map[string]any{"status": p.Status})
	}
	slice := func(endpoints ...discoveryv1.Endpoint) error {
		s := c.fleet.Slice(service, func(l []discoveryv1.Endpoint) []discoveryv1.Endpoint {
			return append(l[1:], endpoints...)
		})
		return c.call(ctx, http.MethodPatch, sliceAt(s), map[string]any{"endpoints": s.Endpoints})
	}
	for _, step := range []func() error{
		func() error { return c.call(ctx, http.MethodPost, at, unbound) },
		func() error {
			return c.call(ctx, http.MethodPost, at+"/"+young.Name+"/binding", map[string]any{"apiVersion": "v1",
				"kind": "Binding", "metadata": map[string]any{"name": young.Name},
				"target": map[string]any{"kind": "Node", "name": young.Spec.NodeName}})
		},
		func() error { return status(generate.Waiting(young)) },
		func() error { return status(generate.Running(young, false)) },
		func() error { return slice(endpoint(old, true, false), endpoint(young, false, false)) },
		func() error { return status(generate.Running(young, true)) },
		func() error { return slice(endpoint(old, true, false), endpoint(young, true, false)) },
		func() error { return c.call(ctx, http.MethodDelete, at+"/"+old.Name, nil) },
		func() error { return slice(endpoint(old, true, true), endpoint(young, true, false)) },
		func() error { return status(generate.Ended(old)) },
		func() error { return slice(endpoint(young, true, false)) },
		func() error { return c.call(ctx, http.MethodDelete, at+"/"+old.Name+"?gracePeriodSeconds=0", nil) },
	} {
		if err := step(); err != nil {
			return fmt.Errorf("replace pod %s: %w", source.KeyOf(old), err)
		}
	}
	return nil
}

func sliceAt(s *discoveryv1.EndpointSlice) string {
	return "/apis/discovery.k8s.io/v1/namespaces/" + s.Namespace + "/endpointslices/" + s.Name
}
