// Package classic writes the rule sets of kube-proxy, of today and of 2019, and those of Calico's policies of 2019, as
// subjects for measurements: what articles measured, and what a data plane wants to beat. It is no part of the product.
//
// Only what a new TCP connection and its packets meet is there: ClusterIPs and node ports of IPv4 with the traffic
// policy Cluster, endpoints drawn at random, masquerading. There is no affinity, no health check port, no load balancer
// address, no Service without endpoints. Rules stand in kube-proxy's order within chains, Services in the order of
// Cluster, so that a Service's position is known; kube-proxy's own is any.
//
// The layouts, from dumps of real nodes and the documents of KEP-3866 and KEP-3453:
//
//	ipt-classic19  nat KUBE-SERVICES has two rules for a Service, one for sources outside the cluster and one that leads
//	               to its chain KUBE-SVC-X, where one rule for each endpoint draws with probability 1/(n-i) and leads
//	               to KUBE-SEP-Y; every write restores the whole table
//	ipt-classic    KUBE-SERVICES has one rule for a Service, KUBE-SVC-X begins with the other one; a change writes
//	               KUBE-SERVICES and the chains of its Service
//	nft-classic    table ip kube-proxy: the map service-ips leads to a chain for each Service, which draws with numgen
//	               from a map of its own and leads to a chain for each endpoint
package classic
