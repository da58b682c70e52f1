package agent

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
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
	lacks                      map[lack]int // frontends by what they lack, of those that do
	lacking                    map[lack]int // Services' ports by what they lack: Service is empty
	latencies
}

// latencies are ours: how long changes took, finer.
type latencies struct{ latency, policyLatency prometheus.Histogram }

func newLatencies(r prometheus.Registerer) latencies {
	histogram := func(name, of string) prometheus.Histogram {
		h := prometheus.NewHistogram(native(prometheus.HistogramOpts{Name: "fairlead_" + name,
			Help:    fmt.Sprintf("Time from receiving a change%s until it is in the kernel.", of),
			Buckets: prometheus.ExponentialBucketsRange(100e-6, 10, 41)}))
		r.MustRegister(h)
		return h
	}
	return latencies{histogram("programming_seconds", ""),
		histogram("policy_programming_seconds", " of policies, pods or namespaces")}
}

// lack is a Service's port that has endpoints, but none here where its traffic policy wants them.
type lack struct{ policy, family, service string }

func newProxyMetrics(r prometheus.Registerer) *proxyMetrics {
	m := &proxyMetrics{lacks: map[lack]int{}, lacking: map[lack]int{}}
	times := prometheus.ExponentialBuckets(0.001, 2, 15)
	buckets := append(prometheus.LinearBuckets(0.25, 0.25, 2), prometheus.LinearBuckets(1, 1, 59)...)
	buckets = append(append(buckets, prometheus.LinearBuckets(60, 5, 12)...), prometheus.LinearBuckets(120, 30, 7)...)
	histogram := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		v := prometheus.NewHistogramVec(native(prometheus.HistogramOpts{Name: "kubeproxy_" + name, Help: help,
			Buckets: buckets}), []string{"ip_family"})
		r.MustRegister(v)
		for _, f := range bothFamilies {
			v.WithLabelValues(f)
		}
		return v
	}
	gauges := func(name, help string, labels ...string) *prometheus.GaugeVec {
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "kubeproxy_" + name, Help: help}, labels)
		r.MustRegister(v)
		return v
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kubeproxy_" + name, Help: help}, labels)
		r.MustRegister(v)
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
	m.latencies = newLatencies(r)
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

// native returns a histogram's options with native buckets beside the classic ones, of the size that Kubernetes' have.
func native(o prometheus.HistogramOpts) prometheus.HistogramOpts {
	o.NativeHistogramBucketFactor, o.NativeHistogramMaxBucketNumber = 1.1, 160
	return o
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
	before := m.lacks[l]
	m.lacks[l] += by
	of := lack{l.policy, l.family, ""}
	switch {
	case m.lacks[l] == 0:
		delete(m.lacks, l)
		m.lacking[of]--
	case before == 0:
		m.lacking[of]++
	}
	m.noLocal.WithLabelValues(of.policy, of.family).Set(float64(m.lacking[of]))
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
	add("facts", "Facts (rules, set elements, map entries) that Fairlead has in the kernel.", prometheus.GaugeValue,
		func(s reconcile.Status) float64 { return float64(s.Held) })
	add("facts_unsynced", "Facts that are out of sync.", prometheus.GaugeValue,
		func(s reconcile.Status) float64 { return float64(s.Unsynced) })
	add("writes_total", "Transactions written to the kernel.", prometheus.CounterValue,
		func(s reconcile.Status) float64 { return float64(s.Writes) })
	add("facts_put_total", "Facts written.", prometheus.CounterValue,
		func(s reconcile.Status) float64 { return float64(s.Puts) })
	add("facts_deleted_total", "Facts deleted.", prometheus.CounterValue,
		func(s reconcile.Status) float64 { return float64(s.Dels) })
	add("repairs_total", "Facts that another program had changed and that were repaired.", prometheus.CounterValue,
		func(s reconcile.Status) float64 { return float64(s.Repairs) })
	add("retries_total", "Reads and writes retried after a failure.", prometheus.CounterValue,
		func(s reconcile.Status) float64 { return float64(s.Retries) })
	add("failures_total", "Reads and writes that failed.", prometheus.CounterValue,
		func(s reconcile.Status) float64 { return float64(s.Failures) })
	add("failing_owners", "Owners, mostly Services, whose facts the kernel rejects.", prometheus.GaugeValue,
		func(s reconcile.Status) float64 { return float64(len(s.Failing)) })
	add("first_sync_seconds", "Duration of the first sync.", prometheus.GaugeValue,
		func(s reconcile.Status) float64 { return s.FirstSyncDuration.Seconds() })
	add("last_write_seconds", "Duration of the last write.", prometheus.GaugeValue,
		func(s reconcile.Status) float64 { return s.LastWrite.Seconds() })
	return l
}()

var (
	problemsDesc = prometheus.NewDesc("fairlead_input_problems", "Active problems in the input.", nil, nil)
	modeDesc     = prometheus.NewDesc("fairlead_mode", "1 for the mode in use.", []string{"mode"}, nil)
)

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

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range loopMetrics {
		ch <- m.desc
	}
	for _, d := range []*prometheus.Desc{problemsDesc, modeDesc, connectionsDesc,
		refusedDesc, packetsDesc, fastPathDesc, slowReasonDesc, excludedDesc, boundDesc, droppedDesc, localhostDesc,
		invalidDesc, entriesDesc, limitDesc, engineDesc, sourceCheckDesc, policyPartsDesc, cutDesc, cuttingDesc,
		deniedDesc, auditedDesc, policyPacketsDesc, outcomesDesc, networkDroppedDesc, namesDesc,
		answersDesc, goneDesc} {
		ch <- d
	}
	for _, d := range failures {
		ch <- d // some more than once
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	for plane, s := range c.loops() {
		for _, m := range loopMetrics {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(s), plane)
		}
		if d := failures[plane]; d != nil {
			for _, f := range bothFamilies {
				ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(s.Failures), f)
			}
		}
	}
	c.mu.Lock()
	n := len(c.problems) + len(c.resolver.Problems()) + len(c.policies.Problems())
	c.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(problemsDesc, prometheus.GaugeValue, float64(n))
	ch <- prometheus.MustNewConstMetric(modeDesc, prometheus.GaugeValue, 1, c.options.Mode.Name)
	c.collectServices(ch)
	c.collectPackets(ch)
	c.collectFastPath(ch)
	c.collectRefused(ch)
	c.collectCounted(ch)
	c.collectAffinity(ch)
	c.collectPolicies(ch)
	c.collectNetwork(ch)
}
