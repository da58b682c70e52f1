package service

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"
)

// family names as kube-proxy writes them. The kernel is told of both in one go, so what is said of one holds for the
// other.
var bothFamilies = []string{"IPv4", "IPv6"}

// proxyHealth is what /healthz and /livez answer, in the words of kube-proxy (pkg/proxy/healthcheck/proxy_health.go).
type proxyHealth struct {
	LastUpdated  time.Time               `json:"lastUpdated"`
	CurrentTime  time.Time               `json:"currentTime"`
	NodeEligible *bool                   `json:"nodeEligible,omitempty"` // of /healthz alone
	Healthy      bool                    `json:"healthy"`
	Status       map[string]familyHealth `json:"status,omitempty"` // by family; none before the first sync
}

type familyHealth struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// checkup returns how the node's service proxy does at a time.
func (p *progress) checkup(now time.Time) proxyHealth {
	updated, healthy := p.health(now)
	h := proxyHealth{LastUpdated: updated, CurrentTime: now, Healthy: healthy, Status: map[string]familyHealth{}}
	for _, f := range bothFamilies {
		if !updated.IsZero() {
			h.Status[f] = familyHealth{updated, healthy}
		}
	}
	return h
}

// Handler answers /healthz and /livez (KEP-3836): load balancers ask the first, which is 503 also while the node
// is to be deleted, so that they drain it, and while what all Services need is refused by the kernel; whoever restarts
// a proxy that hangs asks the second. As in kube-proxy, a proxy that starts is healthy.
func (s *Services) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		h := s.progress.checkup(time.Now())
		s.mu.Lock()
		eligible := s.resolver.Leaving() == ""
		s.mu.Unlock()
		h.NodeEligible = &eligible
		if serving, why := s.planes.Serving(); !serving && why != "" { // nothing comes through this node
			h.Healthy = false
		}
		s.metrics.healthz.WithLabelValues(h.respond(w, h.Healthy && eligible)).Inc()
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		h := s.progress.checkup(time.Now())
		s.metrics.livez.WithLabelValues(h.respond(w, h.Healthy)).Inc()
	})
	return mux
}

// respond writes the answer and returns its code. The lastUpdated of a good one is now, as kube-proxy has it for those
// who judge by that alone.
func (h proxyHealth) respond(w http.ResponseWriter, good bool) string {
	code := http.StatusServiceUnavailable
	if good {
		code, h.LastUpdated = http.StatusOK, h.CurrentTime
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(h)
	return strconv.Itoa(code)
}
