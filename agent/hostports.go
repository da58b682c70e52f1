package agent

import (
	"context"
	"strings"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// podWait is how long a pod with host ports waits to be attached until its Pod is known: an API server that is away
// doesn't hold it up for good.
const podWait = 5 * time.Second

// hostPorts has the host ports of pods served as they are attached. It implements attach.Pods.
type hostPorts struct{ *Agent }

// podKey returns the key of a pod by "namespace/name".
func podKey(pod string) source.Key {
	namespace, name, _ := strings.Cut(pod, "/")
	return source.Key{Kind: source.Pod, Namespace: namespace, Name: name}
}

// adopt takes in the addresses of the pods that an agent before this one attached.
func (h hostPorts) adopt() {
	if h.network == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, a := range h.network.server.Attached() {
		h.resolver.AttachPod(podKey(a.Pod), a.Addresses)
	}
}

// Attach implements attach.Pods.
func (h hostPorts) Attach(ctx context.Context, a *model.Attachment, ports bool) error {
	if a.Pod == "" {
		return nil // the runtime doesn't name it
	}
	key := podKey(a.Pod)
	h.mu.Lock()
	h.resolver.AttachPod(key, a.Addresses)
	h.settle()
	var seen chan struct{}
	if ports && !h.resolver.HasHostPorts(key) {
		if seen = h.batches.pods[key]; seen == nil {
			seen = make(chan struct{})
			if h.batches.pods == nil {
				h.batches.pods = map[source.Key]chan struct{}{}
			}
			h.batches.pods[key] = seen
		}
	}
	h.mu.Unlock()
	if seen != nil {
		select {
		case <-seen:
		case <-ctx.Done():
		case <-time.After(podWait):
			h.options.Log.Warn("pod is attached without its host ports: its Pod is not known; they are served once it is", "pod",
				a.Pod)
		}
		h.await(key, seen)
	}
	return h.Check(ctx, a)
}

// Check implements attach.Pods.
func (h hostPorts) Check(ctx context.Context, a *model.Attachment) error {
	if a.Pod == "" {
		return nil
	}
	key := podKey(a.Pod)
	return h.services.SyncOwner(ctx, model.Owner{Kind: model.KindPod, Namespace: key.Namespace, Name: key.Name})
}

// await ends the wait for a Pod.
func (h hostPorts) await(key source.Key, seen chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.batches.pods[key] == seen {
		delete(h.batches.pods, key)
	}
}

// Detach implements attach.Pods.
func (h hostPorts) Detach(a *model.Attachment) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.resolver.DetachPod(podKey(a.Pod), a.Addresses)
	h.settle()
}

// settle hands on what follows from addresses of pods. h.mu is held.
func (h hostPorts) settle() {
	if h.batches.count == 0 {
		return // it comes with the first objects
	}
	if delta := h.apply(nil); !delta.Empty() {
		h.hand(delta, time.Time{})
		h.notifyAll()
	}
}

// seen ends the waits for Pods that come. h.mu is held.
func (h hostPorts) seen(changes []source.Change) {
	if len(h.batches.pods) == 0 {
		return
	}
	for _, c := range changes {
		if seen := h.batches.pods[c.Key]; seen != nil && c.Object != nil {
			close(seen)
			delete(h.batches.pods, c.Key)
		}
	}
}
