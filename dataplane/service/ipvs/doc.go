// Package ipvs is the service data plane that has IPVS select backends and forward connections, with all its
// schedulers, and a constant nf_tables table beside it for what IPVS can't: allowed source ranges, which clients are
// internal, what is masqueraded, what is rejected.
//
// A pool is one IPVS service, known by a packet mark (fwmark), with a destination for each backend. So a frontend is
// one element of a map in nf_tables, whether it is an address or a node port, and however many share the pool; no
// address is put on any device, none is asked for in IPVS, and the node's own may change. Packets that a frontend takes
// are marked at the end of prerouting; a rule and one local route for everything (in a table of our own) then deliver
// them to this host, where IPVS is. What no frontend takes goes on as if we weren't there, but is rejected at a
// ClusterIP and dropped at an unallocated address of a ServiceCIDR. None of this host's sockets answers at a Service's
// address.
//
//	packet in   open-in   (nat prerouting)     first packets: reject, drop, restrict, split; a client with affinity
//	                                           goes straight to its backend, by connection tracking
//	            claim-in  (prerouting, -90)    every packet of a frontend's: mark claimed → the rule delivers it here
//	            assign-in (input, 97)          mark of the pool's service, for IPVS's eyes only
//	            IPVS      (input, 98 and 99)   chooses, translates, sends it on as this host's output
//	            arrived   (input, 101)         what IPVS didn't take is refused
//	packet out  open-out, claim-out (output, -100, -99)  the same for this host's own processes, in one
//	            IPVS      (output, -99, -98)
//	sent on     sent      (output, -500)       remembers who got which backend, for affinity
//	            hide      (nat postrouting)    hides sources, by the connection's original destination
//	            gone      (postrouting, 110)   takes our mark off
//
// For each family (4 and 6) the table has
//
//	service    stage · address · protocol · port → mark of the pool's service · first steps · masquerade
//	permitted  address · protocol · port · client       of frontends that let only some in
//	hairpin    address · address                        of backends on this node
//	unallocated  0 · address                            that only Services have, and none has
//	sticky     mark → seconds                           of pools with affinity
//	member     0 · mark · address · port                their backends
//	affinity   client · mark → address · port           written by packets, times out
//	entry, admitted, side   0 · what is done → the chain that does it
//	hide, keep              0 · whose source, seconds → the chain that hides it, or remembers
//
// and once for both, pool: the ID of a pool → its mark. A mark has too few bits for an ID, so marks are given out (by a
// hash, and the next that is free), and the kernel itself remembers which: facts name pools by ID and stay pure.
//
// # What IPVS can't, and what is done instead
//
// Draw at random: weighted round-robin stands in (Capabilities). Affinity by IPVS's persistence: a service known by a
// mark then sends to the port that the client asked for (ip_vs_sched_persist), and a client is remembered for two
// minutes after its last connection whatever the timeout, so affinity is nf_tables' here. Loopback addresses: see
// loopback in rules.go. Draining with dh: it has no way past a destination of weight 0 and would refuse those who hash
// to it, so the plane doesn't offer it.
//
// A TCP destination that goes is given weight 0 and removed once it has no connections; until then it is no fact. There
// is no timer: each Write and Read sweeps. A service that goes waits for its last destination, and elements of its
// frontends then lead on connections that are there, and nothing else. UDP and SCTP destinations whose endpoint serves
// no more go at once, and their flows are cut (Capabilities.Tracked, with net.ipv4.vs.conntrack=1): IPVS would keep
// such a flow with the old one for as long as it speaks. Of those that serve but get no new flow, weight 0 is a fact.
//
// # What went wrong with IPVS under kube-proxy, and why it can't here
//
//   - kubernetes#81775, #84322, #99162 (a reused client port goes to a backend that is gone, or waits a second):
//     conn_reuse_mode=1 and expire_nodest_conn=1 are facts. Since Linux 5.9 (f0a5e4d7a594) the first costs no second
//     where the old connection has left connection tracking; below it, it may. testdata/backend-returns.txt.
//   - kubernetes#57841, #71894 (connections die with their endpoint, or their Service): see above;
//     testdata/service-removed.txt.
//   - kubernetes#92019, #108319 (weight stays 0 after a restart): a destination of weight 0 is no fact, so that a
//     wanted one is written again; testdata/backend-returns.txt, with a restart between.
//   - kubernetes#76664 (UDP flows stick to a dead endpoint): removed at once; testdata/udp-backend-leaves.txt.
//   - kubernetes#71071 (hangs): a lock and a timer of the proxy's; the plane has neither. The kernel walks all services
//     for their rates (ip_vs_est.c), before Linux 6.2 in one go in a timer; from then on it can be told not to, and is
//     (net.ipv4.vs.run_estimation=0).
//   - kubernetes#73382, #88212 (slow, with an address on a dummy device for each Service, compared one by one): no
//     addresses; a change costs its facts, and what is written is never listed but by Read.
//   - kubernetes#72236 (this host's sockets answer at Services' addresses): only ports with a frontend are delivered
//     here.
//   - kubernetes#133536 (not fixed upstream): the conformance suite runs against this plane, in a second kernel.
//   - connections silent for 15 minutes were cut: the timeout of TCP is a fact, a day.
//
// IPVS hashes services by mark into 256 lists (ip_vs_ctl.c): at 10,000 Services a new connection walks some 20 entries
// on average. A destination that is removed stays in a list for two minutes, which each new destination of any service
// walks through (ip_vs_trash_get_dest): when 100,000 go at once, the next 100,000 come slowly. The kernel reports it
// nowhere of changes to IPVS, so Watch hears of the table alone.
//
// Kernel: Linux 5.13 or later with IPVS and its schedulers, nf_tables, policy routing; seen with 6.12 alone.
package ipvs
