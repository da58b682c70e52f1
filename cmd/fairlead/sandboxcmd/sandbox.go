// Package sandboxcmd has the commands of clusters on one's own machine: in a box of network namespaces, or of emulated
// machines.
package sandboxcmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/reachability"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/daemon"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
	"fairlead.dev/fairlead/verdict"
)

// Command returns fairlead sandbox, a cluster in a box.
func Command() *cobra.Command {
	c := &cobra.Command{
		Use:   "sandbox",
		Short: "Run a cluster in a box: nodes and pods as network namespaces of this machine",
		Long: `Run a cluster in a box: nodes and pods as network namespaces of this machine.

A folder of Kubernetes manifests is all it takes: every Node and every running Pod in it becomes a network
namespace, every container port answers with the pod's name and the client it saw, and every node runs an
agent. Nothing is put into the machine's own network.`,
	}
	return cli.Holds(c, sandboxUp(), sandboxServe(), sandboxLs(), sandboxExec(), sandboxProbe(), sandboxDown(),
		sandboxGenerate())
}

// needRoot returns the way out to those who are not root.
func needRoot(c *cobra.Command) error {
	if os.Geteuid() == 0 {
		return nil
	}
	return fmt.Errorf("%s enters network namespaces, which takes root: run it with sudo", c.CommandPath())
}

// boxFlag is the flag --name of commands that work in one sandbox.
type boxFlag string

func (b *boxFlag) add(c *cobra.Command) {
	c.Flags().StringVar((*string)(b), "name", "", "name of the sandbox (default: the only one)")
	c.RegisterFlagCompletionFunc("name", completeSandbox)
}

