package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// shown is what show prints.
type shown struct {
	Node      string            `json:"node"`
	Wanted    int               `json:"factsWanted"`
	Held      int               `json:"factsHeld"`
	Missing   int               `json:"factsMissing"`
	Extra     int               `json:"factsExtra"`
	Frontends []shownFrontend   `json:"frontends"`
	Counts    []shownCount      `json:"counts,omitempty"`
	Packets   []shownPackets    `json:"packets,omitempty"`
	FastPath  *service.FastPath `json:"fastPath,omitempty"`
	Health    []shownHealth     `json:"healthChecks,omitempty"`
	Policies  *shownPolicies    `json:"policies,omitempty"`
	Problems  []source.Problem  `json:"problems,omitempty"`
}

type shownFrontend struct {
	Service  string   `json:"service"`
	Via      string   `json:"via"`
	Entry    string   `json:"entry"`
	Internal []string `json:"internal"` // endpoints for the node and its pods
	External []string `json:"external"` // endpoints for all other clients
	Affinity string   `json:"sessionAffinity,omitempty"`
	// Masquerade names the origins of clients whose source address becomes the node's, Direct those of them that keep
	// it before endpoints whose node answers the client directly.
	Masquerade string   `json:"masquerade"`
	DSR        string   `json:"directServerReturn,omitempty"`
	Sources    []string `json:"allowedSources,omitempty"`
	Kernel     string   `json:"kernel"`

	address string // Entry for people
	owner   model.Owner
}

type shownCount struct {
	Service     string `json:"service"`
	Connections uint64 `json:"connections"` // of clients on this node, given an endpoint
	Refused     uint64 `json:"refused"`     // for want of one

	owner model.Owner
}

// shownPackets counts packets at the node's devices by what became of them, as the metric fairlead_packets_total does.
type shownPackets struct {
	Outcome string `json:"outcome"`
	Packets uint64 `json:"packets"`
}

type shownHealth struct {
	Service string `json:"service"`
	Port    uint16 `json:"port"`
	Local   int    `json:"localBackends"`

	owner model.Owner
}

// showCommand reports what is wanted, what the kernel holds, and where they differ.
func showCommand() *cobra.Command {
	var n nodeFlags
	var o output
	c := &cobra.Command{
		Use:   "show [SERVICE...] --source DIR --node NAME",
		Short: "Show each Service's addresses and endpoints, and whether the kernel holds them",
		Long: `Show each Service's addresses and endpoints, and whether the kernel holds them; where network policies are on,
and no Service is named, also which policies decide about the node's pods.

Exit status: 0 if everything was read, whatever the kernel holds; 1 on an error, and where an object could not be read.`,
		Example: `  fairlead show --source examples/shop --node a
  fairlead show --source examples/shop --node a shop/web cart
  fairlead show --source examples/shop --node a -o json | jq '.frontends[].entry'`,
		RunE: func(c *cobra.Command, names []string) error {
			w, err := n.read(c.Context(), false)
			if err != nil {
				return err
			}
			a, err := w.audit(c.Context())
			if err != nil {
				return err
			}
			s := show(w, a.Audit)
			if len(names) == 0 {
				s.Policies = showPolicies(w, a)
			}
			if err := s.filter(w, names); err != nil {
				return err
			}
			return errors.Join(o.print(out(c), s, s.table), w.unread())
		},
	}
	n.add(c)
	o.add(c)
	c.AddCommand(showNetwork())
	return c
}

