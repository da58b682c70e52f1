package agent

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"

	"fairlead.dev/fairlead/agent/mode"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// A start that fails before it has changed anything leaves what served before, whose connections run through this
// process.
func TestFailedStartLeavesThePredecessor(t *testing.T) {
	inNode(t, func(ctx context.Context) error {
		chosen, err := mode.Of("userspace")
		if err != nil {
			return err
		}
		log := slog.New(slog.DiscardHandler)
		serving, err := OpenServices(chosen, log)
		if err != nil {
			return err
		}
		occupied, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer occupied.Close()
		before := &Predecessor{services: serving}
		err = Run(ctx, Options{Mode: chosen, Log: log, Resolve: resolve.Config{Node: "a"}, Predecessor: before,
			Servers: Servers{Health: occupied.Addr().String(), HardFail: true},
			Prepare: func() { t.Error("the node was prepared for a start that fails") }})
		if err == nil || !strings.Contains(err.Error(), occupied.Addr().String()) {
			t.Errorf("the start: %v, want an error that names %s", err, occupied.Addr())
		}
		if before.services != serving {
			t.Error("the predecessor's services have ended, or others are in their place")
		}
		return before.Close()
	})
}
