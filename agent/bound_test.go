package agent

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/service"
	"fairlead.dev/fairlead/agent/subsystem/subsystemtest"
	"fairlead.dev/fairlead/dataplane"
	plane "fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
)

// tight is a plane that has reached a bound.
type tight struct{ report func(string) }

type tightKey struct{}

func (tightKey) Rank() int { return 0 }

func (*tight) Render(model.ServicePart) []dataplane.Fact[tightKey, string]      { return nil }
func (*tight) Read(context.Context) ([]dataplane.Fact[tightKey, string], error) { return nil, nil }
func (*tight) Write(context.Context, []dataplane.Fact[tightKey, string], []dataplane.Fact[tightKey, string]) error {
	return nil
}
func (*tight) Clean(context.Context) error     { return nil }
func (*tight) Close() error                    { return nil }
func (*tight) Refused() plane.Rejections       { return plane.Rejections{Frontend: 3, Client: 2} }
func (p *tight) OnWarning(report func(string)) { p.report = report }

// A plane's bound is logged with the plane's name, and what it refused is counted.
func TestBoundIsLoggedAndCounted(t *testing.T) {
	var log bytes.Buffer
	p := &tight{}
	chosen := mode.Alone(model.Capabilities{Name: "tight"}, func() (*tight, error) { return p, nil })
	planes, err := service.OpenPlanes(chosen, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer planes.Close()
	p.report("frontend 10.96.0.1:80/TCP has its share")
	if s := log.String(); !strings.Contains(s, "level=WARN") || !strings.Contains(s, "plane=tight") ||
		!strings.Contains(s, "10.96.0.1:80/TCP") {
		t.Errorf("the log says %q", s)
	}
	a := stillWith(t, Options{}, planes)
	is := subsystemtest.Values(t, a.registry)
	if is["fairlead_userspace_refused_total frontend"] != 3 || is["fairlead_userspace_refused_total client"] != 2 {
		t.Errorf("the metrics say %v", is)
	}
}
