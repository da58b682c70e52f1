package cri

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/ipam"
	"fairlead.dev/fairlead/kernel/child"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/sandbox/kubernetes"
)

// The network is ready while the agent runs, but neither without it nor while the kernel refuses what it needs. Pods
// have the addresses that the agent recorded, which are free once the pods have gone: stopped with and without the
// agent, and lost with the runtime.
func TestContainerd(t *testing.T) {
	n := newNode(t)
	n.awaitNetwork(false, "cni plugin not initialized") // nothing has written a configuration
	agent := n.startAgent()
	n.awaitNetwork(true, "")
	first, second := n.run("first"), n.run("second")
	n.holds(first, second)
	n.stop(first)
	n.holds(second)

	release := n.occupy("inet fairlead-masquerade")
	n.awaitNetwork(false, "pods are not connected")
	n.failed(cni.CodeLimited)
	release()
	n.awaitNetwork(true, "")

	agent.Kill()
	n.awaitNetwork(false, "the Fairlead agent of this node doesn't answer")
	n.failed(cni.CodeUnavailable)
	n.reached(second)
	n.stop(second)
	n.holds()

	n.startAgent()
	n.awaitNetwork(true, "")
	n.holds(n.run("lost"))
	n.runtime.Kill() // with all its pods, for which no DEL comes
	n.holds()
	called := map[string]int{}
	for _, c := range n.calls() {
		called[c.command]++
	}
	t.Logf("containerd called %v", called)
	if called[cni.Add] != 3 || called[cni.Del] < 2 || called[cni.Status] == 0 {
		t.Errorf("containerd called %v", called)
	}
	if called[cni.GC] > 0 {
		t.Errorf("containerd calls GC now, contrary to what doc.go and docs/network.md state")
	}
}

// node is a node with an agent and a container runtime.
type node struct {
	*testing.T
	*netns.Namespace
	folder  string
	runtime *child.Process
	cri     runtime.RuntimeServiceClient
}

// pod is a pod that runs, by the CRI.
type pod struct {
	name, sandbox string
	addresses     []netip.Addr
}

// config is containerd's configuration, with its socket, the pause image and the folders of plugins and of network
// configurations.
const config = `version = 3
[grpc]
  address = %q
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = %q
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = [%q]
    conf_dir = %q
    use_internal_loopback = true
`

// recorder is the plugin for the runtime: it runs fairlead-cni and writes a line for each call.
const recorder = `#!/bin/sh
out=$(%s)
code=$?
echo "$CNI_COMMAND" $out >> %s
printf '%%s\n' "$out"
exit $code
`

// objects are those of the node.
const objects = `{apiVersion: v1, kind: Node, metadata: {name: a},
 spec: {podCIDRs: [10.244.1.0/24, "fd00:1::/64"]},
 status: {addresses: [{type: InternalIP, address: 192.168.0.1}]}}
`

