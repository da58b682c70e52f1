// Package subsystemtest reads what tests of subsystems and of their agent compare.
package subsystemtest

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Values returns the values of all metrics by name and labels; of histograms their counts and sums.
func Values(t testing.TB, g prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]float64{}
	for _, f := range families {
		for _, x := range f.Metric {
			name := f.GetName()
			for _, l := range x.Label {
				name += " " + l.GetValue()
			}
			switch f.GetType() {
			case dto.MetricType_HISTOGRAM:
				m[name], m[name+" sum"] = float64(x.Histogram.GetSampleCount()), x.Histogram.GetSampleSum()
			case dto.MetricType_COUNTER:
				m[name] = x.Counter.GetValue()
			default:
				m[name] = x.Gauge.GetValue()
			}
		}
	}
	return m
}
