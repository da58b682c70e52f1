package inspect

import (
	"context"
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/network/attach"
	"fairlead.dev/fairlead/ipam"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Network is a node's pod network, and whether its kernel holds it.
type Network struct {
	Node       string           `json:"node"`
	MTU        int              `json:"mtu"`
	Tunnel     string           `json:"tunnel,omitempty"`
	Masquerade string           `json:"masquerade,omitempty"` // by what
	Runtime    string           `json:"runtime,omitempty"`    // the configuration by which it starts pods, and its plugins
	Ranges     []Range          `json:"ranges"`
	Routes     []Route          `json:"routes"`
	Pods       []Pod            `json:"pods"`
	Wanted     int              `json:"wanted"` // facts
	Held       int              `json:"held"`
	Missing    int              `json:"missing"`
	Extra      int              `json:"extra"`
	Trouble    []source.Problem `json:"problems,omitempty"`
}

// Range is a range of addresses for the node's pods.
type Range struct {
	Range netip.Prefix `json:"range"`
	ipam.Usage
}

// Route is how packets get to another node.
type Route struct {
	To       string `json:"to"`
	Node     string `json:"node"`
	Hop      string `json:"hop"`
	Via      string `json:"via,omitempty"`
	PodsOnly bool   `json:"podsOnly,omitempty"` // To is the node itself, which pods reach so, others by the underlay
	Kernel   string `json:"kernel"`
}

// Pod is a pod that is attached.
type Pod struct {
	Pod       string       `json:"pod"`
	Addresses []netip.Addr `json:"addresses"`
	Device    string       `json:"device"`
	Kernel    string       `json:"kernel"`
}

// masqueradedBy is what masquerades, by mode.NetworkAudit.AtDevices.
var masqueradedBy = map[bool]string{true: "by programs at devices",
	false: "by nf_tables (mode ebpf on Linux 6.7 or later does it by programs at devices, which its fast path needs)"}

// NewNetwork compares the kernel of the calling thread's network namespace with the pod network that was decided and
// the records of the pods that are attached.
func NewNetwork(ctx context.Context, d *Decided, records []ipam.Record) (*Network, error) {
	decided := d.Network
	if decided == nil {
		decided = &model.PodNetwork{}
	}
	parts := decided.Parts()
	var pods []*model.Attachment
	for _, record := range records {
		pods = append(pods, attach.AttachmentOf(record))
		parts = append(parts, pods[len(pods)-1])
	}
	a, err := mode.CheckNetwork(ctx, parts)
	if err != nil {
		return nil, err
	}
	s := &Network{Node: d.Services.Node.Name, Wanted: a.Wanted, Held: a.Held, Missing: len(a.Put), Extra: len(a.Del),
		Trouble: d.Problems}
	s.gather(decided, records, pods, a)
	return s, nil
}

// gather fills the rows.
func (s *Network) gather(decided *model.PodNetwork, records []ipam.Record, pods []*model.Attachment,
	a *mode.NetworkAudit) {
	if n := decided.Network; n != nil {
		s.MTU = n.MTU
		if t := n.Tunnel; t != nil {
			if s.Tunnel = t.Kind.String(); t.Kind == model.VXLAN {
				s.Tunnel += fmt.Sprintf(" %d, port %d", t.VNI, t.Port)
			}
			s.Tunnel += fmt.Sprintf(", by %s of %s", t.Local, t.Uplink)
		}
		if n.Masquerade != nil {
			s.Masquerade = masqueradedBy[a.AtDevices]
		}
		for _, r := range n.Ranges {
			s.Ranges = append(s.Ranges, Range{r, ipam.UsageOf(r, records)})
		}
	}
	for _, r := range decided.Routes {
		row := Route{To: r.To.String(), Node: r.Node, Hop: r.Hop.String(), PodsOnly: r.PodsOnly,
			Kernel: inKernel(a.Lacks(r))}
		if r.Via.IsValid() {
			row.Via = r.Via.String()
		}
		s.Routes = append(s.Routes, row)
	}
	for i, p := range pods {
		name := p.Pod
		if name == "" {
			name = records[i].ID
		}
		device := p.Kind.String()
		if !p.Kind.IPVLAN() {
			device += " " + p.Device
		}
		s.Pods = append(s.Pods, Pod{name, p.Addresses, device, inKernel(a.Lacks(p))})
	}
}

// inKernel returns what the kernel holds of a part.
func inKernel(missing, of int) string {
	if missing == 0 {
		return InSync
	}
	return fmt.Sprintf("%d of %d missing", missing, of)
}
