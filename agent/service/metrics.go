package service

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/model"
)

// proxyMetrics are those that dashboards of kube-proxy ask for, by its names, labels and buckets
// (pkg/proxy/metrics/metrics.go).
type proxyMetrics struct {
	syncs, full, partial       *prometheus.HistogramVec
	programming                *prometheus.HistogramVec
	lastSync, lastQueued       *prometheus.GaugeVec
	slicesPending, svcsPending prometheus.Gauge
	slicesTotal, svcsTotal     prometheus.Counter
	noLocal                    *prometheus.GaugeVec
	healthz, livez             *prometheus.CounterVec
	latency                    prometheus.Histogram // ours: how long changes took, finer
	all                        []prometheus.Collector
	lacking
}

// lacking counts what lacks something.
type lacking struct {
	frontends map[lack]int // by what they lack
	ports     map[lack]int // Services' ports likewise: Service is empty
}

// lack is a Service's port that has endpoints, but none here where its traffic policy wants them.
type lack struct{ policy, family, service string }

func newProxyMetrics() *proxyMetrics {
	m := &proxyMetrics{lacking: lacking{map[lack]int{}, map[lack]int{}},
		latency: subsystem.Latency("programming_seconds", "")}
	m.all = append(m.all, m.latency)
	times := prometheus.ExponentialBuckets(0.001, 2, 15)
	buckets := append(prometheus.LinearBuckets(0.25, 0.25, 2), prometheus.LinearBuckets(1, 1, 59)...)
	buckets = append(append(buckets, prometheus.LinearBuckets(60, 5, 12)...), prometheus.LinearBuckets(120, 30, 7)...)
	histogram := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		v := prometheus.NewHistogramVec(subsystem.Native(prometheus.HistogramOpts{Name: "kubeproxy_" + name, Help: help,
			Buckets: buckets}), []string{"ip_family"})
		m.all = append(m.all, v)
		for _, f := range bothFamilies {
			v.WithLabelValues(f)
		}
		return v
	}
	gauges := func(name, help string, labels ...string) *prometheus.GaugeVec {
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "kubeproxy_" + name, Help: help}, labels)
		m.all = append(m.all, v)
		return v
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kubeproxy_" + name, Help: help}, labels)
		m.all = append(m.all, v)
		return v
	}
	m.syncs = histogram("sync_proxy_rules_duration_seconds", "Time from receiving a change until it is in the kernel.",
		times)
	m.full = histogram("sync_full_proxy_rules_duration_seconds",
		"Time of the first sync, as sync_proxy_rules_duration_seconds.", times)
	m.partial = histogram("sync_partial_proxy_rules_duration_seconds",
		"Time of all later syncs, as sync_proxy_rules_duration_seconds.", times)
	m.programming = histogram("network_programming_duration_seconds",
		"Time from an endpoint's change in the cluster until it is in the kernel, by both clocks.", buckets)
	m.lastSync = gauges("sync_proxy_rules_last_timestamp_seconds", "Unix time when the kernel was last in sync.",
		"ip_family")
	m.lastQueued = gauges("sync_proxy_rules_last_queued_timestamp_seconds", "Unix time when a change was last received.",
		"ip_family")
	m.slicesPending = gauges("sync_proxy_rules_endpoint_changes_pending",
		"Changed EndpointSlices that are not in the kernel yet.").WithLabelValues()
	m.slicesTotal = counters("sync_proxy_rules_endpoint_changes_total", "Changed EndpointSlices.").WithLabelValues()
	m.svcsPending = gauges("sync_proxy_rules_service_changes_pending",
		"Changed Services that are not in the kernel yet.").WithLabelValues()
	m.svcsTotal = counters("sync_proxy_rules_service_changes_total", "Changed Services.").WithLabelValues()
	m.noLocal = gauges("sync_proxy_rules_no_local_endpoints_total",
		"Service ports with traffic policy Local that have endpoints, but none on this node.", "traffic_policy", "ip_family")
	m.healthz = counters("proxy_healthz_total", "Responses of /healthz.", "code")
	m.livez = counters("proxy_livez_total", "Responses of /livez.", "code")
	for _, f := range bothFamilies {
		m.noLocal.WithLabelValues("internal", f)
		m.noLocal.WithLabelValues("external", f)
	}
	for _, code := range []string{"200", "503"} {
		m.healthz.WithLabelValues(code)
		m.livez.WithLabelValues(code)
	}
	return m
}

