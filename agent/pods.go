package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// podWait is how long a pod waits to be attached until its Pod is known: an API server that is away doesn't hold it up
// for good.
const podWait = 5 * time.Second

// attachedPods has the policies and the host ports of pods in force as they are attached. It implements attach.Pods.
type attachedPods struct{ *Agent }

// awaited is a Pod that a pod waits for.
type awaited struct {
	uid  string
	seen chan struct{} // closed once it has been seen, or is awaited no more
}

// Attach implements attach.Pods.
func (p attachedPods) Attach(ctx context.Context, a *model.Attachment, ports bool) error {
	if a.Pod == "" {
		return nil // the runtime doesn't name it
	}
	key := subsystem.PodKey(a.Pod)
	p.mu.Lock()
	var seen chan struct{}
	if !p.apply(subsystem.Update{Attached: []*model.Attachment{a}, Ports: ports}) {
		if w := p.batches.pods[key]; w.seen != nil && w.uid == a.UID {
			seen = w.seen
		} else {
			seen = make(chan struct{})
			if p.batches.pods == nil {
				p.batches.pods = map[source.Key]awaited{}
			}
			p.batches.pods[key] = awaited{a.UID, seen}
		}
	}
	p.mu.Unlock()
	if seen != nil {
		defer p.await(key, seen)
		began := time.Now()
		select {
		case <-seen:
		case <-ctx.Done():
			return fmt.Errorf("waited %s for pod %s to be known from the API server: %w; is that reached from this node?",
				time.Since(began).Round(time.Millisecond), a.Pod, ctx.Err())
		case <-time.After(podWait):
			p.options.Log.Warn("pod is attached before its Pod is known: its policies and host ports come into force once it is",
				"pod", a.Pod, "waited", podWait)
		}
	}
	return p.Check(ctx, a)
}

// Check implements attach.Pods.
func (p attachedPods) Check(ctx context.Context, a *model.Attachment) error {
	if a.Pod == "" {
		return nil
	}
	key := subsystem.PodKey(a.Pod)
	owner := model.Owner{Kind: model.KindPod, Namespace: key.Namespace, Name: key.Name}
	var err error
	for _, s := range slices.Backward(p.subsystems) {
		err = errors.Join(err, s.SyncOwner(ctx, owner))
	}
	return err
}

// await ends the wait for a Pod.
func (p attachedPods) await(key source.Key, seen chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.batches.pods[key].seen == seen {
		delete(p.batches.pods, key)
	}
}

// Detach implements attach.Pods.
func (p attachedPods) Detach(a *model.Attachment) {
	p.Apply(subsystem.Update{Detached: []*model.Attachment{a}})
}

// seen ends the waits for Pods that come. p.mu is held.
func (p attachedPods) seen(changes []source.Change) {
	if len(p.batches.pods) == 0 {
		return
	}
	for _, c := range changes {
		if w := p.batches.pods[c.Key]; w.seen != nil && c.Object != nil && source.Same(w.uid, string(c.Object.GetUID())) {
			close(w.seen)
			delete(p.batches.pods, c.Key)
		}
	}
}
