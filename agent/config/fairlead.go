package config

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// The API of our own configuration.
const (
	APIVersion = "fairlead.dev/v1alpha1"
	Kind       = "FairleadConfiguration"
)

// FairleadConfiguration holds the settings that kube-proxy doesn't have. Unknown fields are errors.
type FairleadConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// source is the folder or file of Kubernetes YAML or JSON that is read instead of the API server. $FAIRLEAD_SOURCE
	// sets it too. Default: the API server.
	Source string `json:"source,omitempty"`
	// mode is the data plane for Services: one that `fairlead modes` lists, or auto, the first of nftables, iptables,
	// ipvs and userspace that this kernel supports. Default: KubeProxyConfiguration's mode; auto where a file sets
	// none; nftables without a file.
	Mode string `json:"mode,omitempty"`
	// scheduler is the scheduler of Services without the annotation fairlead.dev/scheduler ([schedulers](schedulers.md)).
	// Default: ipvs.scheduler in mode ipvs, else random.
	Scheduler string `json:"scheduler,omitempty"`
	// maglevTableSize is the number of entries of each Maglev table, a prime up to 65521. Default: by mode.
	MaglevTableSize int `json:"maglevTableSize,omitempty"`
	// directServerReturn is true to have an endpoint's node reply to external clients directly (mode ebpf). Set it on
	// all nodes at once. Where it can't be used, connections are masqueraded ([direct server
	// return](../how-to/direct-server-return.md)). Default: false.
	DirectServerReturn bool `json:"directServerReturn,omitempty"`
	// ebpf holds the settings of mode ebpf.
	EBPF EBPFConfiguration `json:"ebpf,omitzero"`
	// policy holds the settings of network policies ([policies](../how-to/enforce-policies.md)).
	Policy PolicyConfiguration `json:"policy,omitzero"`
	// network holds the settings of the pod network ([pod network](../how-to/pod-network.md)).
	Network NetworkConfiguration `json:"network,omitzero"`
	// externalIPs is the policy for spec.externalIPs: Safe rejects pod addresses, other Services' ClusterIPs and the
	// API server's address and port; Refuse serves none; Any serves all but the API server's. Default: Safe.
	ExternalIPs resolve.ExternalIPs `json:"externalIPs,omitempty"`
	// limits bounds what Services may use on a node ([limits](limits.md)).
	Limits LimitsConfiguration `json:"limits,omitzero"`
	// serviceProxyName is the value of the label service.kubernetes.io/service-proxy-name of the Services to serve.
	// Default: Services without the label.
	ServiceProxyName string `json:"serviceProxyName,omitempty"`
	// migrateFromKubeProxy is what to do with kube-proxy's rules: Leave keeps them and logs a warning; Remove deletes
	// them once Fairlead serves and kube-proxy has stopped. Default: Leave.
	MigrateFromKubeProxy MigrateFromKubeProxy `json:"migrateFromKubeProxy,omitempty"`
}

// LimitsConfiguration bounds what Services may use on a node. What exceeds a limit is not served and reported as a
// problem. 0 stands for the default.
type LimitsConfiguration struct {
	// serviceFrontends is the limit of addresses × ports of one Service. Default: 4096.
	ServiceFrontends int `json:"serviceFrontends,omitempty"`
	// serviceSlots is the limit of endpoints × ports of one Service. Default: 65536.
	ServiceSlots int `json:"serviceSlots,omitempty"`
	// serviceTableEntries is the limit of entries of one Service's scheduler tables (Maglev, weights).
	// Default: 131072.
	ServiceTableEntries int `json:"serviceTableEntries,omitempty"`
	// frontends is the limit of addresses × ports of all Services. Default: 262144; in mode ebpf at most what
	// ebpf.mapEntries allows.
	Frontends int `json:"frontends,omitempty"`
	// slots is the limit of pools, their endpoints and table entries of all Services. Default: 524288; in mode ebpf at
	// most what ebpf.mapEntries allows.
	Slots int `json:"slots,omitempty"`
	// namespacePercent is the share of frontends and slots that one namespace may use while other namespaces need the
	// rest. Default: 50.
	NamespacePercent int `json:"namespacePercent,omitempty"`
	// namespaceBytes is the limit of memory for one namespace's Services, and for its EndpointSlices, as received from
	// the API server; the oldest are read first. At least 16 MiB. Default: 67108864 (64 MiB, 250,000 endpoints).
	NamespaceBytes int `json:"namespaceBytes,omitempty"`
	// bytes is the same limit for all namespaces together; beyond it the youngest objects of the largest namespace are
	// left out. Default: 134217728 (128 MiB).
	Bytes int `json:"bytes,omitempty"`
}