// requested records that changes came.
func (m *proxyMetrics) requested(now time.Time, q queued) {
	for _, f := range bothFamilies {
		m.lastQueued.WithLabelValues(f).Set(seconds(now))
	}
	m.slicesTotal.Add(float64(q.slices))
	m.svcsTotal.Add(float64(q.services))
}

func (m *proxyMetrics) pending(q queued) {
	m.slicesPending.Set(float64(q.slices))
	m.svcsPending.Set(float64(q.services))
}

// synced records that the kernel has what was queued.
func (m *proxyMetrics) synced(now time.Time, latency time.Duration, first bool, q queued) {
	which := m.partial
	if first {
		which = m.full
	}
	for _, f := range bothFamilies {
		m.syncs.WithLabelValues(f).Observe(latency.Seconds())
		which.WithLabelValues(f).Observe(latency.Seconds())
		m.lastSync.WithLabelValues(f).Set(seconds(now))
		for _, t := range q.triggered {
			m.programming.WithLabelValues(f).Observe(max(0, now.Sub(t).Seconds())) // the cluster's clock may be ahead
		}
	}
	for _, t := range q.seen {
		m.latency.Observe(now.Sub(t).Seconds())
	}
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

// changed counts the Services that lack local endpoints anew.
func (m *proxyMetrics) changed(d model.Delta) {
	for _, p := range d.Services.Del {
		if f, ok := p.(*model.Frontend); ok {
			m.count(f, -1)
		}
	}
	for _, p := range d.Services.Put {
		if f, ok := p.(*model.Frontend); ok {
			m.count(f, 1)
		}
	}
}

// count adds a frontend that lacks something, or takes it away. A Service's port counts once, however many frontends it
// has.
func (m *proxyMetrics) count(f *model.Frontend, by int) {
	target, l := f.External, lack{"external", bothFamilies[0], f.Service}
	if f.Via == model.ViaClusterIP {
		target, l.policy = f.Internal, "internal"
	}
	if len(target.Pool.Backends) > 0 || target.Empty != model.Drop {
		return
	}
	if f.Entry.Addr.Is6() {
		l.family = bothFamilies[1]
	}
	before := m.frontends[l]
	m.frontends[l] += by
	of := lack{l.policy, l.family, ""}
	switch {
	case m.frontends[l] == 0:
		delete(m.frontends, l)
		m.ports[of]--
	case before == 0:
		m.ports[of]++
	}
	m.noLocal.WithLabelValues(of.policy, of.family).Set(float64(m.ports[of]))
}

// failures are kube-proxy's counters of failures, by the planes' names.
var failures = func() map[string]*prometheus.Desc {
	descs, byName := map[string]*prometheus.Desc{}, map[string]*prometheus.Desc{}
	for plane, m := range mode.FailureMetrics {
		if byName[m.Name] == nil {
			byName[m.Name] = prometheus.NewDesc(m.Name, m.Help, []string{"ip_family"}, nil)
		}
		descs[plane] = byName[m.Name]
	}
	return descs
}()

// Metrics implements subsystem.Subsystem.
func (s *Services) Metrics() []prometheus.Collector { return append(s.metrics.all, collector{s}) }

// collector makes metrics of what became of Services' clients.
type collector struct{ *Services }

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{connectionsDesc, refusedDesc, packetsDesc, fastPathDesc, slowReasonDesc,
		hookDesc, excludedDesc, boundDesc, droppedDesc, localhostDesc, invalidDesc, entriesDesc, limitDesc} {
		ch <- d
	}
	for _, d := range failures {
		ch <- d // some more than once
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	for name, s := range c.planes.Status() {
		if d := failures[name]; d != nil {
			for _, f := range bothFamilies {
				ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(s.Failures), f)
			}
		}
	}
	c.collectServices(ch)
	c.collectPackets(ch)
	c.collectFastPath(ch)
	c.collectRefused(ch)
	c.collectCounted(ch)
	c.collectAffinity(ch)
}
