package conntrack

import (
	"context"
	"os/exec"
	"testing"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// Each new connection is reported as it is translated, or counted as lost.
func TestEventsAreReportedOrCounted(t *testing.T) {
	in(t, func(*Conn) {
		const sent = 2000
		for _, buffer := range []int{8 << 20, 64 << 10} {
			e, err := Listen(buffer)
			if err != nil {
				t.Error(err)
				return
			}
			defer e.Close()
			send(t, "127.0.9.9", 53, 1)
			send(t, "127.0.0.1", 2000, sent-1)
			ctx, stop := context.WithCancel(t.Context())
			stop()
			reported, translated, signals := uint64(0), false, 0
			err = e.Run(ctx, func(c Tracked) {
				reported++
				translated = translated || c.Destination.Port() == 53 && c.ReplySource.String() == "127.0.0.1:5353"
			}, func() { signals++ })
			lost, failed := e.Lost()
			if err != nil || failed != nil || reported+lost != sent || !translated || (lost > 0) != (buffer < 1<<20) ||
				(signals > 0) != (lost > 0) {
				t.Errorf("buffer of %d: %d reported, %d lost in %d signals, translated %t, %v %v", buffer, reported, lost, signals,
					translated, err, failed)
			}
		}
	})
}

func TestTrackingFollowsRules(t *testing.T) {
	in(t, func(*Conn) {
		if v4, v6, err := Tracking(); !v4 || !v6 || err != nil {
			t.Error(v4, v6, err)
		}
	})
	netnstest.Do(t, func() {
		if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		if v4, v6, err := Tracking(); v4 || v6 || err != nil {
			t.Error("without a rule:", v4, v6, err)
		}
	})
}