// limits returns them for the resolver.
func (l LimitsConfiguration) limits() resolve.Limits {
	return resolve.Limits{
		Service: resolve.Bounds{Frontends: l.ServiceFrontends, Slots: l.ServiceSlots,
			TableEntries: l.ServiceTableEntries},
		Total:            resolve.Bounds{Frontends: l.Frontends, Slots: l.Slots},
		NamespacePercent: l.NamespacePercent,
	}
}

// EBPFConfiguration holds the settings of mode ebpf.
type EBPFConfiguration struct {
	// mapEntries is the size of the eBPF maps of Services: one entry for each port of a Service and for each of its
	// endpoints. Default: 524288.
	MapEntries uint32 `json:"mapEntries,omitempty"`
	// closeTCP is true to close TCP connections of clients on the node when their endpoint is removed, as is done with
	// UDP. Default: false.
	CloseTCP bool `json:"closeTCP,omitempty"`
	// fastPath is when packets to pods of the node are redirected to the pod, bypassing the host stack: Auto while no
	// firewall rule or queueing discipline there would see them, or Never. Default: Auto.
	FastPath FastPath `json:"fastPath,omitempty"`
	// flows is the size of each of the two maps of flows that network devices receive. A flow has one entry in each
	// map, a masqueraded flow two. Default: 131072.
	Flows uint32 `json:"flows,omitempty"`
	// reversePathCheck is whether a new flow is accepted only from the device that routes back to its source: Always,
	// or Never for nodes with asymmetric routes. Default: Always.
	ReversePathCheck ReversePathCheck `json:"reversePathCheck,omitempty"`
}

// PolicyConfiguration holds the settings of network policies.
type PolicyConfiguration struct {
	// mode is what to do with NetworkPolicies and ClusterNetworkPolicies: Ignore watches neither them nor Pods; Audit
	// reports what they would drop and drops nothing; Enforce enforces them, but for those with the annotation
	// fairlead.dev/audit ([policies](../how-to/enforce-policies.md)). Set it on all nodes. Default: Ignore.
	Mode PolicyMode `json:"mode,omitempty"`
	// engine is the data plane for policies: nftables, iptables, ebpf, or auto, the first of these
	// that this kernel supports, but beside mode ebpf first ebpf. Default: auto.
	Engine string `json:"engine,omitempty"`
	// unknownPods is whether rules that deny by selector of pods match addresses of the cluster's pod ranges at which no
	// pod is known yet: Deny or Allow. Default: Deny.
	UnknownPods policy.UnknownPods `json:"unknownPods,omitempty"`
	// established is what becomes of open connections that policies no longer allow: Cut resets those of TCP and drops
	// the packets of others, Keep lets them go on. Default: Cut.
	Established Established `json:"established,omitempty"`
	// sourceCheck is whether packets with the address of a pod of this node are dropped where they come in by another
	// device than the pod's, and packets that come in by a pod's device with another address: Always, or Never for nodes
	// with asymmetric routes, where pods can then pass for any other host ([source
	// checks](source-checks.md#asymmetric-routes)). With policy.mode Audit none is. With network.mode Own, pods' own
	// devices are guarded whatever it is. With Never, DNS answers teach domain names whatever device they come in by.
	// Default: Always.
	SourceCheck SourceCheck `json:"sourceCheck,omitempty"`
	// cutMark is the bit of the connection mark by which connections are cut, 0x80000000 by default. No other program on
	// the node may use it. Default: 2147483648.
	CutMark uint32 `json:"cutMark,omitempty"`
	// resolvers is the list of DNS resolvers whose answers to pods teach the addresses of the domainNames of
	// ClusterNetworkPolicies: addresses, such as 169.254.20.10 or 10.0.0.2:5353, or Services, such as
	// kube-system/kube-dns, which stand for their addresses and endpoints. Default: [kube-system/kube-dns].
	Resolvers []string `json:"resolvers,omitempty"`
}

