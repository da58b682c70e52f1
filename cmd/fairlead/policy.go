package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reachability"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
	"fairlead.dev/fairlead/source/manifest"
)

// policyCommand holds what helps people who write policies.
func policyCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "policy",
		Short: "Test network policies, see which workloads may talk to which, convert older kinds",
		Long: `Test network policies against expectations, and see which workloads may talk to which: from a folder of
manifests or a cluster's objects alone. Nothing here reads or writes a kernel, and no rights on a node are needed. In
manifests the pod templates of workloads stand for their pods, so that a Git repository or a chart's output will do.

What a change of policies would newly allow or deny: fairlead plan --source NEW --against OLD.
Why one connection is allowed or denied, checked against a node's kernel: fairlead explain.`,
	}
	return cli.Holds(c, policyCheck(), policyMatrix(), policySuggest(), policyWhatif(), policyConvert())
}

// clusterFlags are the flags of commands that evaluate a whole cluster.
type clusterFlags struct{ nodeFlags }

// add adds the flags to a command. A node's name has no meaning to it.
func (f *clusterFlags) add(c *cobra.Command) {
	f.nodeFlags.add(c)
	c.Flags().MarkHidden("node")
}

// input is the objects of a cluster and what an agent would make of them.
type input struct {
	objects  []source.Object
	problems []source.Problem
	options  reachability.Options
	part     bool // manifests, which may not hold all that a cluster does
}

// evaluate evaluates the objects and warns of what is wrong with them, or matches nothing in manifests. Objects that
// could not be read are an error: what is evaluated without them may be wrong.
func (i input) evaluate(c *cobra.Command) (*reachability.Cluster, error) {
	of := reachability.New(i.objects, i.options)
	_, problems := source.Unread(i.problems)
	others, problems := source.Unevaluated(problems)
	if others != "" {
		c.PrintErrln("warning:", escape.String(others))
	}
	if problems = append(slices.Clone(problems), of.Problems()...); i.part {
		problems = append(problems, of.Unmatched()...)
	}
	for _, p := range problems {
		c.PrintErrln("warning:", escape.String(p.String()))
	}
	return of, (&inspect.Decided{Lost: inspect.Lost(i.problems)}).Unread()
}

// options returns what an agent of this configuration would evaluate by.
func options(c *config.Config) (o reachability.Options, err error) {
	of := *c
	of.Proxy.HostnameOverride = "each" // node's own
	if o.Services, err = of.Resolve(); err != nil {
		return o, err
	}
	name := c.Own.Mode
	if name == mode.Auto {
		name = mode.Default
	}
	m, err := mode.Of(name)
	if err != nil {
		return o, err
	}
	o.Services = m.With(c.Options()).Resolve(o.Services)
	o.Policies = c.ResolvePolicies(o.Services)
	return o, nil
}

// cluster reads the objects once: those of --source, else those of the Kubernetes API.
func (n *nodeFlags) cluster(ctx context.Context) (i input, c *config.Config, err error) {
	if c, err = n.Load(); err != nil {
		return i, c, err
	}
	if i.options, err = options(c); err != nil {
		return i, c, err
	}
	if c.Own.Source != "" {
		i.part = true
		i.objects, i.problems, err = manifest.LoadTemplates(c.Own.Source)
		return i, c, err
	}
	i.objects, i.problems, err = loadCluster(ctx, c)
	return i, c, err
}

// loadCluster reads what policies and Services are about from the Kubernetes API.
func loadCluster(ctx context.Context, c *config.Config) ([]source.Object, []source.Problem, error) {
	a, err := access(c)
	if err != nil {
		return nil, nil, err
	}
	ctx, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	return kube.New(kube.Options{Access: a, ProxyName: c.Own.ServiceProxyName, Nodes: true, Kinds: []source.Kind{
		source.Namespace, source.Pod, source.NetworkPolicy, source.ClusterNetworkPolicy}}).Load(ctx, true)
}

