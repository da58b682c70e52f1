package test_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/kernel/child"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

var endure = flag.Duration("endure", 6*time.Second, "how long pods come and go while the agent is killed")

// attaching is a node with an agent that is killed while pods come and go, 30 a second.
type attaching struct {
	testing.TB
	node           *netns.Namespace
	folder, plugin string
	config         []byte
	mode           string // network.mode
	flags          []string

	mu     sync.Mutex
	owners map[string]string // of addresses
	added  int
	again  int // ADDs that were to be tried again
}

// startAgent starts the node's agent, which ends with the test.
func (a *attaching) startAgent() *child.Process {
	a.Helper()
	c := exec.Command(fairlead, "run", "--node", "a", "--mode", "nftables", "--source", filepath.Join(a.folder, "objects"),
		"--network-mode", a.mode, "--network-cni-folder", a.folder, "--network-run-folder", a.folder)
	c.Args = append(c.Args, a.flags...)
	c.Dir = "/"
	p, err := child.Start(c, a.node.Do)
	if err != nil {
		a.Fatal(err)
	}
	return p
}

// call runs the plugin for a pod as a runtime does.
func (a *attaching) call(command string, pod *netns.Namespace) (out []byte, err error) {
	var b bytes.Buffer
	c := exec.Command(a.plugin)
	c.Stdin, c.Stdout, c.Dir = bytes.NewReader(a.config), &b, "/"
	c.Env = []string{"CNI_COMMAND=" + command, "CNI_CONTAINERID=" + pod.Name, "CNI_IFNAME=eth0", "CNI_PATH=/",
		"CNI_ARGS=K8S_POD_NAMESPACE=shop;K8S_POD_NAME=" + pod.Name,
		"CNI_NETNS=" + filepath.Join(netns.Dir, pod.Name)}
	err = a.node.Do(c.Run)
	return b.Bytes(), err
}

// add connects a pod, which may take several tries, checks that no other one has its addresses, and returns them.
func (a *attaching) add(pod *netns.Namespace) (addresses []netip.Addr) {
	for deadline := time.Now().Add(2 * time.Minute); ; {
		out, err := a.call("ADD", pod)
		var result cni.Result
		if err == nil {
			err = json.Unmarshal(out, &result)
		}
		a.mu.Lock()
		if err == nil {
			a.added++
			for _, ip := range result.IPs {
				key := ip.Address.String()
				if other := a.owners[key]; other != "" {
					a.Errorf("%s is %s's and %s's", key, other, pod.Name)
				}
				a.owners[key] = pod.Name
				addresses = append(addresses, ip.Address.Addr())
			}
			if len(result.IPs) != 2 {
				a.Errorf("%s has addresses %v", pod.Name, result.IPs)
			}
			a.mu.Unlock()
			return addresses
		}
		a.again++
		a.mu.Unlock()
		failure := cni.Error{}
		if json.Unmarshal(out, &failure) != nil || failure.Code != cni.CodeTryAgain || time.Now().After(deadline) {
			a.Errorf("ADD of %s: %v: %s", pod.Name, err, out)
			return nil
		}
	}
}

func (a *attaching) del(pod *netns.Namespace) {
	a.mu.Lock()
	for key, owner := range a.owners {
		if owner == pod.Name {
			delete(a.owners, key)
		}
	}
	a.mu.Unlock()
	if out, err := a.call("DEL", pod); err != nil {
		a.Errorf("DEL of %s: %v: %s", pod.Name, err, out)
	}
}

// all runs f for pods, all at once, and waits.
func all(pods []*netns.Namespace, f func(*netns.Namespace)) {
	var wg sync.WaitGroup
	for _, pod := range pods {
		wg.Go(func() { f(pod) })
	}
	wg.Wait()
}

