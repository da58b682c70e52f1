package agent

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/source"
)

var (
	entriesDesc = prometheus.NewDesc("fairlead_affinity_entries",
		"Session affinity entries, one for each client and Service port, counted every 30 s (modes nftables and ipvs).",
		[]string{"ip_family"}, nil)
	limitDesc = prometheus.NewDesc("fairlead_affinity_entries_limit",
		"Limit of session affinity entries; clients beyond it are served without affinity.", []string{"ip_family"}, nil)
)

// followAffinity counts session affinity entries now and then where their number has a limit, and tells when it is
// reached.
func (a *Agent) followAffinity(ctx context.Context) {
	for ctx.Err() == nil {
		uses, err := a.services.Affinity()
		if uses == nil && err == nil {
			return
		}
		if err != nil {
			a.options.Log.Debug("counting session affinity entries failed", "error", err)
		} else if a.setAffinity(uses) && a.options.Report != nil {
			a.options.Report(a.standing())
		}
		select {
		case <-ctx.Done():
		case <-time.After(mode.Recount):
		}
	}
}

// setAffinity records how many session affinity entries there are, and reports whether a limit is newly reached or no
// longer is.
func (a *Agent) setAffinity(uses []service.AffinityUse) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	before := a.affinityProblems()
	a.affinity = uses
	now := a.affinityProblems()
	for _, p := range now {
		if !slices.Contains(before, p) {
			a.options.Log.Warn("session affinity entries have reached their limit", "problem", p.String())
		}
	}
	return !slices.Equal(before, now)
}

// affinityProblems returns a problem of the Node for each limit of session affinity that is reached. a.mu is held.
func (a *Agent) affinityProblems() (l []source.Problem) {
	for _, u := range a.affinity {
		if u.Entries >= u.Limit {
			l = append(l, source.Problem{Object: source.Key{Kind: source.Node, Name: a.options.Resolve.Node},
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
