package policy

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	engineDesc = prometheus.NewDesc("fairlead_policy_engine", "1 for the policy engine in use; none where policies are "+
		"off. With audit, policies drop nothing.", []string{"engine", "audit"}, nil)
	sourceCheckDesc = prometheus.NewDesc("fairlead_policy_source_check", "1 with policy.sourceCheck Always: packets "+
		"with a pod's address are dropped where they come in by another device than the pod's, and packets that come in "+
		"by a pod's device with another address, as far as pods have devices of their own. 0 with Never; none where "+
		"policies are off.", nil, nil)
	policyPartsDesc = prometheus.NewDesc("fairlead_policy_parts", "What policies come to on this node: devices of its "+
		"pods (devices), their addresses (subjects), what decides for them (rulesets, peer_tables, peer_verdicts), and "+
		"the addresses that policies name (peers).", []string{"kind"}, nil)
	outcomesDesc = prometheus.NewDesc("fairlead_policy_ebpf_packets_total", "Packets by outcome: denied by a policy; "+
		"audited: passed, and audited policies would drop them; cut, of a connection that is no longer allowed; dropped "+
		"for an unknown_pod at their source or destination, or a forged source; unparsed, dropped because their ports are "+
		"not known; incomplete, dropped while policies are being written or don't fit. flow counts connections that began, "+
		"redirected packets that were evaluated where they entered and bypassed the host stack (Services' mode ebpf), "+
		"unlogged events that were not reported.", []string{"outcome"}, nil)
)

// Metrics implements subsystem.Subsystem.
func (p *Policies) Metrics() []prometheus.Collector {
	return []prometheus.Collector{p.progress.latency, collector{p}}
}

// collector makes metrics of what policies are and have done.
type collector struct{ *Policies }

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{engineDesc, sourceCheckDesc, policyPartsDesc, cutDesc, cuttingDesc, deniedDesc,
		auditedDesc, policyPacketsDesc, outcomesDesc, namesDesc, answersDesc, goneDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(engineDesc, prometheus.GaugeValue, 1, c.Engine.Name,
		fmt.Sprint(c.Resolve.Audit))
	checks := 1.0
	if c.AnySource {
		checks = 0
	}
	ch <- prometheus.MustNewConstMetric(sourceCheckDesc, prometheus.GaugeValue, checks)
	for kind, n := range c.progress.counts() {
		ch <- prometheus.MustNewConstMetric(policyPartsDesc, prometheus.GaugeValue, float64(n), kind)
	}
	c.established.collect(ch)
	c.names.collect(ch)
	packets, err := c.plane.Outcomes()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(outcomesDesc, err)
		return
	}
	for outcome, n := range packets {
		ch <- prometheus.MustNewConstMetric(outcomesDesc, prometheus.CounterValue, float64(n), outcome)
	}
}
