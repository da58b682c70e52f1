package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/controlplane"
	"fairlead.dev/fairlead/source"
)

// Programs are paths of what a cluster runs.
type Programs struct {
	ControlPlane string // etcd and kube-apiserver, by its first argument
	Node         string // kubelet, kube-controller-manager and kube-scheduler, by its first argument
	Containerd   string // the folder of containerd, containerd-shim-runc-v2 and ctr
	CoreDNS      string
	Runc         string
	Agent        string // fairlead
	Plugin       string // fairlead-cni
	Bridge       string // with Options.Bridge: the folder of the CNI plugins bridge and host-local
	KubeProxy    string // with Options.KubeProxy
}

// Options say what cluster to make.
type Options struct {
	Name   string // of the sandbox that it stands in
	Nodes  int
	Dir    string   // absolute path of a folder that exists, not below /run: all that the cluster writes
	Images []string // archives that every node takes in
	Agent  []string // further flags of every node's agent
	// Bridge has the CNI plugins bridge and host-local connect pods, and routes of the cluster's own lead to other nodes.
	Bridge bool
	// KubeProxy has kube-proxy serve Services, with iptables, and no agent run. Only with Bridge.
	KubeProxy bool
	// Bare has nothing connect pods or serve Services until it is installed: Nodes come up, but are not ready.
	Bare     bool
	Programs Programs
	Progress func(step string) // called after each step with the seconds since the start and its name
}

// Cluster is a cluster that is up.
type Cluster struct {
	Options
	Plane *controlplane.Plane

	box      *sandbox.Cluster
	machines []*running
	listener net.Listener // on this machine's loopback, in front of the API server
}

// pods and wire are where pods and nodes have their addresses.
var (
	pods = []netip.Prefix{netip.MustParsePrefix("10.128.0.0/16")}
	wire = netip.MustParseAddr("172.18.0.10")
)

// Up makes a cluster and returns once every Node and DNS are ready, with Options.Bare once every Node is known. After
// an error nothing is left.
func Up(ctx context.Context, o Options) (*Cluster, error) {
	c := &Cluster{Options: o}
	began := time.Now()
	nodes, dns := "nodes ready", "DNS ready"
	if o.Bare {
		nodes, dns = "nodes registered, not ready without a network", "DNS installed, pending without a network"
	}
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"network namespaces", c.build},
		{"control plane", c.control},
		{"nodes start", c.boot},
		{nodes, c.ready},
		{dns, c.startDNS},
	} {
		if err := step.do(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("cluster %s: %s: %w", o.Name, step.name, err), c.Down())
		}
		o.Progress(fmt.Sprintf("%5.1fs  %s", time.Since(began).Seconds(), step.name))
	}
	return c, nil
}

// build makes the network namespaces of nodes and of the control plane.
func (c *Cluster) build(ctx context.Context) (err error) {
	var nodes []source.Object
	at := wire
	for i := range c.Nodes {
		at = at.Next()
		nodes = append(nodes, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: nodeName(i)},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: at.String()}}},
		})
	}
	onOneLink := func(string) string { return "" } // there are no Pods that the sandbox would connect
	c.box, err = sandbox.Up(ctx, sandbox.Options{Name: c.Name, Objects: nodes, CNI: onOneLink})
	return err
}

// nodeName is a, b, c and so on, then n26, n27.
func nodeName(i int) string {
	if i < 26 {
		return string(rune('a' + i))
	}
	return fmt.Sprintf("n%d", i)
}

// control starts the control plane, writes the administrator's kubeconfig and listens for it.
func (c *Cluster) control(ctx context.Context) (err error) {
	external := c.box.External()
	dir := filepath.Join(c.Dir, "control-plane")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	o := controlplane.Options{Program: c.Programs.ControlPlane, Node: c.Programs.Node, Host: external,
		Address: external.Addresses[0], Dir: dir, Pods: pods}
	if c.Bridge {
		o.Pods = nil // nodes have theirs by their plugin's configuration
	}
	c.Plane, err = controlplane.Start(ctx, o)
	if err != nil {
		return err
	}
	if c.listener, err = net.Listen("tcp4", "127.0.0.1:0"); err != nil {
		return err
	}
	go c.forward()
	here := netip.MustParseAddrPort(c.listener.Addr().String())
	text, err := c.Plane.KubeconfigAt(here, "admin", "system:masters")
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(c.Kubeconfig(), text, 0o600), c.Plane.StartManager())
}

