package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/pprof"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// State is what the status page tells.
type State struct {
	Node     string                      `json:"node"`
	Leaving  string                      `json:"leaving,omitempty"` // why load balancers should send nothing new here
	Mode     string                      `json:"mode"`
	Why      string                      `json:"why,omitempty"` // that mode
	Ready    bool                        `json:"ready"`
	Batches  int                         `json:"batches"` // of changes, from the source
	Loops    map[string]reconcile.Status `json:"loops"`   // by data plane
	Problems []source.Problem            `json:"problems,omitempty"`
}

// state gathers what the status page tells.
func (a *Agent) state() State {
	ready := a.notReady() == ""
	a.mu.Lock()
	s := State{Node: a.options.Resolve.Node, Leaving: a.resolver.Leaving(), Mode: a.options.Mode.Name,
		Why: a.options.Why, Ready: ready, Batches: a.batches,
		Problems: slices.Concat(a.problems, a.resolver.Problems(), a.affinityProblems())}
	a.mu.Unlock()
	s.Loops = a.loops()
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

// loops gives the loops' states by data plane.
func (a *Agent) loops() map[string]reconcile.Status {
	m := a.services.Status()
	m["health"] = a.health.Status()
	return m
}

// mostPerService is how many refused owners of one Service are named.
const mostPerService = 10

// fewPerService returns of the owners that fail the first of each Service, and how many others each Service has.
func fewPerService(all map[string]reconcile.Failing) (few map[string]reconcile.Failing, others map[string]int) {
	few, others = map[string]reconcile.Failing{}, map[string]int{}
	seen := map[string]int{}
	for _, owner := range sortedKeys(all) {
		service := serviceOf(owner)
		if seen[service]++; seen[service] <= mostPerService {
			few[owner] = all[owner]
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

// handler answers kube-proxy's pages (/healthz, /proxyMode, /metrics, /configz, /flagz, /statusz) and ours (/livez, /readyz,
// /status), and /debug/pprof if that was asked for.
func (a *Agent) handler() http.Handler {
	s, p := a.options.Servers, &pages{ServeMux: http.NewServeMux()}
	started := time.Now()
	p.add("/metrics", promhttp.HandlerFor(a.registry, promhttp.HandlerOpts{}))
	p.text("/healthz", func(w io.Writer) { io.WriteString(w, "ok") })
	p.text("/livez", func(w io.Writer) { io.WriteString(w, "ok\n") })
	p.add("/readyz", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if why := a.notReady(); why != "" {
			http.Error(w, why, http.StatusServiceUnavailable)
			return
		}
		w.Write([]byte("ok\n"))
	}))
	p.text("/proxyMode", func(w io.Writer) { io.WriteString(w, a.options.Mode.Name) })
	p.json("/status", func() any { return a.state() })
	p.json("/configz", func() any { return s.Config })
	p.text("/flagz", func(w io.Writer) {
		for _, name := range slices.Sorted(maps.Keys(s.Flags)) {
			fmt.Fprintf(w, "%s=%s\n", name, s.Flags[name])
		}
	})
	p.text("/statusz", func(w io.Writer) {
		fmt.Fprintf(w, "fairlead statusz\n\nStarted: %s\nUp: %s\nGo version: %s\nNode: %s\nMode: %s (%s)\nPaths: %s\n", started.Format(time.UnixDate),
			time.Since(started).Truncate(time.Second), runtime.Version(), a.options.Resolve.Node, a.options.Mode.Name, a.options.Why, strings.Join(p.paths, " "))
	})
	if s.Profiling {
		p.add("/debug/pprof/", http.HandlerFunc(pprof.Index))
		p.add("/debug/pprof/profile", http.HandlerFunc(pprof.Profile))
		p.add("/debug/pprof/symbol", http.HandlerFunc(pprof.Symbol))
		p.add("/debug/pprof/trace", http.HandlerFunc(pprof.Trace))
	}
	return p
}
