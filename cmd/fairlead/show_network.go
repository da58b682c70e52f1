package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/attach"
	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/ipam"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/source"
)

// shownNetwork is what "show network" prints.
type shownNetwork struct {
	Node       string           `json:"node"`
	MTU        int              `json:"mtu"`
	Tunnel     string           `json:"tunnel,omitempty"`
	Masquerade string           `json:"masquerade,omitempty"` // by what
	Ranges     []shownRange     `json:"ranges"`
	Routes     []shownRoute     `json:"routes"`
	Pods       []shownPod       `json:"pods"`
	Wanted     int              `json:"wanted"` // facts
	Held       int              `json:"held"`
	Missing    int              `json:"missing"`
	Extra      int              `json:"extra"`
	Trouble    []source.Problem `json:"problems,omitempty"`
}

// shownRange is a range of addresses for the node's pods.
type shownRange struct {
	Range netip.Prefix `json:"range"`
	ipam.Usage
}

// shownRoute is how packets get to pods of another node.
type shownRoute struct {
	To     string `json:"to"`
	Node   string `json:"node"`
	Hop    string `json:"hop"`
	Via    string `json:"via,omitempty"`
	Kernel string `json:"kernel"`
}

// shownPod is a pod that is attached.
type shownPod struct {
	Pod       string       `json:"pod"`
	Addresses []netip.Addr `json:"addresses"`
	Device    string       `json:"device"`
	Kernel    string       `json:"kernel"`
}

func showNetwork() *cobra.Command {
	var n nodeFlags
	var o output
	c := &cobra.Command{
		Use:   "network --source DIR --node NAME",
		Short: "Show a node's pod network: ranges, routes and attached pods",
		Long: `Show a node's pod network (network.mode Own): which ranges its pods have addresses of and how many are free, how
packets get to other nodes' pods, which pods are attached, and whether the kernel holds all that.`,
		Example: "  fairlead show network --source examples/shop --node a\n  fairlead show network -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			s, err := readNetwork(c.Context(), &n)
			if err != nil {
				return err
			}
			return o.print(out(c), s, s.print)
		},
	}
	n.add(c)
	o.add(c)
	return c
}

// readNetwork gathers what "show network" prints.
func readNetwork(ctx context.Context, n *nodeFlags) (*shownNetwork, error) {
	c, err := n.Load()
	if err != nil {
		return nil, err
	}
	services, err := c.Resolve()
	if err != nil {
		return nil, err
	}
	objects, problems, err := load(ctx, c, services.Node, false)
	if err != nil {
		return nil, err
	}
	set := c.ResolveNetwork(services)
	if set.Devices, set.NoIPv6, err = devicesHere(ctx); err != nil {
		return nil, err
	}
	r := network.New(set)
	var changes []source.Change
	for _, o := range objects {
		changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	r.Apply(changes)
	records, err := recordsOf(c)
	if err != nil {
		return nil, err
	}
	decided := r.Network()
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
	s := &shownNetwork{Node: services.Node, Wanted: a.Wanted, Held: a.Held, Missing: len(a.Put), Extra: len(a.Del),
		Trouble: append(problems, r.Problems()...)}
	s.gather(decided, records, pods, a)
	return s, nil
}

// masqueradedBy is what masquerades, by mode.NetworkAudit.AtDevices.
var masqueradedBy = map[bool]string{true: "by programs at devices",
	false: "by nf_tables (mode ebpf on Linux 6.7 or later does it by programs at devices, which its fast path needs)"}

// gather fills the rows.
func (s *shownNetwork) gather(decided *model.PodNetwork, records []ipam.Record, pods []*model.Attachment,
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
			s.Ranges = append(s.Ranges, shownRange{r, ipam.UsageOf(r, records)})
		}
	}
	for _, r := range decided.Routes {
		row := shownRoute{To: r.To.String(), Node: r.Node, Hop: r.Hop.String(), Kernel: inKernel(a.Lacks(r))}
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
		s.Pods = append(s.Pods, shownPod{name, p.Addresses, device, inKernel(a.Lacks(p))})
	}
}

// inKernel returns what the kernel holds of a part.
func inKernel(missing, of int) string {
	if missing == 0 {
		return "in sync"
	}
	return fmt.Sprintf("%d of %d missing", missing, of)
}

// devicesHere returns the network devices of the calling thread's network namespace, and whether its kernel has no IPv6
// for more.
func devicesHere(ctx context.Context) (devices []network.Device, noIPv6 bool, err error) {
	interfaces, err := link.OpenInterfaces()
	if err != nil {
		return nil, false, err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	err = followDevices(ctx, interfaces, func(l []network.Device, none bool) {
		devices, noIPv6 = l, none
		stop()
	})
	return devices, noIPv6, errors.Join(err, interfaces.Close())
}

// recordsOf returns the records of the node's pods; none where no agent has made any.
func recordsOf(c *config.Config) ([]ipam.Record, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("read which boot of this node it is: %w", err)
	}
	return ipam.Read(filepath.Join(c.Own.Network.RunFolder, "attachments"), strings.TrimSpace(string(boot)))
}

// print prints tables.
func (s *shownNetwork) print(w *page) error {
	if s.MTU == 0 {
		fmt.Fprintf(w, "node %s has no pod network of this agent's\n", s.Node)
		return nil
	}
	fmt.Fprintf(w, "node %s: packets of pods have %d bytes at most; the kernel holds %d facts of %d: %d missing, "+
		"%d too many\n", s.Node, s.MTU, s.Held, s.Wanted, s.Missing, s.Extra)
	if s.Tunnel != "" {
		fmt.Fprintln(w, "tunnel:", s.Tunnel)
	}
	if s.Masquerade != "" {
		fmt.Fprintln(w, "masquerade:", s.Masquerade)
	}
	ranges := [][]string{{"RANGE", "USED", "FREE"}}
	for _, r := range s.Ranges {
		ranges = append(ranges, []string{r.Range.String(), fmt.Sprint(r.Used), r.FreeText()})
	}
	routes := [][]string{{"TO", "OF NODE", "HOP", "VIA", "KERNEL"}}
	for _, r := range s.Routes {
		routes = append(routes, []string{r.To, r.Node, r.Hop, r.Via, r.Kernel})
	}
	pods := [][]string{{"POD", "ADDRESSES", "DEVICE", "KERNEL"}}
	for _, p := range s.Pods {
		pods = append(pods, []string{p.Pod, strings.Trim(strings.ReplaceAll(fmt.Sprint(p.Addresses), " ", ", "), "[]"),
			p.Device, p.Kernel})
	}
	for _, rows := range [][][]string{ranges, routes, pods} {
		if len(rows) == 1 {
			continue
		}
		fmt.Fprintln(w)
		if err := w.table(rows); err != nil {
			return err
		}
	}
	for _, p := range s.Trouble {
		if err := w.paragraph("problem: ", "  ", p.String()); err != nil {
			return err
		}
	}
	return nil
}
