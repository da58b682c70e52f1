package result

import (
	"encoding/json"
	"testing"
)

// On disk a metric is its name, as runs of any age have it.
func TestMetricsOnDisk(t *testing.T) {
	for m, want := range map[Metric]string{
		Value: "value", Ratio: "ratio", More: "more", Failed: "failed", Fit: "p", P99: "p99", Mean: "mean",
		Imbalance: "imbalance",
		CPU:       "cpu", CPUOf("softirq"): "cpu:softirq", Rate("bytes"): "rate:bytes", Spent("bytes"): "spent:bytes",
		Counter("facts"): "counter:facts",
	} {
		b, err := json.Marshal(Measure{Stat: m})
		var back struct{ Stat string }
		if err := json.Unmarshal(b, &back); err != nil || back.Stat != want {
			t.Errorf("%s is written as %q, want %q: %v", m, back.Stat, want, err)
		}
		if err != nil {
			t.Error(err)
		}
	}
}

func TestPercent(t *testing.T) {
	for m, want := range map[Metric]float64{P50: 50, "p99.9": 99.9, "p0": 0, "p100": 0, Fit: 0, Value: 0, "pi": 0,
		"99": 0} {
		if got, err := m.Percent(); got != want || (err == nil) != (want > 0) {
			t.Errorf("%s: %v, %v; want %v", m, got, err, want)
		}
	}
	if P99.IsQuantile() != true || Fit.IsQuantile() || Mean.IsQuantile() {
		t.Error("p99 alone is a quantile")
	}
}

func TestParams(t *testing.T) {
	p := Params{"services": "10"}
	if q := p.With("kernel", "empty"); q.String() != "kernel=empty services=10" || p.String() != "services=10" {
		t.Errorf("%s, then %s", q, p)
	}
	if q := Params(nil).With("program", "connect4"); q.String() != "program=connect4" {
		t.Errorf("%s", q)
	}
}
