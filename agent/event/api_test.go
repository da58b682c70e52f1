package event

import (
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/client-go/rest"

	"fairlead.dev/fairlead/source"
)

func TestEventsReachTheAPI(t *testing.T) {
	for _, c := range []struct {
		key       source.Key
		namespace string
	}{
		{source.Key{Kind: source.Service, Namespace: "shop", Name: "web"}, "shop"},
		{source.Key{Kind: source.Node, Name: "a"}, "default"},
		{source.Key{Kind: source.NetworkPolicy, Namespace: "shop", Name: "web"}, "shop"},
		{source.Key{Kind: source.ClusterNetworkPolicy, Name: "deny"}, "default"},
	} {
		got := make(chan eventsv1.Event, 1)
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			var e eventsv1.Event
			if err := json.Unmarshal(body, &e); err != nil || r.Method != "POST" ||
				r.URL.Path != "/apis/events.k8s.io/v1/namespaces/"+c.namespace+"/events" {
				t.Errorf("%s %s %s: %v", r.Method, r.URL, body, err)
			}
			w.Header().Set("Content-Type", "application/json")
			w.Write(body)
			got <- e
		}))
		defer s.Close()
		api := NewAPI(func() (*rest.Config, error) { return &rest.Config{Host: s.URL}, nil }, "a",
			slog.New(slog.DiscardHandler))
		New(api, api.log).Report([]source.Problem{{Object: c.key, Reason: "Odd", Message: "is odd"}})
		e := <-got
		if e.Namespace != c.namespace || e.Regarding.Name != c.key.Name || e.Reason != "Odd" || e.Note != "is odd" ||
			e.ReportingInstance != "a" || e.EventTime.IsZero() {
			t.Errorf("%v: %+v", c.key, e)
		}
	}
}

func TestEventsThatCantBeRecordedAreLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		api := NewAPI(func() (*rest.Config, error) { return nil, io.ErrUnexpectedEOF }, "a",
			slog.New(slog.NewTextHandler(&log, nil)))
		New(api, api.log).Report([]source.Problem{problem(1)})
		synctest.Wait()
		if !bytes.Contains(log.Bytes(), []byte("shop/web-1")) || !bytes.Contains(log.Bytes(), []byte("unexpected EOF")) {
			t.Errorf("the log says %q", log.String())
		}
	})
}