// completeSandbox offers the names of sandboxes.
func completeSandbox(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	states, _ := sandbox.States()
	var names []string
	for _, s := range states {
		names = append(names, s.Name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeHost offers the sandbox's hosts as the first n arguments.
func (b *boxFlag) completeHost(n int) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		s, err := daemon.Pick(string(*b))
		if err != nil || len(args) >= n {
			return nil, cobra.ShellCompDirectiveDefault
		}
		var names []string
		for _, h := range s.Hosts {
			names = append(names, h.Short())
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

func sandboxUp() *cobra.Command {
	var name, network string
	var agents bool
	var wait time.Duration
	c := &cobra.Command{
		Use:   "up DIR [-- AGENT FLAGS]",
		Short: "Build a cluster from a folder of manifests and keep it up in the background",
		Long: `Build a cluster from a folder of manifests and keep it up in the background. It follows the folder:
nodes and pods that come, go or change there do so here. Flags after -- go to every node's "fairlead run",
which enforces network policies unless they say --policy-mode Ignore.

With --network own, the agents connect the pods, called by the CNI plugin as by a container runtime: all nodes are on
one link. Flags such as --network-overlay Always are for the agents. own-apart puts each node into a subnet of its own,
so that pods reach each other through VXLAN. wires has pods connected by the sandbox, as a cloud or another plugin
would. auto is own if each pod's addresses are in its node's podCIDRs, else wires.`,
		Example: `  fairlead sandbox up examples/shop
  fairlead sandbox up examples/shop --network own-apart
  fairlead sandbox up examples/shop --name two -- --nodeport-addresses primary`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if n := c.ArgsLenAtDash(); n > 1 || n < 0 && len(args) > 1 {
				return errors.New("name one folder; flags for the agents come after --")
			}
			dir, err := filepath.Abs(args[0])
			if err != nil {
				return err
			}
			name = cmp.Or(name, sandboxName(dir))
			objects, err := clearSandbox(c, name, dir)
			if err != nil {
				return err
			}
			network, err = chooseNetwork(c, network, agents, objects)
			if err != nil {
				return err
			}
			serve := []string{"sandbox", "serve", "--name", name, "--events", strconv.Itoa(daemon.EventsFD),
				"--node-agent=" + strconv.FormatBool(agents), "--network", network, dir, "--"}
			if err := daemon.Start(c.Context(), name, append(serve, args[1:]...), progress(c.ErrOrStderr())); err != nil {
				return err
			}
			return awaitSandbox(c, name, wait, objects)
		},
	}
	c.Flags().StringVar(&name, "name", "", "name of the sandbox: a letter, then letters and digits (default: the "+
		"folder's name)")
	c.Flags().BoolVar(&agents, "node-agent", true, "run an agent on each node")
	c.Flags().StringVar(&network, "network", networkWires, "who connects pods: own, own-apart, wires or auto")
	c.RegisterFlagCompletionFunc("network", cobra.FixedCompletions([]string{networkOwn, networkApart, networkWires,
		networkAuto}, cobra.ShellCompDirectiveNoFileComp))
	c.Flags().DurationVar(&wait, "wait", 30*time.Second, "how long to wait until the agents are ready")
	return c
}

// Who connects a sandbox's pods.
const (
	networkAuto  = "auto"
	networkOwn   = "own"       // the agents
	networkApart = "own-apart" // the agents, each node on a link of its own
	networkWires = "wires"     // the sandbox
)

// chooseNetwork returns who connects a sandbox's pods.
func chooseNetwork(c *cobra.Command, network string, agents bool, objects []source.Object) (string, error) {
	switch network {
	case networkAuto:
		if !agents {
			return networkWires, nil
		}
		if err := sandbox.Attachable(objects); err != nil {
			c.PrintErrf("note: pods are connected by the sandbox (--network wires), not by the agents: %s\n",
				escape.String(firstLine(err)))
			return networkWires, nil
		}
		return networkOwn, nil
	case networkOwn, networkApart:
		if !agents {
			return "", fmt.Errorf("--network %s needs the agents: leave --node-agent=false out, or use --network wires", network)
		}
		if err := sandbox.Attachable(objects); err != nil {
			return "", fmt.Errorf("--network %s: %w; correct the objects, or use --network wires", network, err)
		}
		return network, nil
	case networkWires:
		return network, nil
	}
	return "", fmt.Errorf("invalid --network %q: use own, own-apart, wires or auto", network)
}

// firstLine returns the first of an error's lines.
func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// sandboxName makes a sandbox's name from a folder's.
func sandboxName(dir string) string {
	name := regexp.MustCompile(`[^a-z0-9]+`).ReplaceAllString(strings.ToLower(filepath.Base(dir)), "")
	name = strings.TrimLeft(name, "0123456789")
	return cmp.Or(name[:min(len(name), 32)], "sandbox")
}

// clearSandbox sees that a sandbox can be made: reads the folder once, removes what a killed process left under that
// name, and tells of other leftovers.
func clearSandbox(c *cobra.Command, name, dir string) ([]source.Object, error) {
	if err := needRoot(c); err != nil {
		return nil, err
	}
	objects, problems, err := manifest.Load(dir)
	if err != nil {
		return nil, err
	}
	unread, others := source.Unread(problems)
	if unread != "" {
		c.PrintErrln("note:", escape.String(unread))
	}
	unevaluated, others := source.Unevaluated(others)
	if unevaluated != "" {
		c.PrintErrln("warning:", escape.String(unevaluated))
	}
	for _, p := range others {
		c.PrintErrln("warning:", escape.String(p.String()))
	}
	left, err := sandbox.Leftovers()
	if err != nil {
		return nil, err
	}
	for _, s := range left {
		if s.Name != name {
			c.PrintErrf("note: sandbox %s was left over by a process that was killed; to remove it: fairlead sandbox down "+
				"--name %[1]s\n", s.Name)
			continue
		}
		if err := sandbox.DownByName(name); err != nil {
			return nil, err
		}
		c.PrintErrf("note: removed what a killed process had left over of sandbox %s\n", name)
	}
	if s, err := sandbox.StateOf(name); err == nil {
		return nil, fmt.Errorf("sandbox %s is up already, held by process %d: take it down first with fairlead sandbox down "+
			"--name %[1]s, or choose another --name", name, s.PID)
	}
	return objects, nil
}

// progress shows on a terminal how far a sandbox is built, and nothing elsewhere.
func progress(w io.Writer) func(daemon.Event) {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return func(daemon.Event) {}
	}
	return func(e daemon.Event) {
		fmt.Fprintf(w, "\r\033[Kbuilding: %d of %d hosts", e.Done, e.Total)
		if e.Done == e.Total {
			fmt.Fprint(w, "\r\033[K")
		}
	}
}

// awaitSandbox waits for the agents, then shows what there is and what one can do with it.
func awaitSandbox(c *cobra.Command, name string, wait time.Duration, objects []source.Object) error {
	ctx, cancel := context.WithTimeout(c.Context(), wait)
	defer cancel()
	waited := daemon.WaitReady(ctx, name)
	s, err := sandbox.StateOf(name)
	if err != nil {
		return err
	}
	if err := cli.Out(c).Table(hostRows(boxOf(s), 40)); err != nil {
		return err
	}
	if waited != nil {
		return fmt.Errorf("sandbox %s is up, but not ready after %s: %w", name, wait, waited)
	}
	tryNext(cli.Out(c), s, objects)
	return nil
}

// tryNext returns what one can do with a sandbox.
func tryNext(w io.Writer, s sandbox.State, objects []source.Object) {
	client := "outside"
	for _, h := range s.Hosts {
		if h.Role == sandbox.Pod && (client == "outside" || strings.Contains(h.Name, "client")) {
			client = h.Short()
		}
	}
	service, address := entrance(objects)
	fmt.Fprintf(w, `
Try:
  fairlead sandbox ask --name %[1]s %[2]s %[3]s
  fairlead sandbox exec --name %[1]s %[2]s -- curl -s http://%[4]s
  fairlead sandbox ls --name %[1]s
  fairlead sandbox down --name %[1]s
`, s.Name, client, service, address)
}

// entrance returns a TCP Service that one can ask, as "ask" and as curl take it.
func entrance(objects []source.Object) (service, address string) {
	for _, o := range objects {
		s, ok := o.(*corev1.Service)
		if !ok || len(s.Spec.Ports) == 0 || s.Spec.Ports[0].Protocol != corev1.ProtocolTCP {
			continue
		}
		if a, err := resolve.ParseAddr(s.Spec.ClusterIP); err == nil {
			port := s.Spec.Ports[0].Port
			return fmt.Sprintf("%s/%s:%d", s.Namespace, s.Name, port), netip.AddrPortFrom(a, uint16(port)).String()
		}
	}
	return "NAMESPACE/SERVICE:PORT", "ADDRESS:PORT"
}

// sandboxServe is the process that holds a sandbox.
func sandboxServe() *cobra.Command {
	var name, network string
	var agents bool
	var fd int
	c := &cobra.Command{
		Use:    "serve DIR [-- AGENT FLAGS]",
		Short:  "Hold a sandbox in the foreground until told to end",
		Hidden: true,
		Args:   cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			onEvent := func(daemon.Event) {}
			if fd > 0 {
				onEvent = daemon.Events(fd)
			}
			o := daemon.Options{
				Name: cmp.Or(name, sandboxName(args[0])), Follow: args[0], Source: manifest.New(args[0]),
				Progress: func(done, total int) { onEvent(daemon.Event{Done: done, Total: total}) },
				Up:       func() { onEvent(daemon.Event{Up: true}) },
			}
			if agents {
				os.Setenv(config.EnvPolicyMode, cmp.Or(os.Getenv(config.EnvPolicyMode), string(config.PoliciesEnforce)))
				o.Network, o.Apart = network == networkOwn || network == networkApart, network == networkApart
				o.Agent = func(node string) []string {
					folder := daemon.AgentFolder(o.Name, node)
					run := []string{"/proc/self/exe", "run", "--source", args[0], "--node", node, "--network-run-folder",
						folder}
					if o.Network {
						run = append(run, "--network-mode", string(config.NetworkOwn), "--network-cni-folder", folder)
					}
					return append(run, args[1:]...)
				}
			}
			err := daemon.Run(c.Context(), o)
			if err != nil {
				onEvent(daemon.Event{Error: err.Error()})
			}
			return err
		},
	}
	c.Flags().StringVar(&name, "name", "", "name of the sandbox")
	c.Flags().BoolVar(&agents, "node-agent", true, "run an agent on each node")
	c.Flags().StringVar(&network, "network", networkWires, "who connects pods")
	c.Flags().IntVar(&fd, "events", 0, "file descriptor to tell progress to")
	return c
}

// box is a sandbox as "ls" shows it.
type box struct {
	sandbox.State
	Alive  bool           `json:"alive"`
	Daemon *daemon.Status `json:"daemon,omitempty"`
}

func boxOf(s sandbox.State) box {
	b := box{State: s, Alive: s.Alive()}
	if d, err := daemon.StatusOf(s.Name); err == nil {
		b.Daemon = &d
	}
	return b
}

func sandboxLs() *cobra.Command {
	var o cli.Output
	var name boxFlag
	c := &cobra.Command{
		Use:   "ls",
		Short: "List sandboxes, or the hosts of one",
		Args:  cobra.MaximumNArgs(1), ValidArgsFunction: completeSandbox, // its name without --name is accepted, too
		RunE: func(c *cobra.Command, args []string) error {
			if name := cmp.Or(string(name), strings.Join(args, "")); name != "" {
				s, err := sandbox.StateOf(name)
				if err != nil {
					return err
				}
				b := boxOf(s)
				return o.Print(cli.Out(c), b, func(p *cli.Page) error { return p.Table(hostRows(b, len(b.Hosts))) })
			}
			states, err := sandbox.States()
			if err != nil {
				return err
			}
			boxes := []box{}
			for _, s := range states {
				boxes = append(boxes, boxOf(s))
			}
			if len(boxes) == 0 {
				c.PrintErrln("no sandbox is there; to start one: fairlead sandbox up DIR")
			}
			return o.Print(cli.Out(c), boxes, func(p *cli.Page) error { return p.Table(boxRows(boxes)) })
		},
	}
	name.add(c)
	o.Add(c)
	return c
}

// boxRows is a line for each sandbox.
func boxRows(boxes []box) [][]string {
	rows := [][]string{{"NAME", "STATE", "NODES", "PODS", "AGENTS READY", "RESTARTS", "SINCE", "FOLDER"}}
	for _, b := range boxes {
		count := map[sandbox.Role]int{}
		for _, h := range b.Hosts {
			count[h.Role]++
		}
		ready, restarts, since, follows := "-", "-", "-", "-"
		if d := b.Daemon; d != nil {
			n, r := 0, 0
			for _, a := range d.Agents {
				r += a.Restarts
				if a.State == daemon.Ready {
					n++
				}
			}
			ready, restarts = fmt.Sprintf("%d of %d", n, len(d.Agents)), strconv.Itoa(r)
			since, follows = d.Since.Format(time.DateTime), d.Follows
		}
		rows = append(rows, []string{b.Name, b.state(), strconv.Itoa(count[sandbox.Node]), strconv.Itoa(count[sandbox.Pod]),
			ready, restarts, since, follows})
	}
	return rows
}

// state states in a few words how a sandbox is.
func (b box) state() string {
	switch {
	case !b.Alive:
		return "left over"
	case b.Daemon == nil:
		return fmt.Sprintf("up, in process %d", b.PID)
	case b.Daemon.Problem != "":
		return "up, not following: " + b.Daemon.Problem
	}
	return "up"
}

// hostRows is a line for each of up to most hosts.
func hostRows(b box, most int) [][]string {
	rows := [][]string{{"HOST", "ROLE", "ON", "ADDRESSES", "NAMESPACE", "STATE"}}
	for i, h := range b.Hosts {
		if i == most {
			return append(rows, []string{fmt.Sprintf("and %d more: fairlead sandbox ls --name %s", len(b.Hosts)-most, b.Name)})
		}
		var addrs []string
		for _, a := range h.Addresses {
			addrs = append(addrs, a.String())
		}
		on := "-"
		if h.Role == sandbox.Pod {
			on = h.Node
		}
		rows = append(rows, []string{h.Short(), string(h.Role), on, strings.Join(addrs, ", "), h.Namespace, b.hostState(h)})
	}
	return rows
}

// hostState is the sandbox's state, or for a node with an agent the agent's.
func (b box) hostState(h sandbox.Host) string {
	if b.Daemon == nil || h.Role != sandbox.Node || !b.Alive {
		return b.state()
	}
	for _, a := range b.Daemon.Agents {
		switch {
		case a.Node == h.Node && a.Restarts > 0:
			return fmt.Sprintf("agent %s, %d restarts, the last after %s", a.State, a.Restarts, a.Error)
		case a.Node == h.Node:
			return "agent " + a.State
		}
	}
	return b.state()
}

func sandboxExec() *cobra.Command {
	var name boxFlag
	c := &cobra.Command{
		Use:   "exec HOST [-- COMMAND [ARGUMENT...]]",
		Short: "Run a command, or a shell, in the network of one host",
		Long: `Run a command, or a shell, in the network of one host: a node's name, a pod (namespace/name) or "outside".

FAIRLEAD_SOURCE is set to the folder of manifests, FAIRLEAD_NODE to the node that the host is or runs on,
FAIRLEAD_POLICY_MODE to Enforce and FAIRLEAD_RUN_FOLDER to the folder of its agent, so that other fairlead commands
know them. This program is found there by its name.`,
		Example: `  fairlead sandbox exec shop/client -- curl -s http://10.96.0.10
  fairlead sandbox exec a -- fairlead show`,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: name.completeHost(1),
		RunE: func(c *cobra.Command, args []string) error {
			b, h, err := enterable(c, name, args[0])
			if err != nil {
				return err
			}
			command := args[1:]
			if len(command) > 0 && command[0] == "--" {
				command = command[1:]
			}
			if len(command) == 0 {
				command = []string{cmp.Or(os.Getenv("SHELL"), "/bin/sh")}
			}
			if err := findSelf(); err != nil {
				return err
			}
			env := append(os.Environ(), "FAIRLEAD_NODE="+h.Node, config.EnvPolicyMode+"="+string(config.PoliciesEnforce))
			if b.Daemon != nil {
				env = append(env, "FAIRLEAD_SOURCE="+b.Daemon.Follows,
					config.EnvRunFolder+"="+daemon.AgentFolder(b.Name, h.Node))
			}
			return become(h, command, env)
		},
	}
	name.add(c)
	c.Flags().SetInterspersed(false)
	return c
}

// findSelf has this program found by its name, ahead of another one of that name.
func findSelf() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return os.Setenv("PATH", filepath.Dir(self)+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// enterable finds a host of the sandbox, for root.
func enterable(c *cobra.Command, name boxFlag, host string) (b box, h sandbox.Host, err error) {
	if err := needRoot(c); err != nil {
		return b, h, err
	}
	s, err := daemon.Pick(string(name))
	if err != nil {
		return b, h, err
	}
	h, err = s.Host(host)
	return boxOf(s), h, err
}

// become replaces this process by the command, inside the host's network namespace and cgroup.
func become(h sandbox.Host, command, env []string) error {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return err
	}
	if h.Cgroup != "" {
		if err := cgroup.Enter(h.Cgroup); err != nil {
			return err
		}
	}
	ns, err := netns.Open(h.Namespace)
	if err != nil {
		return err
	}
	if err := ns.Enter(); err != nil {
		return err
	}
	return fmt.Errorf("run %s: %w", path, syscall.Exec(path, command, env))
}

func sandboxProbe() *cobra.Command {
	var name boxFlag
	var o cli.Output
	var from string
	var count int
	var timeout time.Duration
	c := &cobra.Command{
		Use:   "ask FROM TO:PORT[/PROTOCOL]",
		Short: "Connect from a host to an address, and print which pod answered",
		Long: `Connect from a host to an address, and print which pod answered and which source address it saw. Each request
is a new connection, or for UDP a new source port.

FROM is a node's name, a pod (namespace/name) or "outside". TO is an address, a Service (web, shop/web, web.shop),
a pod or a node's name, with a port by number or name. PROTOCOL is tcp, udp or sctp; without it that of the
Service's port, else tcp.`,
		Example: `  fairlead sandbox ask shop/client shop/web:http
  fairlead sandbox ask outside a:30080 --count 20
  fairlead sandbox ask shop/client '[fd00:96::12]:53/udp'`,
		Args: cobra.ExactArgs(2), ValidArgsFunction: name.completeHost(2),
		RunE: func(c *cobra.Command, args []string) error {
			b, h, err := enterable(c, name, args[0])
			if err != nil {
				return err
			}
			to, err := b.destination(args[1])
			if err != nil {
				return err
			}
			local, err := localAddress(from)
			if err != nil {
				return fmt.Errorf("--from %q: %w", from, err)
			}
			replies, err := probeAll(c.Context(), h, to, echo.Options{From: local}, max(count, 1), timeout)
			if err != nil {
				return err
			}
			if err := o.Print(cli.Out(c), replies,
				func(p *cli.Page) error { return p.Table(replyRows(replies)) }); err != nil {
				return err
			}
			return unanswered(replies)
		},
	}
	name.add(c)
	o.Add(c)
	c.Flags().StringVar(&from, "from", "", "source ADDRESS, ADDRESS:PORT or :PORT")
	c.Flags().IntVarP(&count, "count", "n", 1, "number of requests")
	c.Flags().DurationVar(&timeout, "timeout", 2*time.Second, "timeout of each request")
	return c
}

// destination reads TO as "explain" does, with the objects that the sandbox follows.
func (b box) destination(to string) (verdict.Packet, error) {
	var names reachability.Names
	if b.Daemon != nil {
		objects, _, err := manifest.Load(b.Daemon.Follows)
		if err != nil {
			return verdict.Packet{}, err
		}
		names = objects
	}
	return names.Packet(reachability.Outside, to)
}

// localAddress reads "ADDRESS", "ADDRESS:PORT" or ":PORT".
func localAddress(text string) (netip.AddrPort, error) {
	if text == "" {
		return netip.AddrPort{}, nil
	}
	if a, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return netip.AddrPortFrom(a, 0), nil
	}
	if port, ok := strings.CutPrefix(text, ":"); ok {
		n, err := strconv.ParseUint(port, 10, 16)
		return netip.AddrPortFrom(netip.Addr{}, uint16(n)), err
	}
	return netip.ParseAddrPort(text)
}

