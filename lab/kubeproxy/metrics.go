package kubeproxy

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Times is how often something was done, and how long that took together.
type Times struct {
	Count uint64
	Sum   time.Duration
}

// Metrics is what of kube-proxy's /metrics the lab reads: what was done for IPv4 since the program started
// (kubernetes/pkg/proxy/metrics/metrics.go). Its loop for IPv6 runs beside, with nothing to do in the lab's clusters.
type Metrics struct {
	// sync_proxy_rules_duration_seconds: from a sync's begin to its end, most of it waiting for nft or iptables
	Syncs   Times
	Full    Times // sync_full_proxy_rules_duration_seconds: of these, those that wrote everything
	Partial Times // sync_partial_proxy_rules_duration_seconds: those that wrote what had changed
	// network_programming_duration_seconds: from an EndpointSlice's trigger time to the end of its sync
	Programming Times
	// sync_proxy_rules_last_timestamp_seconds: the end of the last sync that succeeded; zero before the first
	Last     time.Time
	Failures float64 // of telling the kernel
}

// Metrics requests them.
func (p *Proxy) Metrics(ctx context.Context) (Metrics, error) {
	b, err := p.get(ctx, "http://"+metricsAddress+"/metrics")
	if err != nil {
		return Metrics{}, fmt.Errorf("ask %s for its metrics: %w", p, err)
	}
	m, err := ParseMetrics(b)
	if err != nil {
		return Metrics{}, fmt.Errorf("read the metrics of %s: %w", p, err)
	}
	return m, nil
}

// ParseMetrics reads them, of a kube-proxy or of whoever tells them by its names.
func ParseMetrics(text []byte) (Metrics, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	all, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return Metrics{}, err
	}
	of := func(name string) *dto.MetricFamily { return all["kubeproxy_"+name] }
	var last time.Time
	for m := range ours(of("sync_proxy_rules_last_timestamp_seconds")) {
		if s := m.GetGauge().GetValue(); s > 0 {
			last = time.UnixMicro(int64(s * 1e6))
		}
	}
	return Metrics{
		Last:        last,
		Syncs:       histograms(of("sync_proxy_rules_duration_seconds")),
		Full:        histograms(of("sync_full_proxy_rules_duration_seconds")),
		Partial:     histograms(of("sync_partial_proxy_rules_duration_seconds")),
		Programming: histograms(of("network_programming_duration_seconds")),
		Failures: count(of("sync_proxy_rules_iptables_restore_failures_total")) +
			count(of("sync_proxy_rules_iptables_partial_restore_failures_total")) +
			count(of("sync_proxy_rules_nftables_sync_failures_total")),
	}, nil
}

// ours returns a metric's values that are not for IPv6.
func ours(f *dto.MetricFamily) iter.Seq[*dto.Metric] {
	six := func(l *dto.LabelPair) bool { return l.GetName() == "ip_family" && l.GetValue() == "IPv6" }
	return func(yield func(*dto.Metric) bool) {
		for _, m := range f.GetMetric() {
			if !slices.ContainsFunc(m.GetLabel(), six) && !yield(m) {
				return
			}
		}
	}
}

// histograms adds the histograms of a metric.
func histograms(f *dto.MetricFamily) (t Times) {
	for m := range ours(f) {
		t.Count += m.GetHistogram().GetSampleCount()
		t.Sum += time.Duration(m.GetHistogram().GetSampleSum() * float64(time.Second))
	}
	return t
}

// count adds the counters of a metric.
func count(f *dto.MetricFamily) (n float64) {
	for m := range ours(f) {
		n += m.GetCounter().GetValue()
	}
	return n
}