// show gathers what show prints.
func show(w *snapshot, a *mode.Audit) shown {
	s := shown{Node: w.services.Node.Name, Wanted: a.Wanted, Held: a.Held, Missing: len(a.Put), Extra: len(a.Del),
		Problems: w.problems}
	for _, f := range w.services.Sorted() {
		row := shownFrontend{Service: f.Service, Via: f.Via, Entry: f.Entry.String(), address: address(f.Entry),
			owner: f.Owner, Internal: target(f.Internal),
			External: target(f.External), Masquerade: f.Masquerade.String(), Kernel: kernelSays(w, a, f)}
		if f.Internal.Pool.Affinity > 0 {
			row.Affinity = f.Internal.Pool.Affinity.String()
		}
		if f.DSR != 0 {
			row.DSR = f.DSR.String()
		}
		for _, p := range f.Sources {
			row.Sources = append(row.Sources, p.String())
		}
		s.Frontends = append(s.Frontends, row)
	}
	counts, owners := w.counts(a), map[string]model.Owner{}
	for _, p := range w.services.Pools() {
		owners[p.Service] = p.Owner
	}
	s.FastPath = a.FastPath
	for _, o := range a.Packets {
		s.Packets = append(s.Packets, shownPackets{o.Name, o.Packets})
	}
	for _, service := range sortedKeys(counts) {
		s.Counts = append(s.Counts, shownCount{service, counts[service].Connections, counts[service].Refused,
			owners[service]})
	}
	for _, h := range w.services.HealthChecks {
		s.Health = append(s.Health, shownHealth{h.Owner.String(), h.Port, h.Local, h.Owner})
	}
	return s
}

// filter leaves the Services of these names; all where there is none.
func (s *shown) filter(w *snapshot, names []string) error {
	if len(names) == 0 {
		return nil
	}
	wanted := map[source.Key]bool{}
	for _, n := range names {
		v := w.names().Service(n)
		if v == nil {
			return w.names().Unknown(n)
		}
		wanted[source.KeyOf(v)] = true
	}
	other := func(o model.Owner) bool { return !wanted[keyOf(o)] }
	s.Frontends = slices.DeleteFunc(s.Frontends, func(f shownFrontend) bool { return other(f.owner) })
	s.Counts = slices.DeleteFunc(s.Counts, func(c shownCount) bool { return other(c.owner) })
	s.Health = slices.DeleteFunc(s.Health, func(h shownHealth) bool { return other(h.owner) })
	s.Problems = slices.DeleteFunc(s.Problems, func(p source.Problem) bool {
		return p.Object.Kind == source.Service && !wanted[p.Object]
	})
	return nil
}

// countTable prints what became of clients on this node.
func (s shown) countTable(w *page) error {
	if len(s.Counts) == 0 {
		return nil
	}
	rows := [][]string{{"SERVICE", "CONNECTIONS FROM THIS NODE", "REJECTED: NO ENDPOINT"}}
	for _, c := range s.Counts {
		rows = append(rows, []string{c.Service, fmt.Sprint(c.Connections), fmt.Sprint(c.Refused)})
	}
	fmt.Fprintln(w)
	if err := w.table(rows); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w)
	return err
}

// packetsLine prints what became of packets at the node's devices.
func (s shown) packetsLine(w io.Writer) {
	var words []string
	for _, p := range s.Packets {
		words = append(words, fmt.Sprintf("%d %s", p.Packets, strings.ReplaceAll(p.Outcome, "_", " ")))
	}
	if len(words) > 0 {
		fmt.Fprintln(w, "packets at devices:", strings.Join(words, ", "))
	}
}

// fastPathLine prints whether packets for pods are redirected past the node's stack.
func (s shown) fastPathLine(w io.Writer) {
	if s.FastPath == nil {
		return
	}
	fmt.Fprintf(w, "fast path: IPv4 %s; IPv6 %s", escape.String(s.FastPath.IPv4.String()),
		escape.String(s.FastPath.IPv6.String()))
	if len(s.FastPath.Devices) > 0 {
		fmt.Fprintf(w, "; not at %s", few(s.FastPath.Devices))
	}
	fmt.Fprintln(w)
}

// counts returns what became of clients on this node, by Service.
func (w *snapshot) counts(a *mode.Audit) map[string]service.Count {
	pools := w.poolsByID()
	return service.PerService(a.Counts, func(id uint64) string {
		if p := pools[id]; p != nil {
			return p.Service
		}
		return ""
	})
}

// poolsByID returns the pools of the decided node by their IDs.
func (w *snapshot) poolsByID() map[uint64]*model.Pool {
	pools := map[uint64]*model.Pool{}
	for _, p := range w.services.Pools() {
		pools[p.ID] = p
	}
	return pools
}

// keyOf returns the key of an owner's object.
func keyOf(o model.Owner) source.Key {
	return source.Key{Kind: source.Kind(o.Kind), Namespace: o.Namespace, Name: o.Name}
}

