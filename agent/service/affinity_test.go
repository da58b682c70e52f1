package service

import (
	"log/slog"
	"maps"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	plane "fairlead.dev/fairlead/dataplane/service"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// only collects the metrics of session affinity.
type only struct{ collector }

func (o only) Collect(ch chan<- prometheus.Metric) { o.collectAffinity(ch) }

// samples returns how many metrics s collects of session affinity, by name.
func samples(t *testing.T, s *Services) map[string]int {
	r := prometheus.NewRegistry()
	r.MustRegister(only{collector{s}})
	all, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	n := map[string]int{}
	for _, m := range all {
		n[m.GetName()] = len(m.Metric)
	}
	return n
}

// A limit of session affinity that is reached is a problem of the Node while it is, and a metric always.
func TestAffinityLimitReported(t *testing.T) {
	s := &Services{Options: Options{Resolve: resolve.Config{Node: "n1"}, Log: slog.New(slog.DiscardHandler)}}
	if n := samples(t, s); len(n) > 0 {
		t.Errorf("metrics of a mode without a limit: %v", n)
	}
	for i, c := range []struct {
		entries    int
		wantChange bool
		problems   int
	}{{3, false, 0}, {9, false, 0}, {10, true, 1}, {10, false, 1}, {9, true, 0}} {
		uses := []plane.AffinityUse{{Family: "IPv4", Entries: c.entries, Limit: 10}, {Family: "IPv6", Limit: 10}}
		if wantChange := s.setAffinity(uses); wantChange != c.wantChange {
			t.Errorf("count %d, of %d: news is %t", i, c.entries, wantChange)
		}
		if l := s.affinityProblems(); len(l) != c.problems ||
			c.problems > 0 && (l[0].Reason != "AffinityFull" || l[0].Object.Name != "n1") {
			t.Errorf("count %d, of %d: %v", i, c.entries, l)
		}
	}
	want := map[string]int{"fairlead_affinity_entries": 2, "fairlead_affinity_entries_limit": 2}
	if n := samples(t, s); !maps.Equal(n, want) {
		t.Errorf("metrics %v, want %v", n, want)
	}
}