// checked is what check prints.
type checked struct {
	Expectations int           `json:"expectations"`
	Failed       int           `json:"failed"`
	Results      []checkedItem `json:"results"`
}

type checkedItem struct {
	Expectation string                    `json:"expectation"`
	File        string                    `json:"file"`
	Line        int                       `json:"line"`
	OK          bool                      `json:"ok"`
	Evaluated   int                       `json:"connections"` // that were evaluated
	Failed      int                       `json:"failed"`
	Failures    []reachability.Connection `json:"failures,omitempty"` // the first
	Error       string                    `json:"error,omitempty"`
	lines       []string
}

// junit is the output format of CI systems.
const junit cli.Output = "junit"

func policyCheck() *cobra.Command {
	var f clusterFlags
	var o cli.Output
	c := &cobra.Command{
		Use:   "check FILE... --source DIR",
		Short: "Check that policies allow and deny what files of expectations say",
		Long: `Check that policies allow and deny what files of expectations say. Connections are evaluated on all nodes: the
egress policies of their source and its Services on its node, the ingress policies of each backend on the backend's.

A file has a list of expectations:

  apiVersion: fairlead.dev/v1alpha1
  kind: PolicyExpectations
  expectations:
  - name: only the web pods reach the database
    from: shop/app=web   # a pod, pods (shop/app=web, shop/*, *), node/NAME, outside, an IP
    to: shop/db          # the same, or a Service
    port: sql            # a number, a name, 53/udp, or "*" for every port
    expect: allowed      # or denied
    by: shop/db          # optional: the policy that decides
  - {from: [shop/app=cart, outside], to: shop/db, port: [sql, 9187], expect: denied}

Exit status: 0 if every expectation holds; 1 if one doesn't; 2 on an error, and where an object could not be read.`,
		Example: `  fairlead policy check expectations.yaml --source manifests
  fairlead policy check expectations.yaml --source manifests -o junit > report.xml
  helm template shop ./chart | fairlead policy check expectations.yaml --source -
  fairlead policy check expectations.yaml --kubeconfig ~/.kube/config`,
		Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return []string{"yaml", "yml", "json"}, cobra.ShellCompDirectiveFilterFileExt
		},
		RunE: func(c *cobra.Command, files []string) error {
			l, err := readExpectations(files)
			if err != nil {
				return err
			}
			in, _, err := f.cluster(c.Context())
			if err != nil {
				return err
			}
			of, err := in.evaluate(c)
			if err != nil {
				return err
			}
			results := of.Check(l)
			return printChecked(cli.Out(c), o, results)
		},
	}
	f.add(c)
	o.Add(c)
	c.Flags().Lookup("output").Usage = "output format: json, yaml, junit, or wide for all columns"
	return cli.FailsWith(2, c)
}

// printChecked prints results. That one doesn't hold is exit status 1.
func printChecked(p *cli.Page, o cli.Output, results []reachability.Result) error {
	k := checkedOf(results)
	print := func() error { return o.Print(p, k, k.table) }
	if o == junit {
		print = func() error { return reachability.WriteJUnit(p, results) }
	}
	if err := print(); err != nil || k.Failed == 0 {
		return err
	}
	return cli.Status{Code: 1}
}

// readExpectations reads all files.
func readExpectations(files []string) (out []reachability.Expectation, err error) {
	for _, name := range files {
		b, failed := os.ReadFile(name)
		if failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		l, failed := reachability.ReadExpectations(name, b)
		out, err = append(out, l...), errors.Join(err, failed)
	}
	return out, err
}

func checkedOf(results []reachability.Result) checked {
	k := checked{Expectations: len(results), Results: []checkedItem{}}
	for _, r := range results {
		if !r.OK() {
			k.Failed++
		}
		k.Results = append(k.Results, checkedItem{r.String(), r.File, r.Line, r.OK(), r.Evaluated, r.Failed, r.Failures,
			r.Error, r.Lines()})
	}
	return k
}