func newAttaching(t testing.TB) *attaching {
	a := &attaching{TB: t, node: netnstest.New(t), folder: t.TempDir(), owners: map[string]string{}, mode: "Own"}
	a.plugin = filepath.Join(t.TempDir(), "fairlead-cni")
	must(t, "go", "build", "-o", a.plugin, "../cmd/fairlead-cni")
	wire := netnstest.New(t)
	must(t, "ip", "-n", a.node.Name, "link", "add", "eth0", "type", "veth", "peer", "name", "x", "netns", wire.Name)
	must(t, "ip", "-n", a.node.Name, "addr", "add", "192.168.0.1/24", "dev", "eth0")
	must(t, "ip", "-n", a.node.Name, "link", "set", "eth0", "up")
	if err := os.Mkdir(filepath.Join(a.folder, "objects"), 0o755); err != nil {
		t.Fatal(err)
	}
	text := "apiVersion: v1\nkind: Node\nmetadata: {name: a}\nspec: {podCIDRs: [10.244.1.0/24, \"fd00:1::/64\"]}\n" +
		"status: {addresses: [{type: InternalIP, address: 192.168.0.1}]}\n"
	if err := os.WriteFile(filepath.Join(a.folder, "objects", "node.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	a.config = fmt.Appendf(nil, `{"cniVersion":"1.1.0","name":"fairlead","type":"fairlead-cni","socket":%q,"records":%q}`,
		filepath.Join(a.folder, "cni.sock"), filepath.Join(a.folder, "attachments"))
	return a
}

// TestPodsComeAndGoUnderKills has 110 pods on a node (20 in a short run), and 30 more a second come and go, while the
// agent is killed every five seconds (two). Then pods are deleted without the agent, and the others are lost in a
// reboot.
func TestPodsComeAndGoUnderKills(t *testing.T) {
	a := newAttaching(t)
	lasting, every := 20, 2*time.Second
	if *endure > time.Minute {
		lasting, every = 110, 5*time.Second
	}
	var pods []*netns.Namespace
	for range lasting + 60 {
		pods = append(pods, netnstest.New(t))
	}
	agent := a.startAgent()
	defer func() { agent.Kill() }()
	all(pods[:lasting], func(p *netns.Namespace) { a.add(p) })
	free := make(chan *netns.Namespace, len(pods))
	for _, pod := range pods[lasting:] {
		free <- pod
	}
	var running sync.WaitGroup
	kills, end := 0, time.After(*endure)
	kill, next := time.NewTicker(every), time.NewTicker(time.Second/30)
	for going := true; going; {
		select {
		case <-end:
			going = false
		case <-kill.C:
			agent.Kill()
			agent = a.startAgent()
			kills++
		case <-next.C:
			select {
			case pod := <-free:
				running.Go(func() { a.add(pod); a.del(pod); free <- pod })
			default: // 60 are on their way: the machine is behind
			}
		}
	}
	running.Wait()
	t.Logf("%d pods connected in %v, %d ADDs tried again, %d kills", a.added, *endure, a.again, kills)
	if kills < 2 || a.added < lasting+kills {
		t.Errorf("%d kills, %d pods", kills, a.added)
	}
	a.holds(lasting)
	agent.Kill()
	all(pods[:lasting/2], a.del) // by the plugin alone
	agent = a.startAgent()
	a.holds(lasting - lasting/2)
	agent.Kill()
	a.reboot(pods[lasting/2 : lasting])
	agent = a.startAgent()
	a.holds(0)
	all(pods[:lasting], func(p *netns.Namespace) { a.add(p) })
	a.holds(lasting)
	all(pods[:lasting], a.del)
	a.holds(0)
}

// holds waits until the node has so many pods' devices and records, the agent having found out what it was away for.
func (a *attaching) holds(pods int) {
	a.Helper()
	within(a.TB, time.Minute, fmt.Sprintf("%d pods have devices and records", pods), func() bool {
		records, err := filepath.Glob(filepath.Join(a.folder, "attachments", "attachment-*"))
		return err == nil && len(records) == pods && len(podDevices(a.TB, a.node.Name)) == pods
	})
}

// reboot leaves what a node has of pods after a boot, without an agent: their records, of the boot before.
func (a *attaching) reboot(pods []*netns.Namespace) {
	a.Helper()
	for _, pod := range pods {
		must(a.TB, "ip", "-n", pod.Name, "link", "delete", "eth0")
	}
	if err := os.WriteFile(filepath.Join(a.folder, "attachments", "boot"), []byte("another"), 0o600); err != nil {
		a.Fatal(err)
	}
	clear(a.owners)
}
