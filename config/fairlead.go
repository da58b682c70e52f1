package config

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/resolve"
)

// The API of our own configuration.
const (
	APIVersion = "fairlead.dev/v1alpha1"
	Kind       = "FairleadConfiguration"
)

// FairleadConfiguration is what only Fairlead has. Unknown fields are errors.
type FairleadConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// source is a folder or file of Kubernetes YAML or JSON to read in place of the API server. Default: the API server.
	Source string `json:"source,omitempty"`
	// mode is the data plane for Services, one of those that `fairlead modes` lists, or "auto": the best that this kernel can.
	// Default: what KubeProxyConfiguration's mode says; "auto" where a file says nothing; "nftables" without a file.
	Mode string `json:"mode,omitempty"`
	// scheduler is how Services that don't say choose an endpoint. Default: ipvs.scheduler in mode ipvs, "random" elsewhere.
	Scheduler string `json:"scheduler,omitempty"`
	// maglevTableSize is how many entries each Maglev table has, a prime up to 65521. Default: as the mode sees fit.
	MaglevTableSize int `json:"maglevTableSize,omitempty"`
	// directServerReturn has the node of an endpoint answer clients outside the cluster itself, past the node that they asked, so that no
	// endpoint's answer goes a detour and none sees a node's address in place of theirs. It is for all nodes at once, in mode ebpf; where
	// that can't be, clients are hidden as without. Default: false.
	DirectServerReturn bool `json:"directServerReturn,omitempty"`
	// ebpf are settings of the mode ebpf.
	EBPF EBPFConfiguration `json:"ebpf,omitzero"`
	// externalIPs says which of Services' spec.externalIPs are served: "Safe" refuses, by name, those in a range of
	// pods, another Service's ClusterIP, and the API server's address and port; "Refuse" serves none; "Any" all but the
	// API server's. Default: "Safe".
	ExternalIPs resolve.ExternalIPs `json:"externalIPs,omitempty"`
	// limits bound what Services may come to on a node, so that no Service and no namespace can take what all share.
	Limits LimitsConfiguration `json:"limits,omitzero"`
	// serviceProxyName has only Services with this label service.kubernetes.io/service-proxy-name served. Default: those without.
	ServiceProxyName string `json:"serviceProxyName,omitempty"`
	// migrateFromKubeProxy says what happens to a kube-proxy's rules: "Leave" leaves them, with a warning; "Remove"
	// removes them once Fairlead serves and no kube-proxy runs any more. Default: "Leave".
	TakeOver TakeOver `json:"migrateFromKubeProxy,omitempty"`
}

// LimitsConfiguration bounds what Services may come to on a node. What is beyond is not served, and named as a problem.
// 0 is the default.
type LimitsConfiguration struct {
	// serviceFrontends is how many addresses and ports of one Service are served. Default: 4096.
	ServiceFrontends int `json:"serviceFrontends,omitempty"`
	// serviceSlots is how many endpoints the ports of one Service have, together. Default: 65536.
	ServiceSlots int `json:"serviceSlots,omitempty"`
	// serviceTableEntries is how many entries the tables of one Service's scheduler have (Maglev, weights). Default:
	// 131072.
	ServiceTableEntries int `json:"serviceTableEntries,omitempty"`
	// frontends is how many addresses and ports of all Services are served. Default: 262144; in mode ebpf no more than
	// ebpf.mapEntries lets in.
	Frontends int `json:"frontends,omitempty"`
	// slots is how many pools, endpoints of them and table entries all Services have. Default: 524288; in mode ebpf no
	// more than ebpf.mapEntries lets in.
	Slots int `json:"slots,omitempty"`
	// namespacePercent is how much of frontends and slots the Services of one namespace may take while other namespaces
	// want the rest. Default: 50.
	NamespacePercent int `json:"namespacePercent,omitempty"`
	// namespaceBytes is how many bytes of memory the Services, and the EndpointSlices, of one namespace may weigh as
	// they come from the API server, oldest first. At least 16 MiB. Default: 67108864 (64 MiB, 250,000 endpoints).
	NamespaceBytes int `json:"namespaceBytes,omitempty"`
	// bytes is the same for all namespaces together; beyond it, the heaviest namespace's youngest are left out.
	// Default: 134217728 (128 MiB).
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

// EBPFConfiguration are settings of the mode ebpf.
type EBPFConfiguration struct {
	// mapEntries is how many entries the kernel's maps have: one for each port of a Service and each endpoint of it.
	// Default: 524288.
	Room uint32 `json:"mapEntries,omitempty"`
	// closeTCP has TCP connections of clients on the node closed when their endpoint goes, as is done with UDP. Default: false.
	CloseTCP bool `json:"closeTCP,omitempty"`
	// fastPath says when packets for a pod of the node are redirected to it, bypassing the host stack: "Auto" while no
	// firewall rule or queueing discipline there would see them, or "Never". Default: "Auto".
	Shortcut Shortcut `json:"fastPath,omitempty"`
	// flows is the size of each of the two maps of flows that begin with packets at devices; a flow has one entry in
	// each, a masqueraded one has two. Default: 131072.
	Flows uint32 `json:"flows,omitempty"`
	// reversePathCheck has a packet from a device begin a flow only if the route back to its source leads to
	// that device: "Always", or "Never", for nodes whose routes are asymmetric. Default: "Always".
	ReversePathCheck ReversePathCheck `json:"reversePathCheck,omitempty"`
}

// ReversePathCheck is when the reverse path of new flows is checked.
type ReversePathCheck string

// Always has the reverse path checked.
const Always ReversePathCheck = "Always"

// Shortcut says when packets for pods are handed over past the node's stack.
type Shortcut string

// The choices.
const (
	Auto  Shortcut = "Auto"
	Never Shortcut = "Never"
)

// TakeOver says what becomes of a kube-proxy's rules.
type TakeOver string

// The ways.
const (
	Leave  TakeOver = "Leave"
	Remove TakeOver = "Remove"
)
