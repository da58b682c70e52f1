package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/dataplane/service/userspace"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// cutPlane is a plane whose first cut ends the agent, and each lasts until the plane is closed or a bound is over.
type cutPlane struct {
	*userspace.Plane
	stop   func()
	closed chan struct{} // closed by Close
	cuts   int
	early  bool // it was closed while it cut
}

// Cut implements what the evaluation of proxied connections needs.
func (p *cutPlane) Cut(func(model.Protocol, netip.AddrPort, netip.AddrPort) bool) {
	const within = 500 * time.Millisecond // an agent that ends closes planes far sooner
	p.stop()
	p.cuts++
	select {
	case <-p.closed:
		p.early = true
	case <-time.After(within):
	}
}

// Close implements mode.ServicePlane.
func (p *cutPlane) Close() error {
	close(p.closed)
	return p.Plane.Close()
}

// An agent that ends closes no plane of Services while policies still cut its connections.
func TestPlaneIsNotClosedWhileItCuts(t *testing.T) {
	inNode(t, func(ctx context.Context) error {
		engine, err := mode.EngineOf("nftables")
		if err != nil {
			return err
		}
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		p := &cutPlane{stop: stop, closed: make(chan struct{})}
		m := mode.Alone(userspace.Capabilities, func() (_ *cutPlane, err error) {
			p.Plane, err = userspace.New()
			return p, err
		})
		err = Run(ctx, Options{Mode: m, Source: sourceOf(nil), Log: slog.New(slog.DiscardHandler),
			Resolve:  resolve.Config{Node: "a"},
			Policies: &PolicyOptions{Engine: engine, Resolve: policy.Config{Node: "a", CutMark: 1}}})
		if p.cuts == 0 || p.early {
			t.Errorf("%d cuts; closed while it cut: %t", p.cuts, p.early)
		}
		return err
	})
}