// Kubeconfig is the path of the administrator's kubeconfig, for use on this machine.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.Dir, "kubeconfig") }

// forward passes connections on to the API server, which listens in a namespace that nothing else of this machine
// reaches.
func (c *Cluster) forward() {
	for {
		near, err := c.listener.Accept()
		if err != nil {
			return // it is closed
		}
		go func() {
			defer near.Close()
			var far net.Conn
			err := c.box.External().Do(func() (err error) {
				far, err = net.Dial("tcp", netip.AddrPortFrom(c.Plane.Address, controlplane.First).String())
				return err
			})
			if err != nil {
				return
			}
			defer far.Close()
			var both sync.WaitGroup
			pass := func(to, from net.Conn) {
				io.Copy(to, from)
				to.(*net.TCPConn).CloseWrite()
			}
			both.Go(func() { pass(far, near) })
			both.Go(func() { pass(near, far) })
			both.Wait()
		}()
	}
}

// boot starts the machines, all at once.
func (c *Cluster) boot(context.Context) error {
	if c.Bridge {
		if err := c.connect(); err != nil {
			return err
		}
	}
	pause, dns := filepath.Join(c.Dir, "pause.tar"), filepath.Join(c.Dir, "coredns.tar")
	server, err := os.ReadFile(c.Programs.CoreDNS)
	if err != nil {
		return err
	}
	if err := errors.Join(WritePauseImage(pause), WriteImage(dns, dnsImage, server)); err != nil {
		return err
	}
	for i := range c.Nodes {
		name := nodeName(i)
		h, err := c.box.Node(name)
		if err != nil {
			return err
		}
		m, err := c.machine(i, h.Addresses[0], append([]string{pause, dns}, c.Images...))
		if err != nil {
			return err
		}
		r, err := start(h, m)
		if err != nil {
			return err
		}
		c.machines = append(c.machines, r)
	}
	return nil
}

// ready waits until each Node is, or is known with Options.Bare.
func (c *Cluster) ready(ctx context.Context) error {
	return c.await(ctx, "not all Nodes are ready", func() (bool, error) {
		known, ready, err := c.countNodes(ctx)
		if c.Bare {
			ready = known
		}
		return ready == c.Nodes, err
	})
}

// await waits until done returns true. It returns an error, with what is otherwise, where a machine ends or three
// minutes pass before.
func (c *Cluster) await(ctx context.Context, otherwise string, done func() (bool, error)) error {
	ctx, stop := context.WithTimeout(ctx, 3*time.Minute)
	defer stop()
	for {
		ok, err := done()
		if ok {
			return nil
		}
		for _, m := range c.machines {
			select {
			case <-m.process.Ended():
				return fmt.Errorf("machine %s ended: %w\n%s", m.Name, m.process.Err(), m.logs())
			default:
			}
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			err = fmt.Errorf("%s: %w", otherwise, errors.Join(ctx.Err(), err))
			for _, m := range c.machines {
				err = fmt.Errorf("%w\n%s", err, m.logs())
			}
			return err
		}
	}
}

func (c *Cluster) countNodes(ctx context.Context) (known, ready int, err error) {
	var list corev1.NodeList
	err = c.Plane.Call(ctx, controlplane.First, http.MethodGet, "/api/v1/nodes", nil, &list)
	for _, node := range list.Items {
		for _, k := range node.Status.Conditions {
			if k.Type == corev1.NodeReady && k.Status == corev1.ConditionTrue {
				ready++
			}
		}
	}
	return len(list.Items), ready, err
}

// Down removes the cluster and all that it wrote.
func (c *Cluster) Down() error {
	var errs []error
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, m := range c.machines {
		all.Go(func() {
			err := m.stop()
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		})
	}
	all.Wait()
	if c.listener != nil {
		c.listener.Close()
	}
	if c.Plane != nil {
		c.Plane.Close()
	}
	if c.box != nil {
		errs = append(errs, c.box.Down())
	}
	return errors.Join(errors.Join(errs...), remove(c.Dir))
}