// reply is one answer, or why there is none.
type reply struct {
	*echo.Reply
	Error string `json:"error,omitempty"`
}

// probeAll queries so many times.
func probeAll(ctx context.Context, h sandbox.Host, to verdict.Packet, o echo.Options, count int,
	timeout time.Duration) (replies []reply, err error) {
	for range count {
		var a echo.Reply
		err := h.Do(func() (err error) {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			a, err = echo.Request(ctx, to.Protocol, to.Dst, o)
			return err
		})
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			replies = append(replies, reply{Error: err.Error()})
		default:
			replies = append(replies, reply{Reply: &a})
		}
	}
	return replies, nil
}

// unanswered makes an error of questions without an answer.
func unanswered(replies []reply) error {
	n := len(slices.DeleteFunc(slices.Clone(replies), func(r reply) bool { return r.Error == "" }))
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d requests were not answered", n, len(replies))
}

// replyRows is a line for the one answer, or for each who answered, the most frequent first.
func replyRows(replies []reply) [][]string {
	times := map[string]int{}
	example := map[string][]string{}
	for _, r := range replies {
		who, row := "-", []string{"no answer", "-", r.Error}
		if r.Reply != nil {
			who = r.Pod
			row = []string{r.Pod, fmt.Sprintf("%s/%s", r.Server, r.Proto), r.Client.String()}
		}
		times[who]++
		example[who] = row
	}
	names := cli.SortedKeys(times)
	slices.SortStableFunc(names, func(a, b string) int { return times[b] - times[a] })
	rows := [][]string{{"REQUESTS", "ANSWERED BY", "AT", "SOURCE SEEN"}}
	for _, n := range names {
		rows = append(rows, append([]string{strconv.Itoa(times[n])}, example[n]...))
	}
	return rows
}

