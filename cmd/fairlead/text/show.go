// Package text prints what inspect found for people.
package text

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/source"
)

// Overview prints an overview for people.
type Overview struct{ *inspect.Overview }

// countTable prints what became of clients on this node.
func (s Overview) countTable(w *cli.Page) error {
	if len(s.Counts) == 0 {
		return nil
	}
	rows := [][]string{{"SERVICE", "CONNECTIONS FROM THIS NODE", "REJECTED: NO ENDPOINT"}}
	for _, c := range s.Counts {
		rows = append(rows, []string{c.Service, fmt.Sprint(c.Connections), fmt.Sprint(c.Refused)})
	}
	fmt.Fprintln(w)
	if err := w.Table(rows); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w)
	return err
}

// packetsLine prints what became of packets at the node's devices.
func (s Overview) packetsLine(w io.Writer) {
	var words []string
	for _, p := range s.Packets {
		words = append(words, fmt.Sprintf("%d %s", p.Packets, strings.ReplaceAll(p.Outcome, "_", " ")))
	}
	if len(words) > 0 {
		fmt.Fprintln(w, "packets at devices:", strings.Join(words, ", "))
	}
}

// fastPathLine prints whether packets for pods are redirected past the node's stack.
func (s Overview) fastPathLine(w io.Writer) {
	if s.FastPath == nil {
		return
	}
	fmt.Fprintf(w, "fast path: IPv4 %s; IPv6 %s", escape.String(s.FastPath.IPv4.String()),
		escape.String(s.FastPath.IPv6.String()))
	if len(s.FastPath.Devices) > 0 {
		fmt.Fprintf(w, "; not at %s", Few(s.FastPath.Devices))
	}
	fmt.Fprintln(w)
}

// Few shortens a list for a column.
func Few(l []string) string {
	const most = 3
	if len(l) > most {
		return fmt.Sprintf("%s, … (%d in all)", strings.Join(l[:most], ", "), len(l))
	}
	return strings.Join(l, ", ")
}

// frontendRows returns a line for each frontend, those of a Service below each other.
func (s Overview) frontendRows(all bool) [][]string {
	rows := [][]string{{"SERVICE", "VIA", "ADDRESS", "ENDPOINTS", "KERNEL"}}
	if all {
		rows[0] = append(rows[0], "FOR EXTERNAL CLIENTS", "SESSION AFFINITY", "MASQUERADED", "ALLOWED SOURCES")
	}
	frontends := slices.Clone(s.Frontends)
	slices.SortStableFunc(frontends, func(a, b inspect.Frontend) int { return cmp.Compare(a.Service, b.Service) })
	last := ""
	for _, f := range frontends {
		service := f.Service
		if service == last && !all {
			service = ""
		}
		last = f.Service
		endpoints, external := First(f.Internal), "same"
		if all {
			endpoints = Few(f.Internal)
		}
		if !slices.Equal(f.External, f.Internal) {
			external = Few(f.External)
		}
		row := []string{service, f.Via, f.Address, endpoints, f.Kernel}
		switch {
		case all:
			masqueraded := f.Masquerade
			if f.DSR != "" {
				masqueraded += "; DSR: " + f.DSR
			}
			row = append(row, external, Dash(f.Affinity), Dash(masqueraded), Dash(Few(f.Sources)))
		case external != "same":
			row[3] += "; external: " + First(f.External)
		}
		rows = append(rows, row)
	}
	return rows
}

// First returns the first of a list, and how many more there are, as kubectl has it.
func First(l []string) string {
	if len(l) > 1 {
		return fmt.Sprintf("%s + %d more", l[0], len(l)-1)
	}
	return Few(l)
}

// Table prints its Services, counts, policies and problems.
func (s Overview) Table(w *cli.Page) error {
	if err := w.Table(s.frontendRows(w.Wide)); err != nil {
		return err
	}
	if err := s.countTable(w); err != nil {
		return err
	}
	s.packetsLine(w)
	s.fastPathLine(w)
	for _, h := range s.Health {
		fmt.Fprintf(w, "health check of %s at port %d: %d endpoints on this node\n", escape.String(h.Service), h.Port,
			h.Local)
	}
	if err := s.policyTable(w); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nnode %s: %d facts wanted, %d in the kernel: %d missing, %d too many\n", s.Node, s.Wanted, s.Held,
		s.Missing, s.Extra)
	return Problems(w, s.Problems)
}

// Dash returns a cell of a table, where nothing is seen.
func Dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// Problems lists the input's problems, a line each; documents of kinds that are not read are counted in one line,
// unless all are asked for.
func Problems(w *cli.Page, problems []source.Problem) error {
	unread, others := source.Unread(problems)
	unevaluated, others := source.Unevaluated(others)
	if w.Wide {
		unread, unevaluated, others = "", "", problems
	}
	for _, s := range []string{unevaluated, unread} {
		if s == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%s (-o wide lists them)\n", escape.String(s)); err != nil {
			return err
		}
	}
	for _, p := range others {
		if _, err := fmt.Fprintln(w, "problem:", escape.String(p.String())); err != nil {
			return err
		}
	}
	return nil
}

// policyTable prints which policies decide about the node's pods: a line for each pod whose addresses are alike.
func (s Overview) policyTable(w *cli.Page) error {
	p := s.Policies
	if p == nil {
		return nil
	}
	fmt.Fprintf(w, "\nnetwork policies: mode %s, engine %s: %d rulesets, %d peers; no policy selects %d addresses of "+
		"pods on this node\n", p.Mode, p.Engine, p.Rulesets, p.Peers, p.Free)
	if len(p.Subjects) == 0 {
		return nil
	}
	rows := [][]string{{"POD", "ADDRESS", "EGRESS", "INGRESS", "KERNEL"}}
	for _, x := range p.Subjects {
		row := []string{x.Pod, x.Address, decides(x.Egress, "egress"), decides(x.Ingress, "ingress"), x.Kernel}
		if last := rows[len(rows)-1]; last[0] == row[0] && slices.Equal(last[2:], row[2:]) {
			last[1] += ", " + row[1]
			continue
		}
		rows = append(rows, row)
	}
	return w.Table(rows)
}

// decides returns what decides in a direction for a column: "Admin deny-telnet; NetworkPolicy shop/web", or "all pass"
// for nothing.
func decides(rulesets []string, direction string) string {
	var l []string
	for _, name := range rulesets {
		l = append(l, strings.TrimPrefix(name, direction+" by "))
	}
	if l == nil {
		return "all pass"
	}
	return strings.Join(l, "; ")
}
