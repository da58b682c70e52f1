package lab

import (
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/experiment/centurylink"
	"fairlead.dev/fairlead/lab/experiment/containers"
	"fairlead.dev/fairlead/lab/experiment/romana"
	"fairlead.dev/fairlead/lab/experiment/tigera"
	"fairlead.dev/fairlead/lab/report"
)

// Claims returns those of the articles that the lab judges. Experiments test them by aims whose ids begin with a
// claim's.
func Claims() (l []report.SuiteClaim) {
	add := func(source string, by experiment.Experiment, claims ...[2]string) {
		for _, c := range claims {
			l = append(l, report.SuiteClaim{ID: c[0], Text: c[1], Source: source, By: by.Name})
		}
	}
	add("Tigera 2019", tigera.Experiment, [][2]string{
		{"C1", "iptables and IPVS differ trivially up to 1,000 Services"},
		{"C2", "iptables and IPVS differ only where connections are not kept"},
		{"C3", "the cost of rules is a connection's, not a packet's"},
		{"C4", "about 20,000 rules for a new connection at 10,000 Services"},
		{"C5", "at 10,000 Services iptables takes 35 % of a core more, IPVS 8 %"},
		{"C6", "with 100 requests on a connection iptables takes closer to 2 % of a core more"},
		{"C7", "IPVS slows down at 10,000 Services where connections are not kept"},
		{"C8", "what rules cost does not depend on the application's work"},
		{"C9", "Calico's policies are as many rules as kube-proxy's of 20 Services"}}...)
	add("CenturyLink 2016", centurylink.Experiment, [][2]string{
		{"C10", "iptables is faster than userspace"},
		{"C11", "bare metal has a third of a virtual machine's latency, and less jitter"}}...)
	add("Romana", romana.Experiment, [][2]string{
		{"C12", "200 policies delay a request by at most 0.2 ms"},
		{"C13", "200 policies delay small answers by at most 7 %"},
		{"C14", "200 policies delay answers of 1 MB by 1 to 2 %"},
		{"C15", "only the first packet walks the list of policies"},
		{"C16", "answers of 0.5 and 1 kB take the same time"}}...)
	add("Why containers slow applications", containers.Experiment, [][2]string{
		{"C17", "a container's round trip takes 25 % longer than the host's"},
		{"C18", "a veth pair adds softirq work"},
		{"C19", "ipvlan eliminates the softirq work that a veth pair adds"},
		{"C20", "eBPF has more requests a second for less processor time"}}...)
	add("Kubernetes blog 2025", tigera.Experiment, [2]string{"C21",
		"kube-proxy's nftables is flat, and at its median as fast as its iptables at its best"})
	return l
}
