package agent

import (
	"encoding/json"
	"net/http"
	"net/http/pprof"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// State is what the status page tells.
type State struct {
	Node     string                      `json:"node"`
	Mode     string                      `json:"mode"`
	Ready    bool                        `json:"ready"`
	Batches  int                         `json:"batches"` // of changes, from the source
	Loops    map[string]reconcile.Status `json:"loops"`   // by data plane
	Problems []source.Problem            `json:"problems,omitempty"`
}

// state gathers what the status page tells.
func (a *Agent) state() State {
	a.mu.Lock()
	s := State{Node: a.options.Resolve.Node, Mode: a.options.Mode.Name, Ready: a.synced, Batches: a.batches,
		Problems: append(a.problems[:len(a.problems):len(a.problems)], a.resolver.Problems()...)}
	a.mu.Unlock()
	s.Loops = a.loops()
	return s
}

// loops gives the loops' states by data plane.
func (a *Agent) loops() map[string]reconcile.Status {
	m := a.services.Status()
	m["health"] = a.health.Status()
	return m
}

// handler answers /readyz, /livez, /status (JSON), /metrics (Prometheus) and /debug/pprof.
func (a *Agent) handler() http.Handler {
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(collector{a}, a.programming.took, collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collectors.NewGoCollector())
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !a.ready() {
			http.Error(w, "the first state of the source is not in the kernel yet", http.StatusServiceUnavailable)
			return
		}
		w.Write([]byte("ok\n"))
	})
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(a.state())
	})
	return mux
}

// collector makes metrics of the loops' states when they are asked for.
type collector struct{ *Agent }

// metric is a metric of each loop.
type metric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(reconcile.Status) float64
}

// loopMetrics are the metrics of each loop, by data plane.
var loopMetrics = func() (l []metric) {
	add := func(name, help string, kind prometheus.ValueType, value func(reconcile.Status) float64) {
		l = append(l, metric{prometheus.NewDesc("fairlead_"+name, help, []string{"plane"}, nil), kind, value})
	}
	add("facts", "Facts that the kernel holds of ours.", prometheus.GaugeValue, func(s reconcile.Status) float64 { return float64(s.Held) })
	add("writes_total", "Transactions written to the kernel.", prometheus.CounterValue, func(s reconcile.Status) float64 { return float64(s.Writes) })
	add("facts_put_total", "Facts made true.", prometheus.CounterValue, func(s reconcile.Status) float64 { return float64(s.Puts) })
	add("facts_deleted_total", "Facts made untrue.", prometheus.CounterValue, func(s reconcile.Status) float64 { return float64(s.Dels) })
	add("repairs_total", "Facts that others had changed and that were put right.", prometheus.CounterValue, func(s reconcile.Status) float64 { return float64(s.Repairs) })
	add("retries_total", "Writes tried again after a failure.", prometheus.CounterValue, func(s reconcile.Status) float64 { return float64(s.Retries) })
	add("failing_owners", "Services and others whose facts the kernel refuses.", prometheus.GaugeValue, func(s reconcile.Status) float64 { return float64(len(s.Failing)) })
	add("first_sync_seconds", "How long the first sync took.", prometheus.GaugeValue, func(s reconcile.Status) float64 { return s.FirstSyncTook.Seconds() })
	return l
}()

var problemsDesc = prometheus.NewDesc("fairlead_input_problems", "Problems in the input that stand now.", nil, nil)

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range loopMetrics {
		ch <- m.desc
	}
	ch <- problemsDesc
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	for plane, s := range c.loops() {
		for _, m := range loopMetrics {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(s), plane)
		}
	}
	c.mu.Lock()
	n := len(c.problems) + len(c.resolver.Problems())
	c.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(problemsDesc, prometheus.GaugeValue, float64(n))
}