func sandboxDown() *cobra.Command {
	var all bool
	var name boxFlag
	c := &cobra.Command{
		Use:   "down",
		Short: "Take sandboxes down, also those that a killed process left over",
		Args:  cobra.ArbitraryArgs, ValidArgsFunction: completeSandbox,
		RunE: func(c *cobra.Command, names []string) error {
			if err := needRoot(c); err != nil {
				return err
			}
			if name != "" {
				names = append(names, string(name)) // names without --name are accepted, too
			}
			names, err := downNames(names, all)
			errs := []error{err}
			for _, n := range names {
				err := daemon.Stop(c.Context(), n)
				if err == nil {
					fmt.Fprintf(cli.Out(c), "sandbox %s is down\n", n)
				}
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		},
	}
	name.add(c)
	c.Flags().BoolVar(&all, "all", false, "all sandboxes that were started with up or left over")
	return c
}

// downNames returns the sandboxes that are meant: those named, all, or the only one.
func downNames(names []string, all bool) ([]string, error) {
	if len(names) > 0 && all {
		return nil, errors.New("use either --name or --all")
	}
	if len(names) > 0 {
		return names, nil
	}
	if !all {
		s, err := daemon.Pick("")
		if err != nil {
			return nil, err
		}
		return []string{s.Name}, nil
	}
	states, err := daemon.All()
	for _, s := range states {
		names = append(names, s.Name)
	}
	return names, err
}

func sandboxGenerate() *cobra.Command {
	var services, endpoints, perFile int
	c := &cobra.Command{
		Use:     "generate DIR",
		Short:   "Write the manifests of a large cluster into a new folder",
		Example: `  fairlead sandbox generate --services 10000 --endpoints 10 /tmp/large`,
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if err := generate.Check(services, endpoints); err != nil {
				return err
			}
			objects := generate.Cluster(services, endpoints)
			if err := generate.Write(args[0], objects, perFile); err != nil {
				return err
			}
			_, err := fmt.Fprintf(cli.Out(c), "%s: Node a and %d Services with %d endpoints each, %d objects\n", args[0],
				services, endpoints, len(objects))
			return err
		},
	}
	c.Flags().IntVar(&services, "services", 1000, "how many Services")
	c.Flags().IntVar(&endpoints, "endpoints", 10, "how many endpoints each Service has")
	c.Flags().IntVar(&perFile, "per-file", 500, "how many objects to a file")
	return c
}
