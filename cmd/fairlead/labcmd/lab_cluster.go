package labcmd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/lab/cluster"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/source/kube"
)

// clusterRun is the flags of lab run cluster.
type clusterRun struct {
	cluster.Options
	access     kube.Access
	namespace  string
	placements []string
	rbac       bool
}

// labRunCluster measures a cluster's network by pods.
func labRunCluster() *cobra.Command {
	var r clusterRun
	c := &cobra.Command{
		Use:   "cluster",
		Short: cluster.Question,
		Long: `Measure the network of a cluster, whatever its CNI plugin and its service proxy, by pods that run Fairlead's image:
a server, and in each round a client of each placement that does so many round trips, connections and streams, to the
pod itself and through a Service. It needs pods and Services in one namespace: --print-rbac prints that, and a role.

Results go to a folder below --out with histograms, means, deviations and percentiles; fairlead lab compare compares two
of them. All that was made in the cluster is removed at the end, after Ctrl-C, and by the next run after kill -9.`,
		Example: "  fairlead lab run cluster --print-rbac | kubectl apply -f -\n" +
			"  fairlead lab run cluster --kubeconfig ~/.kube/config --image registry.example/fairlead:1\n" +
			"  fairlead lab run cluster --image fairlead:1 --nodes w1,w2 --placements across,same,host",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return r.run(c) },
	}
	var usual []string
	for _, p := range cluster.Usual {
		usual = append(usual, string(p))
	}
	f := c.Flags()
	f.StringVar(&r.access.Kubeconfig, "kubeconfig", "", "kubeconfig of the Kubernetes API; in a pod it is not needed")
	f.StringVar(&r.namespace, "namespace", "fairlead-lab", "namespace of the pods, which must exist")
	f.StringVar(&r.Image, "image", "", "Fairlead's image, of this version")
	f.StringVar(&r.Network, "network", "", "what the cluster's CNI plugin and proxy are, in your words, for the report "+
		"and for comparisons: a run can't see that")
	f.StringSliceVar(&r.Nodes, "nodes", nil, "nodes of the server and of clients on another node, one or two "+
		"(default: the scheduler's choice)")
	f.StringSliceVar(&r.placements, "placements", usual,
		"where clients are, of across, same and host (across, in the nodes' own network); the first is the baseline")
	f.IntVar(&r.Samples, "samples", 1000, "operations of a block")
	f.IntVar(&r.Rounds, "rounds", cluster.Rounds, "rounds, in each of which a client of each placement runs")
	f.Uint64Var(&r.Seed, "seed", 0, "draws every order (default: from the clock)")
	f.StringVar(&r.Out, "out", "lab-results", "folder in which the run's own folder is made")
	f.BoolVar(&r.rbac, "print-rbac", false, "print the namespace, service account and role that a run needs, and end")
	c.MarkFlagDirname("out")
	return c
}

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// check returns an error for flags that make no sense, and fills in what no flag says.
func (r *clusterRun) check(c *cobra.Command) error {
	if !dnsLabel.MatchString(r.namespace) {
		return fmt.Errorf("invalid --namespace %q: use the name of a namespace", r.namespace)
	}
	for _, p := range r.placements {
		switch p := cluster.Placement(p); {
		case p != cluster.SameNode && p != cluster.OtherNode && p != cluster.HostNet:
			return fmt.Errorf("invalid --placements %q: use across, same or host", string(p))
		case slices.Contains(r.Placements, p):
			return fmt.Errorf("invalid --placements: %s is there twice", p)
		default:
			r.Placements = append(r.Placements, p)
		}
	}
	switch {
	case len(r.Placements) == 0:
		return errors.New("--placements is empty: use at least one of across, same, host")
	case r.rbac:
		return nil
	case r.Image == "":
		return errors.New("--image is missing: name Fairlead's image, as the nodes can pull it")
	case len(r.Nodes) > 2:
		return fmt.Errorf("invalid --nodes %s: use one node or two", strings.Join(r.Nodes, ","))
	case len(r.Nodes) == 1 && !slices.Equal(r.Placements, []cluster.Placement{cluster.SameNode}):
		return errors.New("--nodes has one node: name a second one, or measure --placements same alone")
	case r.Samples < 1 || r.Samples > 100_000:
		return fmt.Errorf("invalid --samples %d: use 1 to 100000", r.Samples)
	case r.Rounds < 1 || r.Rounds > 1000:
		return fmt.Errorf("invalid --rounds %d: use 1 to 1000", r.Rounds)
	}
	if !c.Flags().Changed("seed") {
		r.Seed = uint64(time.Now().UnixNano()) % 1_000_000
	}
	return nil
}

func (r *clusterRun) run(c *cobra.Command) error {
	if err := r.check(c); err != nil {
		return err
	}
	if r.rbac {
		_, err := io.WriteString(cli.Out(c), cluster.RBAC(r.namespace, slices.Contains(r.Placements, cluster.HostNet)))
		return err
	}
	config, err := r.access.Config()
	if err != nil {
		return err
	}
	a, err := cluster.Open(config, r.namespace)
	if err != nil {
		return err
	}
	r.Output = c.ErrOrStderr()
	r.Command = []string{"fairlead", "lab", "run", "cluster", "--image", r.Image, "--namespace", r.namespace,
		"--placements", strings.Join(r.placements, ","), "--samples", fmt.Sprint(r.Samples), "--rounds",
		fmt.Sprint(r.Rounds), "--seed", fmt.Sprint(r.Seed)}
	if r.Network != "" {
		r.Command = append(r.Command, "--network", r.Network)
	}
	if len(r.Nodes) > 0 {
		r.Command = append(r.Command, "--nodes", strings.Join(r.Nodes, ","))
	}
	dir, err := cluster.Run(c.Context(), a, r.Options)
	if dir == "" {
		return Interrupted(err, "nothing was measured")
	}
	if berr := report.Build(dir); berr != nil {
		return errors.Join(err, berr)
	}
	if serr := showRun(cli.Out(c), dir); serr != nil {
		return errors.Join(err, serr)
	}
	return Interrupted(err, "the report covers a part of the run")
}

// labEndpoint is what the pods of lab run cluster run.
func labEndpoint() *cobra.Command {
	var port uint16
	serve := &cobra.Command{Use: "serve", Short: "Answer, in a pod of lab run cluster", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return cluster.Serve(c.Context(), port, c.OutOrStdout())
		}}
	serve.Flags().Uint16Var(&port, "port", 8080, "port for round trips; the next one is for streams")
	measure := &cobra.Command{Use: "measure JOB", Short: "Measure, in a pod of lab run cluster", Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			var j cluster.Job
			if err := json.Unmarshal([]byte(args[0]), &j); err != nil {
				return fmt.Errorf("read the job: %w", err)
			}
			return cluster.Measure(c.Context(), j, c.OutOrStdout())
		}}
	c := cli.Holds(&cobra.Command{Use: "endpoint", Short: "What the pods of lab run cluster run"}, serve, measure)
	c.Hidden = true
	return c
}
