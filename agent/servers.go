package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/dataplane/httpserver"
)

// Servers is what an agent serves beside packets, and where.
type Servers struct {
	// address of /healthz and /livez for load balancers and probes, such as 0.0.0.0:10256; empty: none
	Health    string
	Metrics   string         // address of /metrics and the other pages, such as 127.0.0.1:10249; empty: none
	HardFail  bool           // an address that can't be had ends the agent; else it is tried again
	Profiling bool           // /debug/pprof is among the pages
	Late      time.Duration  // how long a change may wait for the kernel before the node counts as unhealthy; 0: a minute
	Config    map[string]any // what /configz shows, by API group
	Flags     map[string]string
	Process   prometheus.Gatherer // metrics of the process, beside the agent's; nil: none
	Version   string              // of this program
	Emulates  string              // version of Kubernetes whose kube-proxy this stands for, such as 1.37
}

// again is how long to wait for an address that is taken.
const again = 5 * time.Second

// listen opens an address. Where that fails and may, it returns nil.
func (s Servers) listen(log *slog.Logger, address, flag string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err == nil {
		return l, nil
	}
	err = fmt.Errorf("agent: %w; choose another address with %s, or none", err, flag)
	if s.HardFail {
		return nil, err
	}
	log.Error("bind failed, retrying", "error", err, "retry_in", again)
	return nil, nil
}

// serve answers at an address until ctx ends. l is its listener, nil where it is still to be had.
func (s Servers) serve(ctx context.Context, log *slog.Logger, l net.Listener, address string, h http.Handler) error {
	for l == nil {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(again):
			if got, err := net.Listen("tcp", address); err == nil {
				l = got
				log.Info("bind succeeded", "address", address)
			}
		}
	}
	web := httpserver.New(h)
	stop := context.AfterFunc(ctx, func() { web.Close() })
	defer stop()
	if err := web.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
