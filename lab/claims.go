package lab

import "fairlead.dev/fairlead/lab/report"

// Claims returns those of the articles that the lab judges. Experiments test them by aims whose ids begin with a
// claim's.
func Claims() []report.SuiteClaim {
	const tigera, centurylink, romana, softirq = "Tigera 2019", "CenturyLink 2016", "Romana",
		"Why containers slow applications"
	return []report.SuiteClaim{
		{ID: "C1", Source: tigera, Text: "iptables and IPVS differ trivially up to 1,000 Services"},
		{ID: "C2", Source: tigera, Text: "they differ only where connections are not kept"},
		{ID: "C3", Source: tigera, Text: "the cost of rules is a connection's, not a packet's"},
		{ID: "C4", Source: tigera, Text: "about 20,000 rules for a new connection at 10,000 Services"},
		{ID: "C5", Source: tigera, Text: "at 10,000 Services iptables takes 35 % of a core more, IPVS 8 %"},
		{ID: "C6", Source: tigera, Text: "with 100 requests on a connection it is closer to 2 %"},
		{ID: "C7", Source: tigera, Text: "IPVS slows down at 10,000 Services where connections are not kept"},
		{ID: "C8", Source: tigera, Text: "what rules cost does not depend on the application's work"},
		{ID: "C9", Source: tigera, Text: "Calico's policies are as many rules as kube-proxy's of 20 Services"},
		{ID: "C10", Source: centurylink, Text: "iptables is faster than userspace"},
		{ID: "C11", Source: centurylink, Text: "bare metal has a third of a virtual machine's latency, and less jitter"},
		{ID: "C12", Source: romana, Text: "200 policies delay a request by at most 0.2 ms"},
		{ID: "C13", Source: romana, Text: "by at most 7 % for small answers"},
		{ID: "C14", Source: romana, Text: "by 1 to 2 % for answers of 1 MB"},
		{ID: "C15", Source: romana, Text: "only the first packet walks the list of policies"},
		{ID: "C16", Source: romana, Text: "answers of 0.5 and 1 kB take the same time"},
		{ID: "C17", Source: softirq, Text: "a container's round trip takes 25 % longer than the host's"},
		{ID: "C18", Source: softirq, Text: "a veth pair adds softirq work"},
		{ID: "C19", Source: softirq, Text: "ipvlan eliminates it"},
		{ID: "C20", Source: softirq, Text: "eBPF has more requests a second for less processor time"},
		{ID: "C21", Source: "Kubernetes blog 2025", Text: "kube-proxy's nftables is flat, and at its median as fast as " +
			"its iptables at its best"},
	}
}
