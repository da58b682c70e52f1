package sandboxcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/daemon"
	"fairlead.dev/fairlead/sandbox/kubernetes"
)

// ClusterCommand returns fairlead cluster, a real Kubernetes on this machine.
func ClusterCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "cluster",
		Short: "Run a real Kubernetes cluster on this machine, with Fairlead as its network",
		Long: `Run a real Kubernetes cluster on this machine, with Fairlead as its network: etcd, kube-apiserver,
kube-controller-manager, kube-scheduler, CoreDNS, and on each node containerd, kubelet and an agent, in namespaces
of their own. "make cluster" builds the programs, once, and starts three nodes. Nothing is kept when the cluster
goes down.`,
	}
	return cli.Holds(c, clusterUp(), clusterServe(), clusterMachine(), clusterDown())
}

// clusterDir is where clusters keep their files; each has a folder of its name.
const clusterDir = "/var/lib/fairlead/clusters"

// removeEmpty removes the folders that hold clusters' own, where there is nothing in them.
func removeEmpty() {
	os.Remove(clusterDir)
	os.Remove(filepath.Dir(clusterDir))
}

// kubernetesFlags are flags that `up` passes on to the process that holds a cluster.
type kubernetesFlags struct{ programs, network, proxy string }

// What connects pods, and what serves Services.
const (
	clusterBridge    = "bridge"
	clusterKubeProxy = "kube-proxy"
	clusterFairlead  = "fairlead"
	clusterNone      = "none"
)

func (f *kubernetesFlags) add(c *cobra.Command) {
	cache, _ := os.UserCacheDir()
	c.Flags().StringVar(&f.programs, "programs", filepath.Join(cache, "fairlead"),
		"folder of the programs that `make cluster` builds")
	c.Flags().StringVar(&f.network, "network", clusterFairlead, "what connects pods: fairlead, bridge for the CNI "+
		"plugins bridge and host-local, or none, where you install that yourself, and what serves Services")
	c.Flags().StringVar(&f.proxy, "proxy", clusterFairlead, "what serves Services: fairlead, or with --network bridge "+
		"kube-proxy, which leaves network policies without effect")
	for name, values := range map[string][]string{"network": {clusterFairlead, clusterBridge, clusterNone},
		"proxy": {clusterFairlead, clusterKubeProxy}} {
		c.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
}

// args returns the flags as arguments.
func (f *kubernetesFlags) args() []string {
	return []string{"--programs", f.programs, "--network", f.network, "--proxy", f.proxy}
}

// options returns what the flags ask for, with the programs that it takes.
func (f *kubernetesFlags) options() (o kubernetes.Options, err error) {
	o.Bridge, o.Bare, o.KubeProxy = f.network == clusterBridge, f.network == clusterNone, f.proxy == clusterKubeProxy
	switch {
	case !o.Bridge && !o.Bare && f.network != clusterFairlead:
		return o, fmt.Errorf("invalid --network %q: use fairlead, bridge or none", f.network)
	case !o.KubeProxy && f.proxy != clusterFairlead:
		return o, fmt.Errorf("invalid --proxy %q: use fairlead or kube-proxy", f.proxy)
	case o.KubeProxy && !o.Bridge:
		return o, errors.New("invalid --proxy kube-proxy: an agent that connects pods serves Services too: " +
			"use it with --network bridge")
	}
	o.Programs, err = findPrograms(f.programs, o)
	return o, err
}

// findPrograms returns the paths of the programs in a folder, of the newest version each.
func findPrograms(folder string, o kubernetes.Options) (p kubernetes.Programs, err error) {
	newest := func(pattern string) string {
		found, _ := filepath.Glob(filepath.Join(folder, pattern))
		if len(found) == 0 {
			err = errors.Join(err, fmt.Errorf("find %s in %s: no such program: build it with `make cluster`", pattern, folder))
			return ""
		}
		return found[len(found)-1]
	}
	p.ControlPlane, p.Node, p.Containerd = newest("control-plane-v*"), newest("node-v*"), newest("containerd-v*")
	p.CoreDNS = newest("coredns-v*")
	if o.Bridge {
		p.Bridge = newest("cni-plugins-v*")
	}
	if o.KubeProxy {
		p.KubeProxy = newest("kube-proxy-v*")
	}
	runc, lack := exec.LookPath("runc")
	if lack != nil {
		err = errors.Join(err, fmt.Errorf("find runc: %w: install the package runc", lack))
	}
	p.Runc = runc
	self, lack := os.Executable()
	p.Agent, p.Plugin = self, filepath.Join(filepath.Dir(self), "fairlead-cni")
	if _, no := os.Stat(p.Plugin); no != nil {
		err = errors.Join(err, fmt.Errorf("find the CNI plugin: %w: build it with `make build`", no))
	}
	return p, errors.Join(err, lack)
}

// suggest prints commands to try with a cluster that is up.
func (f *kubernetesFlags) suggest(w io.Writer, name string) error {
	fmt.Fprintf(w, "\nTry:\n  export KUBECONFIG=%s\n", filepath.Join(clusterDir, name, "kubeconfig"))
	if f.network == clusterNone {
		s, err := sandbox.StateOf(name)
		if err != nil {
			return err
		}
		plane, err := s.Host(string(sandbox.External))
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "  helm install fairlead deploy/chart -n kube-system --set apiServer.host=%s --set network.mode=Own "+
			"--set kubeProxy.conntrack.maxPerCore=0\n", plane.Addresses[0])
	}
	_, err := fmt.Fprintf(w, `  kubectl get nodes,pods -A -o wide
  fairlead sandbox exec --name %[1]s a -- ip route
  fairlead cluster down --name %[1]s
`, name)
	return err
}

