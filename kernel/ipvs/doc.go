// Package ipvs speaks IPVS's generic netlink protocol: virtual services that are known by a packet mark, their
// destinations, and the timeouts of connections. It knows no meaning of what it writes, and starts no ipvsadm.
//
// Why not github.com/moby/ipvs: it sends one request at a time and waits for its answer, so that 10,000 services of 10
// destinations cost 110,000 turns of two system calls; it allocates a tree of attributes for each; and an error doesn't
// say what was tried. Here a batch goes in a few sends of which only what failed is answered. A dump of destinations is
// per service in both: the kernel's protocol has no other (ip_vs_genl_dump_dests).
//
// Services by address and port are left out: see dataplane/service/ipvs for why it needs none.
//
// Written against include/uapi/linux/ip_vs.h and net/netfilter/ipvs/ip_vs_ctl.c.
package ipvs
