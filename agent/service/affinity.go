package service

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/agent/mode"
	plane "fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/source"
)

var (
	entriesDesc = prometheus.NewDesc("fairlead_affinity_entries",
		"Session affinity entries, one for each client and Service port, counted every 30 s (modes nftables and ipvs).",
		[]string{"ip_family"}, nil)
	limitDesc = prometheus.NewDesc("fairlead_affinity_entries_limit",
		"Limit of session affinity entries; clients beyond it are served without affinity.", []string{"ip_family"}, nil)
)

// followAffinity counts session affinity entries now and then where their number has a limit, and reports when it is
// reached.
func (s *Services) followAffinity(ctx context.Context) {
	for ctx.Err() == nil {
		uses, err := s.planes.Affinity()
		if uses == nil && err == nil {
			return
		}
		if err != nil {
			s.Log.Debug("counting session affinity entries failed", "error", err)
		} else if s.setAffinity(uses) {
			s.host.Report()
		}
		select {
		case <-ctx.Done():
		case <-time.After(mode.Recount):
		}
	}
}

// setAffinity records how many session affinity entries there are, and reports whether a limit is newly reached or no
// longer is.
func (s *Services) setAffinity(uses []plane.AffinityUse) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.affinityProblems()
	s.affinity = uses
	now := s.affinityProblems()
	for _, p := range now {
		if !slices.Contains(before, p) {
			s.Log.Warn("session affinity entries have reached their limit", "problem", p.String())
		}
	}
	return !slices.Equal(before, now)
}

// affinityProblems returns a problem of the Node for each limit of session affinity that is reached. s.mu is held.
func (s *Services) affinityProblems() (l []source.Problem) {
	for _, u := range s.affinity {
		if u.Entries >= u.Limit {
			l = append(l, source.Problem{Object: source.Key{Kind: source.Node, Name: s.Resolve.Node},
				Reason: "AffinityFull",
				Message: fmt.Sprintf("session affinity of %s has its %d entries: further clients are served, but may come "+
					"to another endpoint with each connection; shorten the timeouts of sessionAffinityConfig", u.Family, u.Limit)})
		}
	}
	return l
}

// collectAffinity makes metrics of the last count.
func (c collector) collectAffinity(ch chan<- prometheus.Metric) {
	c.mu.Lock()
	uses := c.affinity
	c.mu.Unlock()
	for _, u := range uses {
		ch <- prometheus.MustNewConstMetric(entriesDesc, prometheus.GaugeValue, float64(u.Entries), u.Family)
		ch <- prometheus.MustNewConstMetric(limitDesc, prometheus.GaugeValue, float64(u.Limit), u.Family)
	}
}
