// Package flowlog is the file of flows that a node recorded: which pods opened connections to which, and how often.
//
// A file is a line of JSON for each of: the Header, which comes first; pods; flows, which name pods of earlier lines.
// A flow is many connections, those that differ in the client's port alone.
package flowlog

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/model"
)

// The values of Header.Kind and Header.Version that this package reads and writes.
const (
	Kind    = "fairlead-flows"
	Version = 1
)

// Header is where and when flows were recorded, and what is missing.
type Header struct {
	Kind    string    `json:"kind"`
	Version int       `json:"version"`
	Node    string    `json:"node"` // name of the Node that recorded
	Start   time.Time `json:"start"`
	End     time.Time `json:"end"`
	// connections that the kernel reported faster than they could be read: their flows may be missing
	Lost uint64 `json:"lost"`
	// connections of flows beyond the bound of the file or of one pod
	Beyond uint64 `json:"beyondLimit"`
	// connections whose client could not be told from their server: they are older than connection tracking
	Unclear uint64 `json:"unclear"`
}

// Pod is a pod that is an end of a flow, as it was when the flow was recorded.
type Pod struct {
	Name   string            `json:"pod"` // namespace/name
	Node   string            `json:"node"`
	Labels map[string]string `json:"labels,omitempty"`
}

// End is an end of a flow.
type End struct {
	Addr netip.Addr `json:"ip"`
	Pod  string     `json:"pod,omitempty"` // "" for an address that is no pod's
}

// Flow is the connections from one end to a port of another, behind the translation of their destination.
type Flow struct {
	Client   End            `json:"from"`
	Server   End            `json:"to"`
	Protocol model.Protocol `json:"protocol"` // number of the IP protocol
	Port     uint16         `json:"port,omitempty"`
	Count    uint64         `json:"connections"`
	Denied   uint64         `json:"denied,omitempty"` // connections, and packets of protocols without, that policies denied
}

// Key is what tells a flow from others.
type Key struct {
	Client, Server End
	Protocol       model.Protocol
	Port           uint16
}

// Key returns the key of a flow.
func (f Flow) Key() Key { return Key{f.Client, f.Server, f.Protocol, f.Port} }

// String returns "shop/client > shop/web-1:8080/tcp".
func (k Key) String() string {
	return fmt.Sprintf("%s > %s", k.Client, Port{k.Server, k.Protocol, k.Port})
}

// Port is a port of an end.
type Port struct {
	End
	Protocol model.Protocol
	Number   uint16
}

// String returns "shop/web-1:8080/tcp", or "shop/web-1 protocol 1" for a protocol without ports.
func (p Port) String() string {
	if !HasPorts(p.Protocol) {
		return fmt.Sprintf("%s protocol %s", p.End, p.Protocol)
	}
	host := p.Pod
	if host == "" && p.Addr.Is6() {
		host = "[" + p.Addr.String() + "]"
	}
	return fmt.Sprintf("%s:%d/%s", cmp.Or(host, p.Addr.String()), p.Number, p.Protocol)
}

// String returns the pod's name, or the address.
func (e End) String() string { return cmp.Or(e.Pod, e.Addr.String()) }

// HasPorts reports whether policies can name ports of a protocol.
func HasPorts(p model.Protocol) bool { return p == model.TCP || p == model.UDP || p == model.SCTP }

// Compare orders keys by client, server, protocol and port.
func (k Key) Compare(o Key) int {
	return cmp.Or(k.Client.compare(o.Client), k.Server.compare(o.Server), cmp.Compare(k.Protocol, o.Protocol),
		cmp.Compare(k.Port, o.Port))
}

func (e End) compare(o End) int { return cmp.Or(cmp.Compare(e.Pod, o.Pod), e.Addr.Compare(o.Addr)) }

// File is what a node recorded.
type File struct {
	Header
	Pods  map[string]Pod // by name
	Flows []Flow
}

// String returns how much was recorded, and how much is missing.
func (f *File) String() string {
	denied := uint64(0)
	for _, x := range f.Flows {
		denied += x.Denied
	}
	return fmt.Sprintf("%d flows; connections lost: %d, beyond a limit: %d, unclear: %d, denied: %d", len(f.Flows), f.Lost,
		f.Beyond, f.Unclear, denied)
}

// Write writes a file, in a stable order.
func (f *File) Write(w io.Writer) error {
	b := bufio.NewWriter(w)
	e := json.NewEncoder(b)
	h := f.Header
	h.Kind, h.Version = Kind, Version
	if err := e.Encode(h); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(f.Pods)) {
		if err := e.Encode(f.Pods[name]); err != nil {
			return err
		}
	}
	flows := slices.Clone(f.Flows)
	slices.SortFunc(flows, func(a, b Flow) int { return a.Key().Compare(b.Key()) })
	for _, flow := range flows {
		if err := e.Encode(flow); err != nil {
			return err
		}
	}
	return b.Flush()
}
