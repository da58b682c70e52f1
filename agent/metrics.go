package agent

import (
	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/reconcile"
)

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

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range loopMetrics {
		ch <- m.desc
	}
	ch <- problemsDesc
	ch <- modeDesc
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	for plane, l := range c.loops() {
		for _, m := range loopMetrics {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(l.Status), plane)
		}
	}
	c.mu.Lock()
	n := len(c.problems)
	c.mu.Unlock()
	for _, s := range c.subsystems {
		n += len(s.Problems().Input)
	}
	ch <- prometheus.MustNewConstMetric(problemsDesc, prometheus.GaugeValue, float64(n))
	ch <- prometheus.MustNewConstMetric(modeDesc, prometheus.GaugeValue, 1, c.options.Mode.Name)
}
