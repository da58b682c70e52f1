package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/pprof"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// State is what the status page tells. Each key is always there; fastPath and policies alone may be null.
type State struct {
	Node     string                      `json:"node"`
	Leaving  string                      `json:"leaving"` // why load balancers should send nothing new here
	Mode     string                      `json:"mode"`
	Why      string                      `json:"why"` // that mode
	Ready    bool                        `json:"ready"`
	Batches  int                         `json:"batches"`  // of changes, from the source
	Loops    map[string]reconcile.Status `json:"loops"`    // by data plane
	FastPath *service.FastPath           `json:"fastPath"` // of packets for pods; null but in mode ebpf
	Policies *PolicyState                `json:"policies"` // null where they are off
	Problems []source.Problem            `json:"problems"`
}

// state gathers what the status page tells.
func (a *Agent) state() State {
	ready := a.notReady() == ""
	a.mu.Lock()
	s := State{Node: a.options.Resolve.Node, Leaving: a.resolver.Leaving(), Mode: a.options.Mode.Name,
		Why: a.options.Why, Ready: ready, Batches: a.batches.count,
		Policies: a.policies.state(), Problems: a.inputProblems()}
	a.mu.Unlock()
	s.Problems = append(s.Problems, a.options.Refusal.problems(s.Node)...)
	s.Problems = append(s.Problems, a.forwardProblems()...)
	if s.Problems == nil {
		s.Problems = []source.Problem{}
	}
	s.Loops = a.loops()
	if path, err := a.services.FastPath(); err == nil { // else /metrics has the error
		s.FastPath = path
	}
	for plane, l := range s.Loops {
		few, others := fewPerService(l.Failing)
		for service, n := range others {
			few[fmt.Sprintf("%s: %d more", service, n)] = reconcile.Failing{Error: "refused"}
		}
		l.Failing = few
		s.Loops[plane] = l
	}
	return s
}

// healthPlane is the data plane of healthCheckNodePort.
const healthPlane = "health"

// loops returns the loops' states by data plane.
func (a *Agent) loops() map[string]reconcile.Status {
	m := a.services.Status()
	m[healthPlane] = a.health.Status()
	a.policies.status(m)
	a.network.status(m)
	return m
}

// mostPerService is how many refused owners of one Service are named.
const mostPerService = 10

// fewPerService returns of the labels that fail the first of each owner, and how many others each owner has.
func fewPerService(all map[string]reconcile.Failing) (few map[string]reconcile.Failing, others map[model.Owner]int) {
	few, others = map[string]reconcile.Failing{}, map[model.Owner]int{}
	seen := map[model.Owner]int{}
	for _, label := range sortedKeys(all) {
		service := all[label].Owner
		if seen[service]++; seen[service] <= mostPerService {
			few[label] = all[label]
		} else {
			others[service]++
		}
	}
	return few, others
}

// pages is a mux that knows what it serves.
type pages struct {
	*http.ServeMux
	paths []string
}

func (p *pages) add(path string, h http.Handler) {
	p.Handle(path, h)
	p.paths = append(p.paths, path)
}

// text adds a page of plain text.
func (p *pages) text(path string, write func(w io.Writer)) {
	p.add(path, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		write(escape.Writer(w))
	}))
}

// json adds a page of JSON.
func (p *pages) json(path string, value func() any) {
	p.add(path, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(escape.Writer(w)).Encode(value())
	}))
}

// handler answers kube-proxy's pages (/healthz, /proxyMode, /metrics, /metrics/slis, /configz, /flagz, /statusz) and
// ours (/livez, /readyz, /status), and /debug/pprof if that was asked for.
func (a *Agent) handler() http.Handler {
	s, p := a.options.Servers, &pages{ServeMux: http.NewServeMux()}
	all := prometheus.Gatherers{a.registry}
	if s.Process != nil {
		all = append(all, s.Process)
	}
	p.add("/metrics", promhttp.HandlerFor(all, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	checks := newHealthchecks()
	p.add("/metrics/slis", promhttp.HandlerFor(checks.registry, promhttp.HandlerOpts{}))
	p.text("/healthz", func(w io.Writer) { checks.observe("ping", "healthz", true); io.WriteString(w, "ok") })
	p.text("/livez", func(w io.Writer) { checks.observe("ping", "livez", true); io.WriteString(w, "ok\n") })
	p.add("/readyz", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		why := a.notReady()
		if checks.observe("serving", "readyz", why == ""); why != "" {
			http.Error(w, why, http.StatusServiceUnavailable)
			return
		}
		w.Write([]byte("ok\n"))
	}))
	p.text("/proxyMode", func(w io.Writer) { io.WriteString(w, a.options.Mode.Name) })
	p.json("/status", func() any { return a.state() })
	p.json("/configz", func() any { return s.Config })
	p.add("/flagz", zpage{"Flagz", s.flagz})
	p.add("/statusz", zpage{"Statusz", func(w io.Writer) map[string]any { return a.statusz(w, p.paths) }})
	p.HandleFunc("/{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "Fairlead %s, node %s, mode %s. Pages:\n%s\n", s.Version, escape.String(a.options.Resolve.Node),
			a.options.Mode.Name, strings.Join(p.paths, "\n"))
	})
	if s.Profiling {
		p.add("/debug/pprof/", http.HandlerFunc(pprof.Index))
		p.add("/debug/pprof/profile", http.HandlerFunc(pprof.Profile))
		p.add("/debug/pprof/symbol", http.HandlerFunc(pprof.Symbol))
		p.add("/debug/pprof/trace", http.HandlerFunc(pprof.Trace))
	}
	return p
}