func (k checked) table(p *cli.Page) error {
	rows := [][]string{{"RESULT", "EXPECTATION", "CONNECTIONS", "AT"}}
	for _, r := range k.Results {
		result := "ok"
		switch {
		case r.Error != "":
			result = "ERROR"
		case !r.OK:
			result = "FAILED"
		}
		rows = append(rows, []string{result, r.Expectation, fmt.Sprint(r.Evaluated), fmt.Sprintf("%s:%d", r.File, r.Line)})
	}
	err := p.Table(rows)
	for _, r := range k.Results {
		if r.OK {
			continue
		}
		err = errors.Join(err, p.Paragraph("\n", "", fmt.Sprintf("%s:%d: %s", r.File, r.Line, r.Expectation)))
		for _, line := range r.lines {
			err = errors.Join(err, p.Paragraph("  ", "    ", line))
		}
	}
	_, failed := fmt.Fprintf(p, "\n%d of %d expectations hold\n", k.Expectations-k.Failed, k.Expectations)
	return errors.Join(err, failed)
}

func policyMatrix() *cobra.Command {
	var f clusterFlags
	var o cli.Output
	var html string
	var namespaces []string
	c := &cobra.Command{
		Use:   "matrix --source DIR",
		Short: "Show which workloads may talk to which, and on which ports",
		Long: `Show which workloads may talk to which, and on which ports: those of containers, Services and policies. Pods
of a namespace with the same labels are one workload, as long as policies can't tell them apart. Beside them stand the
nodes, outside, and the CIDRs of policies.

With --html the matrix is one page to open in a browser, which also shows the rule that decides each port.`,
		Example: `  fairlead policy matrix --source examples/shop
  fairlead policy matrix --source examples/shop --html matrix.html
  fairlead policy matrix --kubeconfig ~/.kube/config --namespace shop`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			in, _, err := f.cluster(c.Context())
			if err != nil {
				return err
			}
			of, err := in.evaluate(c)
			if err != nil {
				return err
			}
			m, err := reachability.NewMatrix(of, namespaces)
			if err != nil {
				return err
			}
			if html == "" {
				return o.Print(cli.Out(c), matrixOf(m), func(p *cli.Page) error { return matrixTable(p, m) })
			}
			if err := writeFile(html, m.WritePage); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cli.Out(c), "%s: %s\n", html, m.Summary())
			return err
		},
	}
	f.add(c)
	o.Add(c)
	c.Flags().StringVar(&html, "html", "", "write the matrix to this `FILE` as an HTML page")
	c.Flags().StringSliceVar(&namespaces, "namespace", nil, "only pairs with a pod of these namespaces (default all)")
	c.RegisterFlagCompletionFunc("namespace", completeNamespace)
	c.MarkFlagFilename("html", "html")
	return c
}

// writeFile writes a file whole.
func writeFile(name string, write func(io.Writer) error) error {
	w, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(write(w), w.Close())
}