// kernelSays words what an audit found of a frontend.
func kernelSays(w *snapshot, a *mode.Audit, f *model.Frontend) string {
	if w.mode.Ends {
		return "in the agent's process: see its /status"
	}
	if missing, of := a.Lacks(f); missing > 0 {
		return fmt.Sprintf("lacks %d of %d facts", missing, of)
	}
	if missing, of := a.Attached(w.services.ServiceNode); missing > 0 {
		return fmt.Sprintf("not served: the node lacks %d of %d facts", missing, of)
	}
	return "in sync"
}

// target lists a target's backends, or what becomes of packets without any.
func target(t model.Target) (l []string) {
	for _, b := range t.Pool.Backends {
		l = append(l, b.Addr.String())
	}
	if l == nil {
		return []string{t.Empty.String()}
	}
	return l
}

// few shortens a list for a column.
func few(l []string) string {
	const most = 3
	if len(l) > most {
		return fmt.Sprintf("%s, … (%d in all)", strings.Join(l[:most], ", "), len(l))
	}
	return strings.Join(l, ", ")
}

// frontendRows returns a line for each frontend, those of a Service below each other.
func (s shown) frontendRows(all bool) [][]string {
	rows := [][]string{{"SERVICE", "VIA", "ADDRESS", "ENDPOINTS", "KERNEL"}}
	if all {
		rows[0] = append(rows[0], "FOR EXTERNAL CLIENTS", "SESSION AFFINITY", "MASQUERADED", "ALLOWED SOURCES")
	}
	frontends := slices.Clone(s.Frontends)
	slices.SortStableFunc(frontends, func(a, b shownFrontend) int { return cmp.Compare(a.Service, b.Service) })
	last := ""
	for _, f := range frontends {
		service := f.Service
		if service == last && !all {
			service = ""
		}
		last = f.Service
		endpoints, external := first(f.Internal), "same"
		if all {
			endpoints = few(f.Internal)
		}
		if !slices.Equal(f.External, f.Internal) {
			external = few(f.External)
		}
		row := []string{service, f.Via, f.address, endpoints, f.Kernel}
		switch {
		case all:
			masqueraded := f.Masquerade
			if f.DSR != "" {
				masqueraded += "; DSR: " + f.DSR
			}
			row = append(row, external, dash(f.Affinity), dash(masqueraded), dash(few(f.Sources)))
		case external != "same":
			row[3] += "; external: " + first(f.External)
		}
		rows = append(rows, row)
	}
	return rows
}

// address returns an entry as people read it: a node port, which is at all of the node's addresses of a family, by its
// family.
func address(e model.Entry) string {
	if !e.AnyAddr() {
		return e.String()
	}
	family := "IPv4"
	if e.Addr.Is6() {
		family = "IPv6"
	}
	return fmt.Sprintf("port %d/%s, %s", e.Port, e.Protocol, family)
}

// first returns the first of a list, and how many more there are, as kubectl has it.
func first(l []string) string {
	if len(l) > 1 {
		return fmt.Sprintf("%s + %d more", l[0], len(l)-1)
	}
	return few(l)
}

