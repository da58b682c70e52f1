package agent

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/inspect"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// A start that fails before it has changed anything leaves the mode that served before, whose connections run through
// this process.
func TestFailedStartLeavesThePreviousMode(t *testing.T) {
	inNode(t, func(ctx context.Context) error {
		chosen, err := mode.Of("userspace")
		if err != nil {
			return err
		}
		var before PreviousMode
		ready, stop := context.WithCancel(ctx)
		o := Options{Mode: chosen, Log: slog.New(slog.DiscardHandler), Resolve: resolve.Config{Node: "a"}, Previous: &before,
			Source: sourceOf(webAt("shop", "web", "10.96.0.1", 1)), OnReady: func(context.Context) { stop() }}
		if err := Run(ready, o); err != nil {
			return err
		}
		if err := probeServices(ctx, 1); err != nil {
			t.Errorf("after the first agent: %v", err)
		}
		occupied, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer occupied.Close()
		o.Servers = Servers{Health: occupied.Addr().String(), HardFail: true}
		o.Prepare = func(func() (*inspect.Decided, error)) { t.Error("the node was prepared for a start that fails") }
		if err := Run(ctx, o); err == nil || !strings.Contains(err.Error(), occupied.Addr().String()) {
			t.Errorf("the start: %v, want an error that names %s", err, occupied.Addr())
		}
		if err := probeServices(ctx, 1); err != nil {
			t.Errorf("after the start that failed: %v", err)
		}
		return before.Close()
	})
}