// completeNamespace offers the namespaces of the source's pods.
func completeNamespace(c *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	path, _ := c.Flags().GetString("source")
	objects, _, err := manifest.LoadTemplates(path)
	if path == "" || path == manifest.Stdin || err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, o := range objects {
		if k := source.KeyOf(o); k.Kind == source.Pod {
			names = append(names, k.Namespace)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), cobra.ShellCompDirectiveNoFileComp
}

// shownMatrix is what matrix prints for programs.
type shownMatrix struct {
	Groups []shownGroup `json:"workloads"`
	Pairs  []shownPair  `json:"pairs"`
}

type shownGroup struct {
	Name    string   `json:"name"`
	Kind    string   `json:"kind"`
	Members []string `json:"members"`
}

type shownPair struct {
	From  string      `json:"from"`
	To    string      `json:"to"`
	Ports []shownPort `json:"ports"`
}

type shownPort struct {
	Port   string `json:"port"`
	Fate   string `json:"fate"`
	Reason string `json:"reason"`
}

func matrixOf(m *reachability.Matrix) shownMatrix {
	s := shownMatrix{Groups: []shownGroup{}, Pairs: []shownPair{}}
	for i, g := range m.Groups {
		s.Groups = append(s.Groups, shownGroup{g.Name, string(g.Kind), g.Members})
		for j, c := range m.Cells[i] {
			if c == nil {
				continue
			}
			pair := shownPair{From: g.Name, To: m.Groups[j].Name, Ports: []shownPort{}}
			for n, d := range c.Ports {
				pair.Ports = append(pair.Ports, shownPort{m.Ports[j][n].String(), string(d.Fate), d.Reason})
			}
			if c.Rest.Fate != "" {
				pair.Ports = append(pair.Ports, shownPort{"*", string(c.Rest.Fate), c.Rest.Reason})
			}
			s.Pairs = append(s.Pairs, pair)
		}
	}
	return s
}

// matrixTable prints the matrix for people, in as many tables as the page is too narrow for.
func matrixTable(p *cli.Page, m *reachability.Matrix) error {
	cells, from := make([][]string, len(m.Groups)), 0
	for i, g := range m.Groups {
		from = max(from, min(len(g.Name), 28))
		for j := range m.Groups {
			cells[i] = append(cells[i], cellText(m, i, j))
		}
	}
	var err error
	for first := 0; first < len(m.Groups); {
		last, columns := first, from+cli.Gap
		for last < len(m.Groups) {
			w := min(len(m.Groups[last].Name), cli.Narrowest)
			for i := range m.Groups {
				w = max(w, min(len(cells[i][last]), cli.Narrowest))
			}
			if columns += w + cli.Gap; p.Columns > 0 && columns > p.Columns && last > first {
				break
			}
			last++
		}
		if first > 0 {
			fmt.Fprintln(p)
		}
		rows := [][]string{{"FROM ↓  TO →"}}
		for _, g := range m.Groups[first:last] {
			rows[0] = append(rows[0], g.Name)
		}
		for i, g := range m.Groups {
			rows = append(rows, append([]string{g.Name}, cells[i][first:last]...))
		}
		err, first = errors.Join(err, p.Table(rows)), last
	}
	_, failed := fmt.Fprintln(p)
	return errors.Join(err, failed, p.Paragraph("", "", "all: every port; -: none; ~: in part, such as over one IP "+
		"family; a blank: not evaluated. "+m.Summary()+". The rule that decides: --html FILE, or -o json."))
}

// portText returns what a cell says of a port that is not denied.
func portText(p reachability.ListedPort, d reachability.Decided) string {
	text := fmt.Sprint(p.First)
	if p.Last > p.First {
		text += fmt.Sprint("-", p.Last)
	}
	if p.Protocol != model.TCP {
		text += "/" + p.Protocol.String()
	}
	if d.Fate == reachability.Mixed {
		return "~" + text
	}
	return text
}

// cellText returns what a cell of the table says: all, -, or the ports that are allowed.
func cellText(m *reachability.Matrix, i, j int) string {
	c := m.Cells[i][j]
	switch {
	case c == nil:
		return ""
	case c.All:
		return "all"
	case c.None:
		return "-"
	}
	var l []string
	for n, d := range c.Ports {
		if text := portText(m.Ports[j][n], d); d.Fate != reachability.Denied && !slices.Contains(l, text) {
			l = append(l, text)
		}
	}
	if c.Rest.Fate != reachability.Denied || len(l) == 0 {
		l = append(l, "others")
	}
	if len(l) > 3 {
		l = append(l[:2], fmt.Sprintf("+%d", len(l)-2))
	}
	return strings.Join(l, " ")
}
