package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

// definitions is where CustomResourceDefinitions are.
const definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

// expected is what a server has said of a kind that it doesn't know yet.
type expected struct {
	until   atomic.Int64    // it will soon: until then it is asked again and again. Nanoseconds since 1970
	now     chan struct{}   // holds one when it is to be asked at once
	open    watch.Interface // the last watch of the kind; this and what follows under the stream's mu
	version string          // that it is of
	newest  string          // the newest that the definition says is served of those that are read; "": not known
	unread  bool            // others alone are served
}

// isDue reports whether the kind may be served any moment.
func (e *expected) isDue() bool { return time.Now().UnixNano() < e.until.Load() }

// definition is what is read of a CustomResourceDefinition (apiextensions.k8s.io/v1).
type definition struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Versions []struct {
			Name   string `json:"name"`
			Served bool   `json:"served"`
		} `json:"versions"`
	} `json:"spec"`
	Status struct {
		Conditions []metav1.Condition `json:"conditions"`
	} `json:"status"`
}

// established reports whether its kind is served, or will be at once.
func (d definition) established() bool {
	for _, c := range d.Status.Conditions {
		if c.Type == "Established" {
			return c.Status == metav1.ConditionTrue
		}
	}
	return false
}

// newest returns the newest version of r that is served, "" for none, and whether others alone are.
func (d definition) newest(r resource) (version string, unread bool) {
	for _, v := range d.Spec.Versions {
		switch {
		case !v.Served:
		case v.Name == r.Version || v.Name == r.older && version == "":
			version = v.Name
		default:
			unread = true
		}
	}
	return version, unread && version == ""
}

// soon is for how long a server may not know a kind yet of which it has said that it does, and again how often it is
// asked then.
const (
	soon  = 30 * time.Second
	again = 200 * time.Millisecond
)

// followDefinition follows the CustomResourceDefinition of the stream's kind until ctx ends, so that the kind is read
// once it is served. Without the right to, it is asked for from time to time alone.
func (s *stream) followDefinition(ctx context.Context) {
	for ctx.Err() == nil {
		pause := s.retry
		err := s.readDefinition(ctx)
		if reason := reasonOf(err); err == nil || reason != Forbidden && reason != NotServed {
			pause = min(s.retry, 2*time.Second)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause/2 + rand.N(pause/2)):
		}
	}
}

// readDefinition reads the definition and what becomes of it, as long as the server tells.
func (s *stream) readDefinition(ctx context.Context) error {
	var list struct {
		metav1.TypeMeta
		metav1.ListMeta `json:"metadata"`
		Items           []definition `json:"items"`
	}
	b, err := s.definition().DoRaw(ctx)
	if err == nil {
		err = json.Unmarshal(b, &list)
	}
	if err != nil {
		return err
	}
	if list.Kind != "CustomResourceDefinitionList" || list.ResourceVersion == "" ||
		len(list.Items) > 0 && list.Items[0].Name != s.GroupResource().String() {
		return fmt.Errorf("list %s: the answer is no list of the one asked for", definitions)
	}
	if len(list.Items) == 0 {
		s.undefined()
	} else if list.Items[0].established() {
		s.defined(list.Items[0])
	}
	events, err := s.definition().Param("watch", "true").Param("resourceVersion", list.ResourceVersion).Stream(ctx)
	if err != nil {
		return err
	}
	defer events.Close()
	for d := json.NewDecoder(io.LimitReader(events, largest)); ; {
		var e struct {
			Type   watch.EventType `json:"type"`
			Object definition      `json:"object"`
		}
		switch err := d.Decode(&e); {
		case err != nil:
			return err
		case e.Type == watch.Error:
			return fmt.Errorf("watch %s: the server ended it", definitions)
		case e.Object.Name != s.GroupResource().String(): // not what was asked for: it says nothing of ours
		case e.Type == watch.Deleted:
			s.undefined()
		case e.Object.established():
			s.defined(e.Object)
		}
	}
}

// definition begins a request for the definition of the stream's kind alone.
func (s *stream) definition() *rest.Request {
	return s.get(s.GroupVersion()).AbsPath(definitions).Param("fieldSelector",
		fields.OneTermEqualSelector(metav1.ObjectNameField, s.GroupResource().String()).String())
}

// defined has a server asked at once that didn't know the kind, or of which another version than the newest is watched.
// No object goes by that: the next watch begins where the last one ended.
func (s *stream) defined(d definition) {
	s.expected.until.Store(time.Now().Add(soon).UnixNano())
	s.mu.Lock()
	if s.newest, s.unread = d.newest(s.resource); s.open != nil && s.isStale() {
		s.open.Stop()
	}
	s.mu.Unlock()
	select {
	case s.expected.now <- struct{}{}:
	default:
	}
}

// isStale reports whether the open watch is of another version than the newest that is served.
func (s *stream) isStale() bool { return s.newest != "" && s.newest != s.version }

// opened takes in which watch is open, and its version. A server that doesn't serve the newest yet is asked for it
// again.
func (s *stream) opened(w watch.Interface, version string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open, s.version = w, version; s.isStale() && s.isDue() {
		time.AfterFunc(again, w.Stop)
	}
}

// undefined takes in that there are no objects of the kind any more.
func (s *stream) undefined() {
	s.expected.until.Store(0)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.newest, s.unread = "", false
	if s.open != nil {
		s.open.Stop() // one of a kind that is gone may stay open, and say nothing when it comes again
	}
	was := s.budget
	s.budget = was.empty()
	if changes := s.gone(was); len(changes) > 0 {
		s.put(changes...)
	}
}