func clusterUp() *cobra.Command {
	var name string
	var nodes int
	var images []string
	c := &cobra.Command{
		Use:   "up [-- AGENT FLAGS]",
		Short: "Start a cluster and keep it up in the background",
		Long: `Start a cluster and keep it up in the background. Flags after -- go to every node's "fairlead run", such as
--mode ebpf.`,
		Example: `  fairlead cluster up --nodes 3
  fairlead cluster up --nodes 2 -- --mode ebpf
  fairlead cluster up --network bridge --proxy kube-proxy
  fairlead cluster up --network none --image bin/fairlead-image.tar`,
	}
	var f kubernetesFlags
	f.add(c)
	c.Flags().StringVar(&name, "name", "cluster", "name of the cluster: a letter, then letters and digits")
	c.Flags().IntVar(&nodes, "nodes", 3, "how many nodes")
	c.Flags().StringArrayVar(&images, "image", nil, "archive of an image that every node gets, as `docker save` or "+
		"`make image` writes it; may be given several times")
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := needRoot(c); err != nil {
			return err
		}
		if nodes < 1 || nodes > 100 {
			return fmt.Errorf("--nodes %d: must be from 1 to 100", nodes)
		}
		if o, err := f.options(); err != nil {
			return err
		} else if (o.KubeProxy || o.Bare) && len(args) > 0 {
			return fmt.Errorf("invalid agent flags %q: no agent runs with --proxy kube-proxy or --network none: "+
				"leave them out", args)
		}
		if s, err := sandbox.StateOf(name); err == nil && s.Alive() {
			return fmt.Errorf("cluster %s is up already: take it down first with fairlead cluster down --name %[1]s", name)
		}
		began := time.Now()
		serve := append([]string{"cluster", "serve", "--name", name, "--nodes", strconv.Itoa(nodes), "--events",
			strconv.Itoa(daemon.EventsFD)}, f.args()...)
		for _, i := range images {
			at, err := filepath.Abs(i)
			if err != nil {
				return err
			}
			serve = append(serve, "--image", at)
		}
		step := func(e daemon.Event) { fmt.Fprintln(c.ErrOrStderr(), e.Step) }
		if err := daemon.Start(c.Context(), name, append(append(serve, "--"), args...), step); err != nil {
			return err
		}
		fmt.Fprintf(cli.Out(c), "Cluster %s is up after %s: %d nodes.\n", name, time.Since(began).Round(time.Second), nodes)
		return f.suggest(cli.Out(c), name)
	}
	return c
}

// clusterServe is the process that holds a cluster.
func clusterServe() *cobra.Command {
	var f kubernetesFlags
	var name string
	var nodes, fd int
	var images []string
	c := &cobra.Command{
		Use: "serve", Short: "Hold a cluster in the foreground until told to end", Hidden: true,
	}
	f.add(c)
	c.Flags().StringVar(&name, "name", "cluster", "")
	c.Flags().IntVar(&nodes, "nodes", 3, "")
	c.Flags().StringArrayVar(&images, "image", nil, "")
	c.Flags().IntVar(&fd, "events", 0, "")
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		onEvent := func(daemon.Event) {}
		if fd > 0 {
			onEvent = daemon.Events(fd)
		}
		defer func() {
			if err != nil {
				onEvent(daemon.Event{Error: err.Error()})
			}
		}()
		o, err := f.options()
		if err != nil {
			return err
		}
		o.Name, o.Nodes, o.Images, o.Agent, o.Dir = name, nodes, images, args, filepath.Join(clusterDir, name)
		if err := os.MkdirAll(o.Dir, 0o755); err != nil {
			return err
		}
		defer removeEmpty()
		o.Progress = func(step string) { onEvent(daemon.Event{Step: step}) }
		ctx, stop := signal.NotifyContext(c.Context(), unix.SIGTERM, unix.SIGINT)
		defer stop()
		if err := daemon.Publish(o.Name, daemon.Status{Since: time.Now()}); err != nil {
			return err
		}
		cluster, err := kubernetes.Up(ctx, o)
		if err != nil {
			return err
		}
		onEvent(daemon.Event{Up: true})
		<-ctx.Done()
		return errors.Join(cluster.Down(), os.RemoveAll(daemon.Folder(o.Name)))
	}
	return c
}

// clusterMachine is a node's first process.
func clusterMachine() *cobra.Command {
	return &cobra.Command{
		Use: "machine JSON", Short: "Be a node of a cluster", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error { return kubernetes.Boot(args[0]) },
	}
}

func clusterDown() *cobra.Command {
	var name string
	c := &cobra.Command{
		Use:   "down",
		Short: "Take a cluster down; nothing of it is left",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := needRoot(c); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
			defer cancel()
			if err := daemon.Stop(ctx, name); err != nil && !daemon.Absent(err) {
				return err
			}
			if err := kubernetes.Remove(name, filepath.Join(clusterDir, name)); err != nil {
				return err
			}
			removeEmpty()
			fmt.Fprintf(cli.Out(c), "cluster %s is down\n", name)
			return nil
		},
	}
	c.Flags().StringVar(&name, "name", "cluster", "name of the cluster")
	return c
}