func (s shown) table(w *page) error {
	if err := w.table(s.frontendRows(w.wide)); err != nil {
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
	return printProblems(w, s.Problems)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// printProblems lists the input's problems, a line each; documents of kinds that are not read are counted in one line,
// unless all are asked for.
func printProblems(w *page, problems []source.Problem) error {
	unread, others := source.Unread(problems)
	if w.wide {
		unread, others = "", problems
	}
	if unread != "" {
		if _, err := fmt.Fprintf(w, "%s (-o wide lists them)\n", escape.String(unread)); err != nil {
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

// planned is what plan prints.
type planned struct {
	Node         string           `json:"node"`
	Put          int              `json:"put"`
	Replace      int              `json:"replace"`
	Delete       int              `json:"delete"`
	Unchanged    int              `json:"unchanged"`
	Transactions int              `json:"transactions"`
	Estimate     string           `json:"estimatedTime"`
	ByKind       map[string][]int `json:"byKind"` // put, replace, delete
	Operations   []string         `json:"operations,omitempty"`
	Problems     []source.Problem `json:"problems,omitempty"`
}

// What writing costs, for plan's estimate: measured with the lab's experiment services (2 cores, Linux 6.18).
const (
	perTransaction = 60 * time.Microsecond
	perFact        = 2 * time.Microsecond
	perWrite       = 4096 // facts in one transaction
)

// planCommand reports what a sync would do.
func planCommand() *cobra.Command {
	var n nodeFlags
	var o output
	var all bool
	var against string
	c := &cobra.Command{
		Use:   "plan --source DIR --node NAME",
		Short: "Print what serving a folder would change in the kernel, and change nothing",
		Long: `Print what serving a folder would change in the kernel, and change nothing.

With --against, no kernel is read: it prints which workloads could newly open connections, and which no longer, if
the objects of --against became those of --source.

Exit status, as kubectl diff has it: 0 if nothing would change; 1 if something would; 2 on an error, and where an object
could not be read.`,
		Example: `  fairlead plan --source new-manifests --node worker-1
  fairlead plan --source new-manifests --node worker-1 --operations
  fairlead plan --source new-manifests --against old-manifests
  fairlead plan --source changed-policies --against cluster --kubeconfig ~/.kube/config`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if against != "" {
				return comparePolicies(c, &n, o, against)
			}
			w, err := n.read(c.Context(), false)
			if err != nil {
				return err
			}
			a, err := w.audit(c.Context())
			if err != nil {
				return err
			}
			p := plan(w, a.Audit, all)
			err = errors.Join(o.print(out(c), p, p.table), w.unread())
			if err == nil && p.Put+p.Replace+p.Delete > 0 {
				return status{code: 1}
			}
			return err
		},
	}
	n.add(c)
	o.add(c)
	c.Flags().BoolVar(&all, "operations", false, "list each operation")
	c.Flags().StringVar(&against, "against", "", `folder or file of the objects before: compare what policies allow; `+
		`"cluster": those of --kubeconfig, which --source changes and adds to`)
	c.MarkFlagDirname("against")
	return failsWith(2, c)
}

// plan counts what an audit would have written.
func plan(w *snapshot, a *mode.Audit, operations bool) planned {
	p := planned{Node: w.services.Node.Name, ByKind: map[string][]int{}, Problems: w.problems}
	gone := make(map[reconcile.PlannedFact]bool, len(a.Del))
	for _, fact := range a.Del {
		gone[fact] = true
	}
	count := func(what int, sign string, total *int, fact reconcile.PlannedFact) {
		if p.ByKind[fact.Group] == nil {
			p.ByKind[fact.Group] = make([]int, 3)
		}
		p.ByKind[fact.Group][what]++
		*total++
		if operations {
			p.Operations = append(p.Operations, sign+" "+fact.Name)
		}
	}
	for _, f := range a.Put {
		if gone[f] {
			delete(gone, f)
			count(1, "~", &p.Replace, f)
		} else {
			count(0, "+", &p.Put, f)
		}
	}
	for _, f := range a.Del {
		if gone[f] {
			count(2, "-", &p.Delete, f)
		}
	}
	p.Unchanged = a.Wanted - p.Put - p.Replace
	changes := p.Put + p.Replace + p.Delete
	p.Transactions = (changes + perWrite - 1) / perWrite
	p.Estimate = (time.Duration(p.Transactions)*perTransaction + time.Duration(changes)*perFact).String()
	return p
}

func (p planned) table(w *page) error {
	rows := [][]string{{"KIND", "PUT", "REPLACE", "DELETE"}}
	for _, kind := range sortedKeys(p.ByKind) {
		n := p.ByKind[kind]
		rows = append(rows, []string{kind, fmt.Sprint(n[0]), fmt.Sprint(n[1]), fmt.Sprint(n[2])})
	}
	if len(rows) > 1 {
		if err := w.table(rows); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	for _, op := range p.Operations {
		fmt.Fprintln(w, escape.String(op))
	}
	fmt.Fprintf(w, "node %s: put %d, replace %d, delete %d, leave %d unchanged: %d transactions, about %s. Nothing was "+
		"changed.\n",
		p.Node, p.Put, p.Replace, p.Delete, p.Unchanged, p.Transactions, p.Estimate)
	return printProblems(w, p.Problems)
}