// newNode starts containerd on a node without an agent.
func newNode(t *testing.T) *node {
	n := &node{T: t, Namespace: netnstest.New(t), folder: t.TempDir()}
	wire := netnstest.New(t)
	for _, c := range []string{"link add eth0 type veth peer name x netns " + wire.Name,
		"address add 192.168.0.1/24 dev eth0", "link set eth0 up", "link set lo up"} {
		n.command("ip", append([]string{"-n", n.Name}, strings.Fields(c)...)...)
	}
	for _, f := range []string{"net.d", "bin", "objects"} {
		n.check(os.Mkdir(n.path(f), 0o755))
	}
	n.check(os.WriteFile(n.path("objects/node.yaml"), []byte(objects), 0o644))
	plugin := fmt.Sprintf(recorder, built(t, "FAIRLEAD")+"-cni", n.path("calls"))
	n.check(os.WriteFile(n.path("bin/fairlead-cni"), []byte(plugin), 0o755))

	folder := built(t, "CONTAINERD")
	name := fmt.Sprintf("cri%d", os.Getpid())
	file := kubernetes.File{Path: "/etc/containerd/config.toml", Mode: 0o644, Text: fmt.Sprintf(config,
		n.path("containerd.sock"), kubernetes.PauseImage, n.path("bin"), n.path("net.d"))}
	machine, err := json.Marshal(kubernetes.Machine{
		Name: "a", Dir: n.path("machine"), Cgroup: "fairlead-" + name + "-a", Files: []kubernetes.File{file},
		Path:     folder + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		Programs: []kubernetes.Program{{Name: "containerd", Args: []string{filepath.Join(folder, "containerd")}}},
	})
	n.check(err)
	n.check(os.Mkdir(n.path("machine"), 0o755))
	t.Cleanup(func() { n.check(kubernetes.Remove(name, n.path("machine"))) })
	t.Cleanup(n.printLogs)
	n.runtime = n.start("machine/machine.log", exec.Command(built(t, "FAIRLEAD"), "cluster", "machine", string(machine)))

	c, err := grpc.NewClient("unix://"+n.path("containerd.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	n.check(err)
	t.Cleanup(func() { c.Close() })
	n.cri = runtime.NewRuntimeServiceClient(c)
	n.until("containerd serves the CRI", func(ctx context.Context) error {
		_, err := n.cri.Version(ctx, &runtime.VersionRequest{})
		return err
	})
	n.check(kubernetes.WritePauseImage(n.path("pause.tar")))
	n.command(filepath.Join(folder, "ctr"), "--address", n.path("containerd.sock"), "--namespace", "k8s.io", "images",
		"import", n.path("pause.tar"))
	return n
}

// path returns the path of a file in the test's folder.
func (n *node) path(name string) string { return filepath.Join(n.folder, name) }

// start starts a program on the node that ends with the test.
func (n *node) start(log string, c *exec.Cmd) *child.Process {
	n.Helper()
	out, err := os.OpenFile(n.path(log), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	n.check(err)
	defer out.Close()
	c.Stdout, c.Stderr, c.Dir = out, out, "/"
	p, err := child.Start(c, n.Do)
	n.check(err)
	n.Cleanup(func() { p.End(10 * time.Second) })
	return p
}

// startAgent starts the node's agent.
func (n *node) startAgent() *child.Process {
	n.Helper()
	return n.start("agent.log", exec.Command(built(n.T, "FAIRLEAD"), "run", "--node", "a", "--mode", "nftables",
		"--source", n.path("objects"), "--policy-mode", "Ignore", "--network-mode", "Own",
		"--network-cni-folder", n.path("net.d"), "--network-run-folder", n.path("run")))
}

// awaitNetwork waits until the runtime reports whether the network is ready, with a message that contains a text.
func (n *node) awaitNetwork(ready bool, text string) {
	n.Helper()
	n.until(fmt.Sprintf("NetworkReady is %v", ready), func(ctx context.Context) error {
		r, err := n.cri.Status(ctx, &runtime.StatusRequest{})
		if err != nil {
			return err
		}
		for _, c := range r.Status.Conditions {
			if c.Type == runtime.NetworkReady && c.Status == ready && strings.Contains(c.Message, text) {
				n.Log(c)
				return nil
			}
		}
		return fmt.Errorf("conditions are %v", r.Status.Conditions)
	})
}

// failed checks that the runtime's last call of the plugin was a STATUS that failed with a code.
func (n *node) failed(code uint) {
	n.Helper()
	l := n.calls()
	if last := l[len(l)-1]; last.command != cni.Status || last.failure.Code != code {
		n.Errorf("the runtime called %s last and got code %d, want %d", last.command, last.failure.Code, code)
	}
}

// occupy puts a table of nf_tables in place of the agent's that a process owns, so that the kernel refuses the agent's
// changes, until release.
func (n *node) occupy(table string) (release func()) {
	n.Helper()
	c := exec.Command("nft", "-i")
	in, err := c.StdinPipe()
	n.check(err)
	p := n.start("nft.log", c)
	_, err = fmt.Fprintf(in, "delete table %[1]s; add table %[1]s { flags owner; }\n", table)
	n.check(err)
	return p.Kill
}

// run runs a pod and returns it with its addresses.
func (n *node) run(name string) pod {
	n.Helper()
	ctx, stop := context.WithTimeout(n.Context(), 2*time.Minute)
	defer stop()
	meta := &runtime.PodSandboxMetadata{Name: name, Namespace: "shop", Uid: name}
	r, err := n.cri.RunPodSandbox(ctx, &runtime.RunPodSandboxRequest{Config: &runtime.PodSandboxConfig{Metadata: meta,
		Linux: &runtime.LinuxPodSandboxConfig{}}})
	n.check(err)
	s, err := n.cri.PodSandboxStatus(ctx, &runtime.PodSandboxStatusRequest{PodSandboxId: r.PodSandboxId})
	n.check(err)
	p := pod{name: "shop/" + name, sandbox: r.PodSandboxId}
	for _, text := range append([]string{s.Status.Network.Ip}, ips(s.Status.Network.AdditionalIps)...) {
		a, err := netip.ParseAddr(text)
		n.check(err)
		p.addresses = append(p.addresses, a)
	}
	n.reached(p)
	return p
}

func ips(l []*runtime.PodIP) (texts []string) {
	for _, ip := range l {
		texts = append(texts, ip.Ip)
	}
	return texts
}

// reached checks that the node reaches a pod: nothing listens there, which the pod's kernel reports.
func (n *node) reached(p pod) {
	n.Helper()
	for _, a := range p.addresses {
		err := n.Do(func() error {
			_, err := net.DialTimeout("tcp", netip.AddrPortFrom(a, 9).String(), 10*time.Second)
			return err
		})
		if !errors.Is(err, syscall.ECONNREFUSED) {
			n.Errorf("connect to pod %s: %v, want %v", p.name, err, syscall.ECONNREFUSED)
		}
	}
}

// stop stops and removes a pod.
func (n *node) stop(p pod) {
	n.Helper()
	ctx, stop := context.WithTimeout(n.Context(), 2*time.Minute)
	defer stop()
	_, err := n.cri.StopPodSandbox(ctx, &runtime.StopPodSandboxRequest{PodSandboxId: p.sandbox})
	n.check(err)
	_, err = n.cri.RemovePodSandbox(ctx, &runtime.RemovePodSandboxRequest{PodSandboxId: p.sandbox})
	n.check(err)
}

// holds waits until the agent's records and the node's devices are those of pods.
func (n *node) holds(pods ...pod) {
	n.Helper()
	n.until(fmt.Sprintf("the node holds %d pods", len(pods)), func(context.Context) error {
		files, err := filepath.Glob(n.path("run/attachments/attachment-*"))
		n.check(err)
		var got, want []string
		for _, f := range files {
			var r ipam.Record
			text, err := os.ReadFile(f)
			if err = errors.Join(err, json.Unmarshal(text, &r)); err != nil {
				return err
			}
			got = append(got, fmt.Sprint(cni.Device(r.ID), " ", r.Pod, " ", r.Addresses))
		}
		for _, p := range pods {
			device := cni.Device(cni.Key(p.sandbox, "eth0"))
			want = append(want, fmt.Sprint(device, " ", p.name, " ", p.addresses))
		}
		slices.Sort(got)
		slices.Sort(want)
		devices := strings.Count(n.command("ip", "-n", n.Name, "-o", "link", "show", "type", "veth"),
			": "+cni.DevicePrefix)
		if !slices.Equal(got, want) || devices != len(pods) {
			return fmt.Errorf("there are %d devices, and records of %q, want %q", devices, got, want)
		}
		return nil
	})
}

// call is what the runtime called the plugin for, and with which error that replied.
type call struct {
	command string
	failure cni.Error
}

// calls returns the runtime's calls of the plugin.
func (n *node) calls() (l []call) {
	n.Helper()
	text, err := os.ReadFile(n.path("calls"))
	n.check(err)
	for line := range strings.Lines(string(text)) {
		var c call
		var out string
		c.command, out, _ = strings.Cut(strings.TrimSpace(line), " ")
		json.Unmarshal([]byte(out), &c.failure) // a result has no code
		l = append(l, c)
	}
	return l
}

// command runs a program and returns what it prints.
func (n *node) command(program string, args ...string) string {
	n.Helper()
	out, err := exec.CommandContext(n.Context(), program, args...).CombinedOutput()
	if err != nil {
		n.Fatalf("%s %q: %v: %s", program, args, err, out)
	}
	return string(out)
}

// until tries until there is no error.
func (n *node) until(what string, try func(context.Context) error) {
	n.Helper()
	begin := time.Now()
	ctx, stop := context.WithTimeout(n.Context(), 2*time.Minute)
	defer stop()
	for {
		err := try(ctx)
		if err == nil {
			n.Logf("%s after %s", what, time.Since(begin).Round(10*time.Millisecond))
			return
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			n.Fatalf("it never came to be that %s: %v", what, err)
		}
	}
}

// printLogs prints the ends of all logs of a test that failed.
func (n *node) printLogs() {
	if !n.Failed() {
		return
	}
	files, _ := filepath.Glob(n.path("machine/*.log"))
	for _, f := range append(files, n.path("agent.log"), n.path("nft.log"), n.path("calls")) {
		text, _ := os.ReadFile(f)
		n.Logf("%s: %s", f, text[max(0, len(text)-4000):])
	}
}

func (n *node) check(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// built returns a path that the Makefile has in a variable.
func built(t *testing.T, variable string) string {
	t.Helper()
	path := os.Getenv(variable)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%s must be a path: %v: run `make test-containerd`, which builds what is there", variable, err)
	}
	return path
}
