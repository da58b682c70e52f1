package agent

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// podWait is how long a pod waits to be attached until its Pod is known: an API server that is away doesn't hold it up
// for good.
const podWait = 5 * time.Second

// attachedPods has the policies and the host ports of pods in force as they are attached. It implements attach.Pods.
type attachedPods struct{ *Agent }

// podKey returns the key of a pod by "namespace/name".
func podKey(pod string) source.Key {
	namespace, name, _ := strings.Cut(pod, "/")
	return source.Key{Kind: source.Pod, Namespace: namespace, Name: name}
}

// adopt takes in the addresses of the pods that an agent before this one attached.
func (p attachedPods) adopt() {
	if p.network == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.network.server.Attached() {
		p.put(podKey(a.Pod), a.Addresses)
	}
}

// put sets the addresses that a pod has been given, in the resolvers. p.mu is held.
func (p attachedPods) put(key source.Key, addresses []netip.Addr) {
	p.resolver.AttachPod(key, addresses)
	p.policies.AttachPod(key, addresses)
}

// knows reports whether what a pod needs is known: its labels for policies, and its host ports if it has some. p.mu is
// held.
func (p attachedPods) knows(key source.Key, ports bool) bool {
	return p.policies.HasPod(key) && (!ports || p.resolver.HasHostPorts(key))
}

// Attach implements attach.Pods.
func (p attachedPods) Attach(ctx context.Context, a *model.Attachment, ports bool) error {
	if a.Pod == "" {
		return nil // the runtime doesn't name it
	}
	key := podKey(a.Pod)
	p.mu.Lock()
	p.put(key, a.Addresses)
	p.settle()
	var seen chan struct{}
	if !p.knows(key, ports) {
		if seen = p.batches.pods[key]; seen == nil {
			seen = make(chan struct{})
			if p.batches.pods == nil {
				p.batches.pods = map[source.Key]chan struct{}{}
			}
			p.batches.pods[key] = seen
		}
	}
	p.mu.Unlock()
	if seen != nil {
		select {
		case <-seen:
		case <-ctx.Done():
		case <-time.After(podWait):
			p.options.Log.Warn("pod is attached before its Pod is known: its policies and host ports come into force once it is",
				"pod", a.Pod)
		}
		p.await(key, seen)
	}
	return p.Check(ctx, a)
}

// Check implements attach.Pods.
func (p attachedPods) Check(ctx context.Context, a *model.Attachment) error {
	if a.Pod == "" {
		return nil
	}
	key := podKey(a.Pod)
	owner := model.Owner{Kind: model.KindPod, Namespace: key.Namespace, Name: key.Name}
	return errors.Join(p.policies.SyncOwner(ctx, owner), p.services.SyncOwner(ctx, owner))
}

// await ends the wait for a Pod.
func (p attachedPods) await(key source.Key, seen chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.batches.pods[key] == seen {
		delete(p.batches.pods, key)
	}
}

// Detach implements attach.Pods.
func (p attachedPods) Detach(a *model.Attachment) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := podKey(a.Pod)
	p.resolver.DetachPod(key, a.Addresses)
	p.policies.DetachPod(key, a.Addresses)
	p.settle()
}

// settle hands on what follows from addresses of pods. p.mu is held.
func (p attachedPods) settle() {
	if p.batches.count == 0 {
		return // it comes with the first objects
	}
	if delta := p.apply(nil); !delta.Empty() {
		p.hand(delta, time.Time{})
		p.notifyAll()
	}
}

// seen ends the waits for Pods that come. p.mu is held.
func (p attachedPods) seen(changes []source.Change) {
	if len(p.batches.pods) == 0 {
		return
	}
	for _, c := range changes {
		if seen := p.batches.pods[c.Key]; seen != nil && c.Object != nil {
			close(seen)
			delete(p.batches.pods, c.Key)
		}
	}
}
