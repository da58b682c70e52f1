package agent

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"

	resolve "fairlead.dev/fairlead/resolve/service"
)

// A start that fails before it has changed anything leaves what served before, whose connections run through this
// process.
func TestFailedStartLeavesThePredecessor(t *testing.T) {
	inNode(t, func(ctx context.Context) error {
		mode, err := ModeOf("userspace")
		if err != nil {
			return err
		}
		log := slog.New(slog.DiscardHandler)
		serving, err := OpenServices(mode, log)
		if err != nil {
			return err
		}
		taken, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer taken.Close()
		before := &Predecessor{services: serving}
		err = Run(ctx, Options{Mode: mode, Log: log, Resolve: resolve.Config{Node: "a"}, Predecessor: before,
			Servers: Servers{Health: taken.Addr().String(), HardFail: true},
			Prepare: func() { t.Error("the node was prepared for a start that fails") }})
		if err == nil || !strings.Contains(err.Error(), taken.Addr().String()) {
			t.Errorf("the start: %v, want an error that names %s", err, taken.Addr())
		}
		if before.services != serving {
			t.Error("the predecessor's services have ended, or others are in their place")
		}
		return before.Close()
	})
}
