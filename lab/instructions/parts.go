package instructions

import (
	"slices"
	"strings"
	"sync"
)

// Part is what a reader knows instructions by.
type Part struct {
	ID    string // such as "conntrack"
	Title string
	// beginnings of the names of functions that belong to it, with all that they call which belongs to no other; after a
	// star, what follows is somewhere in the name
	functions []string
}

// Rest is the part of what belongs to no other.
const Rest = "rest"

// parts are in the order of a connection's way through them.
var parts = []Part{
	{application, "application", []string{application}},
	{"syscall", "system calls", []string{"entry_SYSCALL", "do_syscall", "x64_sys_", "__x64_sys_", "__sys_", "sock_",
		"__sock_", "vfs_", "ksys_", "syscall_", "fput", "__fput", "____fput", "task_work", "alloc_file", "do_accept",
		"security_", "selinux_", "apparmor_"}},
	{"tcp", "TCP", []string{"tcp_", "__tcp_", "inet_", "__inet_", "reqsk_", "secure_tcp", "bictcp_", "cubictcp_", "sk_",
		"__sk_", "lock_sock_", "release_sock", "__release_sock", "sock_def_"}},
	{"ip", "IP", []string{"ip_", "__ip_", "ipv4_", "inet_gso_", "inet_gro_"}},
	{"routing", "routing", []string{"ip_route_", "__ip_route_", "fib_", "__fib_", "rt_", "ip_mkroute_", "find_exception",
		"ip_rcv_finish_core", "__mkroute_", "ipv4_dst_", "dst_", "ip_check_mc", "neigh_", "__neigh_"}},
	{"hooks", "netfilter's hooks", []string{"nf_hook"}},
	{"conntrack", "connection tracking", []string{"nf_conntrack_", "__nf_conntrack_", "nf_ct_", "__nf_ct_", "nf_confirm",
		"ipv4_conntrack_", "nf_get_", "nf_l4proto_"}},
	{"nat", "NAT", []string{"nf_nat_", "__nf_nat_", "nf_xfrm_"}},
	{"nftables", "nftables' chains", []string{"nft_", "__nft_"}},
	{"iptables", "iptables' chains", []string{"ipt_", "xt_", "tcp_mt", "udp_mt", "ip_set_", "hash_ip",
		"hash_net", "set_match"}},
	{"sockets", "programs: at sockets", []string{"bpf_prog_*_connect", "bpf_prog_*_sendmsg", "bpf_prog_*_recvmsg",
		"bpf_prog_*_getpeername", "bpf_prog_*_release", "__cgroup_bpf_run_filter"}},
	{"devices", "programs: at devices", []string{program, "tcx_run", "tc_run", "sch_handle_", "skb_do_redirect"}},
	{"policy", "programs: policies", []string{"bpf_prog_*_policy", "bpf_prog_*_connection"}},
	{"device", "devices and queues", []string{"dev_", "__dev_", "veth_", "netif_", "__netif_", "process_backlog",
		"net_rx_action", "net_tx_action", "napi_", "__napi_", "enqueue_to_backlog", "validate_xmit_", "eth_", "br_",
		"sch_direct_", "qdisc_", "__qdisc_", "ipvlan_", "vxlan_", "do_softirq", "__do_softirq", "handle_softirqs",
		"__local_bh_enable_ip", "gro_", "skb_scrub"}},
	{"interrupts", "interrupts", []string{"asm_sysvec_", "asm_common_interrupt", "asm_exc_", "common_interrupt"}},
	{Rest, "the rest", nil},
}

// PartsOf returns all parts, in the order of a connection's way through them.
func PartsOf() []Part { return slices.Clone(parts) }

// Parts returns the instructions of each part.
func (c Stacks) Parts() map[string]int64 {
	out := map[string]int64{}
	for stack, n := range c {
		out[PartOf(stack)] += n
	}
	return out
}

// program begins the name of each function of an eBPF program.
const program = "bpf_prog_"

// PartOf returns the part of a stack: that of its innermost function that has one. Of several a function is of that
// which has more of its name. What a program's function calls within the program is of the same part, unless its name
// says more.
func PartOf(stack string) string {
	for stack != "" {
		i := strings.LastIndexByte(stack, ';')
		p := partOfFunction(stack[i+1:])
		caller := stack[:max(i, 0)]
		within := p.most == len(program) && strings.HasPrefix(stack[i+1:], program) &&
			strings.HasPrefix(caller[strings.LastIndexByte(caller, ';')+1:], program)
		if p.most > 0 && !within {
			return p.id
		}
		stack = caller
	}
	return Rest
}

// match is the part of a function, and how many bytes of its name say so; 0: none has it.
type match struct {
	id   string
	most int
}

// matches are those of functions that were asked for: the same few in every stack.
var matches sync.Map

func partOfFunction(name string) (m match) {
	if known, ok := matches.Load(name); ok {
		return known.(match)
	}
	for _, p := range parts {
		for _, f := range p.functions {
			if n := matching(name, f); n > m.most {
				m = match{p.ID, n}
			}
		}
	}
	matches.Store(name, m)
	return m
}

// matching returns how many bytes of a function's name a pattern of it has, 0 if it doesn't match.
func matching(function, pattern string) int {
	before, after, _ := strings.Cut(pattern, "*")
	rest, ok := strings.CutPrefix(function, before)
	if !ok || !strings.Contains(rest, after) {
		return 0
	}
	return len(before) + len(after)
}
