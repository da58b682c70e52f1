package event

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

// controller is who reports, as Events have it.
const controller = "fairlead.dev/agent"

// patience is how long an API server may take to note an Event.
const patience = 10 * time.Second

// API records Events with an API server. One that can't be recorded is logged: nothing waits for it.
type API struct {
	access func() (*rest.Config, error)
	node   string
	log    *slog.Logger
	scheme *runtime.Scheme
}

var _ Recorder = (*API)(nil)

// NewAPI makes a Recorder of a node. Access is asked for each Event, so that renewed credentials count.
func NewAPI(access func() (*rest.Config, error), node string, log *slog.Logger) *API {
	s := runtime.NewScheme()
	if err := eventsv1.AddToScheme(s); err != nil {
		panic(err)
	}
	return &API{access, node, log, s}
}

// Eventf implements Recorder. It doesn't wait for the API server.
func (a *API) Eventf(regarding, _ runtime.Object, kind, reason, action, message string, args ...any) {
	about, ok := regarding.(*corev1.ObjectReference)
	if !ok {
		return
	}
	now := time.Now()
	e := &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s.%x", about.Name, now.UnixNano()),
			Namespace: about.Namespace},
		EventTime:           metav1.NewMicroTime(now),
		ReportingController: controller,
		ReportingInstance:   a.node,
		Regarding:           *about,
		Type:                kind,
		Reason:              reason,
		Action:              action,
		Note:                fmt.Sprintf(message, args...),
	}
	if e.Namespace == "" {
		e.Namespace = metav1.NamespaceDefault // as the API wants it for objects without one
	}
	go func() {
		if err := a.send(e); err != nil {
			a.log.Info("recording an Event failed", "about", about.Namespace+"/"+about.Name, "reason", reason, "error", err)
		}
	}()
}

func (a *API) send(e *eventsv1.Event) error {
	c, err := a.access()
	if err != nil {
		return err
	}
	c = rest.CopyConfig(c)
	c.APIPath, c.GroupVersion = "/apis", &eventsv1.SchemeGroupVersion
	c.NegotiatedSerializer = serializer.NewCodecFactory(a.scheme).WithoutConversion()
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	return client.Post().Namespace(e.Namespace).Resource("events").Body(e).Do(ctx).Error()
}
