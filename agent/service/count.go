package service

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	plane "fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
)

// servicesOf are the names of pools' Services, by the pools' IDs, for as long as the pools are wanted.
type servicesOf map[uint64]string

// follow records a change.
func (s servicesOf) follow(put, del []model.ServicePart) {
	for _, p := range del {
		if v, ok := p.(*model.Pool); ok {
			delete(s, v.ID)
		}
	}
	for _, p := range put {
		if v, ok := p.(*model.Pool); ok {
			s[v.ID] = v.Service
		}
	}
}

var (
	connectionsDesc = prometheus.NewDesc("fairlead_service_connections_total",
		"TCP connections and UDP flows of clients on this node that were forwarded to an endpoint, since the Service was "+
			"written (mode ebpf).", []string{"service"}, nil)
	refusedDesc = prometheus.NewDesc("fairlead_service_refused_total",
		"TCP connections and UDP flows of clients on this node that were rejected for lack of an endpoint (mode ebpf).",
		[]string{"service"}, nil)
	packetsDesc = prometheus.NewDesc("fairlead_packets_total",
		"Packets from network devices by outcome: they began a flow, were rejected for lack of an endpoint, or were "+
			"dropped: as the Service's policy says, for lack of a port (no_port) or an address (no_address) to "+
			"masquerade with, because the flow map was full (no_room), or because the reverse path check failed "+
			"(forged). handed_over counts packets that are redirected to a pod or another node, bypassing the host stack "+
			"(mode ebpf).", []string{"outcome"}, nil)
	fastPathDesc = prometheus.NewDesc("fairlead_fast_path_enabled",
		"1 where packets to pods are redirected, bypassing the host stack, 0 where they take the host stack (mode ebpf).",
		[]string{"ip_family"}, nil)
	slowReasonDesc = prometheus.NewDesc("fairlead_fast_path_off",
		"1 for each reason why packets to pods take the host stack, 0 for all others (mode ebpf).",
		[]string{"ip_family", "reason"}, nil)
	hookDesc = prometheus.NewDesc("fairlead_fast_path_hook",
		"1 for each hook of netfilter that keeps packets to pods on the host stack, with the program that made it, as far "+
			"as that can be told, and the command that lists it (mode ebpf).",
		[]string{"ip_family", "hook", "owner", "command"}, nil)
	excludedDesc = prometheus.NewDesc("fairlead_fast_path_excluded_devices",
		"Devices whose packets take the host stack because another program, a queueing discipline or a tap handles them "+
			"(mode ebpf).",
		nil, nil)
	boundDesc = prometheus.NewDesc("fairlead_userspace_refused_total",
		"TCP connections and UDP flows that were rejected because their frontend or their client reached its limit of "+
			"file descriptors (mode userspace).", []string{"bound"}, nil)
	droppedDesc = prometheus.NewDesc("kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
		"Forwarded packets dropped as invalid by connection tracking (mode iptables).", nil, nil)
	localhostDesc = prometheus.NewDesc("kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
		"First packets of connections to node ports at loopback addresses (mode iptables).", nil, nil)
	invalidDesc = prometheus.NewDesc("fairlead_conntrack_invalid_packets_total",
		"Packets that connection tracking classifies as invalid, dropped or not (modes with connection tracking).", nil, nil)
)

// collectServices makes metrics of what became of Services' clients.
func (c collector) collectServices(ch chan<- prometheus.Metric) {
	counts, err := c.planes.Counts()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(connectionsDesc, err)
		return
	}
	c.mu.Lock()
	sums := plane.PerService(counts, func(id uint64) string { return c.names[id] })
	c.mu.Unlock()
	for service, n := range sums {
		ch <- prometheus.MustNewConstMetric(connectionsDesc, prometheus.CounterValue, float64(n.Connections), service)
		ch <- prometheus.MustNewConstMetric(refusedDesc, prometheus.CounterValue, float64(n.Refused), service)
	}
}

// collectPackets makes metrics of what became of packets at devices.
func (c collector) collectPackets(ch chan<- prometheus.Metric) {
	counts, err := c.planes.Packets()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(packetsDesc, err)
	}
	if counts == nil {
		return
	}
	for _, o := range counts {
		ch <- prometheus.MustNewConstMetric(packetsDesc, prometheus.CounterValue, float64(o.Packets), o.Name)
	}
}

// collectFastPath makes metrics of whether packets for pods are redirected, and of what keeps them on the node's stack.
func (c collector) collectFastPath(ch chan<- prometheus.Metric) {
	path, err := c.planes.FastPath()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(fastPathDesc, err)
	}
	if path == nil {
		return
	}
	gauge := func(d *prometheus.Desc, value int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(value), labels...)
	}
	is := map[bool]int{true: 1}
	for i, f := range []plane.FamilyFastPath{path.IPv4, path.IPv6} {
		gauge(fastPathDesc, is[f.Enabled], bothFamilies[i])
		for _, r := range path.AllReasons {
			gauge(slowReasonDesc, is[slices.Contains(f.Reasons, r)], bothFamilies[i], r)
		}
		for _, h := range f.Hooks {
			gauge(hookDesc, 1, bothFamilies[i], h.Name, h.Owner, h.Command)
		}
	}
	gauge(excludedDesc, len(path.Devices))
}

// collectRefused makes metrics of what was refused beyond a bound.
func (c collector) collectRefused(ch chan<- prometheus.Metric) {
	if r := c.planes.Rejections(); r != nil {
		ch <- prometheus.MustNewConstMetric(boundDesc, prometheus.CounterValue, float64(r.Frontend), "frontend")
		ch <- prometheus.MustNewConstMetric(boundDesc, prometheus.CounterValue, float64(r.Client), "client")
	}
}

// collectCounted makes metrics of what connection tracking and rules counted.
func (c collector) collectCounted(ch chan<- prometheus.Metric) {
	if n, tracks, err := c.planes.Invalid(); err != nil {
		ch <- prometheus.NewInvalidMetric(invalidDesc, err)
	} else if tracks {
		ch <- prometheus.MustNewConstMetric(invalidDesc, prometheus.CounterValue, float64(n))
	}
	n, err := c.planes.RuleCounts()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(droppedDesc, err)
	}
	if n == nil {
		return
	}
	ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(n.InvalidDropped))
	ch <- prometheus.MustNewConstMetric(localhostDesc, prometheus.CounterValue, float64(n.LocalhostAccepted))
}
