package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/pprof"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// State is the status page.
type State = subsystem.State

// state gathers what the status page shows.
func (a *Agent) state() State {
	notReady, _ := a.notReady()
	s := State{Node: a.options.Resolve.Node, Mode: a.options.Mode.Name, Why: a.options.Why, Ready: notReady == "",
		Loops: map[string]reconcile.Status{}, Problems: a.shownProblems()}
	if s.Problems == nil {
		s.Problems = []source.Problem{}
	}
	a.mu.Lock()
	s.Batches = a.batches.count
	a.mu.Unlock()
	for _, x := range a.subsystems {
		x.Status(&s)
	}
	for plane, l := range a.loops() {
		few, others := fewPerService(l.Failing)
		for service, n := range others {
			few[fmt.Sprintf("%s: %d more", service, n)] = reconcile.Failing{Error: "refused"}
		}
		l.Failing = few
		s.Loops[plane] = l.Status
	}
	return s
}

// loops returns the loops' states by data plane.
func (a *Agent) loops() map[string]subsystem.Loop {
	m := map[string]subsystem.Loop{}
	for _, s := range a.subsystems {
		maps.Copy(m, s.Loops())
	}
	return m
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
		why, _ := a.notReady()
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