// NetworkConfiguration holds the settings of the pod network.
type NetworkConfiguration struct {
	// mode is who connects pods: None leaves that to another CNI plugin; Own has this agent do it, called by the plugin
	// fairlead-cni; Chained leaves it to another plugin and calls fairlead-cni behind it, so that a pod starts once its
	// policies and host ports are in force ([pod network](../how-to/pod-network.md)). Default: None.
	Mode NetworkMode `json:"mode,omitempty"`
	// overlay is which nodes are reached through a tunnel: Subnets those that are not on a link of this node, Always
	// all, Never none, where routers know the nodes' podCIDRs. Set it on all nodes. Default: Subnets.
	Overlay network.Overlay `json:"overlay,omitempty"`
	// device is what connects pods: veth or netkit, a routed pair of devices; ipvlan-l2 or ipvlan-l3, where pods share the
	// uplink's link-layer address and packets between pods of a node bypass its network stack: see
	// [devices](pod-devices.md). Pods that are attached keep theirs. Default: veth.
	Device string `json:"device,omitempty"`
	// encapsulation is the overlay's: VXLAN, or IPIP, which carries IPv4 inside IPv4 alone and takes 20 bytes of a packet
	// instead of 50. Set it on all nodes. Default: VXLAN.
	Encapsulation Encapsulation `json:"encapsulation,omitempty"`
	// vni is the overlay's VXLAN network identifier. Set it on all nodes. Default: 7.
	VNI uint32 `json:"vni,omitempty"`
	// port is the overlay's UDP port. Set it on all nodes. Default: 4789.
	Port uint16 `json:"port,omitempty"`
	// uplink is the device that other nodes are behind. Default: the one with the Node's InternalIP.
	Uplink string `json:"uplink,omitempty"`
	// mtu is how many bytes packets of pods may have. Default: what the uplink and the overlay leave.
	MTU int `json:"mtu,omitempty"`
	// masquerade is what becomes of the sources of packets that pods send out of the cluster: Cluster replaces them
	// by the node's; None leaves them; the path of a file in ip-masq-agent's format, followed when it changes, does as
	// Cluster, but for the ranges in it. Default: Cluster.
	Masquerade string `json:"masquerade,omitempty"`
	// serviceCIDRs is the list of ranges of Services, in addition to those of ServiceCIDRs: a podCIDR that overlaps one is
	// rejected. Default: none.
	ServiceCIDRs []string `json:"serviceCIDRs,omitempty"`
	// allowedSources is the list of ranges that pods may send from beside their own addresses, where their annotation
	// fairlead.dev/allowed-sources names them: NAMESPACE=RANGE, such as vpn=203.0.113.0/24. Default: none.
	AllowedSources []string `json:"allowedSources,omitempty"`
	// cniFolder is the folder in which the container runtime looks for network configurations. It must be there. Default:
	// /etc/cni/net.d.
	CNIFolder string `json:"cniFolder,omitempty"`
	// runFolder is the folder of the sockets for fairlead-cni and for root's commands on the node, and of the records of
	// pods' addresses. It must be in memory, and one agent's alone. Default: /run/fairlead.
	RunFolder string `json:"runFolder,omitempty"`
}

// ReversePathCheck reports whether the reverse path of new flows is checked.
type ReversePathCheck string

// Always has the reverse path checked.
const Always ReversePathCheck = "Always"

// SourceCheck reports whether policies check by which device pods' packets come in.
type SourceCheck string

// The choices.
const (
	CheckSources  SourceCheck = "Always"
	IgnoreSources SourceCheck = "Never"
)

// FastPath returns when packets to pods bypass the host stack.
type FastPath string

// The choices.
const (
	Auto  FastPath = "Auto"
	Never FastPath = "Never"
)

// MigrateFromKubeProxy returns what to do with kube-proxy's rules.
type MigrateFromKubeProxy string

// The choices.
const (
	Leave  MigrateFromKubeProxy = "Leave"
	Remove MigrateFromKubeProxy = "Remove"
)
