package text

import (
	"fmt"
	"strings"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/inspect"
)

// Network prints a pod network for people.
type Network struct{ *inspect.Network }

// printRuntime prints by what the container runtime starts pods.
func (s Network) printRuntime(w *cli.Page) {
	if s.Runtime != "" {
		fmt.Fprintln(w, "new pods:", s.Runtime)
	}
}

// Tables prints its ranges, routes and pods.
func (s Network) Tables(w *cli.Page) error {
	if s.MTU == 0 {
		fmt.Fprintf(w, "node %s has no pod network of this agent's\n", s.Node)
		s.printRuntime(w)
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
	s.printRuntime(w)
	ranges := [][]string{{"RANGE", "USED", "FREE"}}
	for _, r := range s.Ranges {
		ranges = append(ranges, []string{r.Range.String(), fmt.Sprint(r.Used), r.FreeText()})
	}
	routes := [][]string{{"TO", "OF NODE", "HOP", "VIA", "KERNEL"}}
	for _, r := range s.Routes {
		if r.PodsOnly {
			r.Hop += ", for pods"
		}
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
		if err := w.Table(rows); err != nil {
			return err
		}
	}
	for _, p := range s.Trouble {
		if err := w.Paragraph("problem: ", "  ", p.String()); err != nil {
			return err
		}
	}
	return nil
}
