package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/munnerz/goautoneg"
	"github.com/prometheus/client_golang/prometheus"
	"go.yaml.in/yaml/v3"

	"fairlead.dev/fairlead/agent/escape"
)

// started is when the process began.
var started = time.Now()

const (
	mediaJSON = "application/json"
	mediaYAML = "application/yaml"
	mediaText = "text/plain"
	zGroup    = "config.k8s.io"
)

// zpage is /flagz or /statusz as Kubernetes' components have them (KEP-4827, KEP-4828): text for people, or an object
// by Accept. write writes the text, and returns the object's fields.
type zpage struct {
	kind  string
	write func(io.Writer) map[string]any
}

const textHead = `
fairlead %s
Warning: This text is for people and may change. Programs ask for JSON or YAML by Accept.

`

// ServeHTTP implements http.Handler.
func (z zpage) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	media, version := z.negotiate(r.Header.Get("Accept"))
	w.Header().Set("X-Content-Type-Options", "nosniff")
	to := escape.Writer(w)
	switch media {
	case "":
		z.notAcceptable(w)
	case mediaText:
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(to, textHead, strings.ToLower(z.kind))
		z.write(to)
	default:
		o := z.write(io.Discard)
		o["kind"], o["apiVersion"], o["metadata"] = z.kind, zGroup+"/"+version, map[string]string{"name": "fairlead"}
		w.Header().Set("Content-Type", media)
		if version != "v1beta1" {
			w.Header().Set("Warning", `299 - "This version is deprecated: use v1beta1."`)
		}
		if media == mediaJSON {
			json.NewEncoder(to).Encode(o)
		} else {
			yaml.NewEncoder(to).Encode(o)
		}
	}
}

// negotiate returns the media type that an Accept header asks for, and the object's version. An empty header is for
// text; media is empty where nothing fits.
func (z zpage) negotiate(accept string) (media, version string) {
	if strings.TrimSpace(accept) == "" {
		return mediaText, ""
	}
	for _, c := range goautoneg.ParseAccept(accept) {
		p := c.Params
		object := p["as"]+p["g"]+p["v"] != ""
		fits := p["as"] == z.kind && p["g"] == zGroup && (p["v"] == "v1beta1" || p["v"] == "v1alpha1")
		for _, media := range []string{mediaJSON, mediaYAML, mediaText} {
			kind, sub, _ := strings.Cut(media, "/")
			if !(c.Type == kind && (c.SubType == sub || c.SubType == "*") || c.Type == "*" && c.SubType == "*") {
				continue
			}
			if media == mediaText && !object || media != mediaText && fits {
				return media, p["v"]
			}
		}
	}
	return "", ""
}

// notAcceptable answers 406 with a Status that says what is served.
func (z zpage) notAcceptable(w http.ResponseWriter) {
	w.Header().Set("Content-Type", mediaJSON)
	w.WriteHeader(http.StatusNotAcceptable)
	as := ";as=" + z.kind + ";v=v1beta1;g=" + zGroup
	json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "apiVersion": "v1", "metadata": struct{}{},
		"status": "Failure", "reason": "NotAcceptable", "code": http.StatusNotAcceptable,
		"message": "only the following media types are accepted: " + mediaText + ", " + mediaJSON + as + ", " +
			mediaYAML + as})
}

// flagz writes the flags. None holds a secret.
func (s Servers) flagz(w io.Writer) map[string]any {
	for _, name := range slices.Sorted(maps.Keys(s.Flags)) {
		fmt.Fprintf(w, "%s=%s\n", name, s.Flags[name])
	}
	return map[string]any{"flags": s.Flags}
}

// statusz writes what the process is, since when, and which pages there are.
func (a *Agent) statusz(w io.Writer, paths []string) map[string]any {
	s, up := a.options.Servers, int64(time.Since(started).Seconds())
	paths = slices.Sorted(slices.Values(paths))
	fmt.Fprintf(w, "Started: %s\nUp: %d hr %02d min %02d sec\n"+
		"Go version: %s\nBinary version: %s\nEmulation version: %s\n",
		started.Format(time.UnixDate), up/3600, up/60%60, up%60, runtime.Version(), s.Version, s.Emulates)
	fmt.Fprintf(w, "Node: %s\nMode: %s (%s)\nPaths: %s\n", a.options.Resolve.Node, a.options.Mode.Name, a.options.Why,
		strings.Join(paths, " "))
	return map[string]any{"startTime": started.UTC().Format(time.RFC3339), "uptimeSeconds": up,
		"goVersion": runtime.Version(), "binaryVersion": s.Version, "emulationVersion": s.Emulates, "paths": paths}
}

// healthchecks are the metrics of /metrics/slis (KEP-3466): how the checks of the agent's own pages ended.
type healthchecks struct {
	registry *prometheus.Registry
	last     *prometheus.GaugeVec
	total    *prometheus.CounterVec
}

func newHealthchecks() *healthchecks {
	h := &healthchecks{registry: prometheus.NewRegistry(),
		last: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "kubernetes_healthcheck",
			Help: "1 if the last result of a check was success, else 0."}, []string{"name", "type"}),
		total: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kubernetes_healthchecks_total",
			Help: "Results of checks."}, []string{"name", "type", "status"})}
	h.registry.MustRegister(h.last, h.total)
	return h
}

// observe counts an answer.
func (h *healthchecks) observe(name, kind string, good bool) {
	value, status := 0.0, "error"
	if good {
		value, status = 1, "success"
	}
	h.last.WithLabelValues(name, kind).Set(value)
	h.total.WithLabelValues(name, kind, status).Inc()
}
