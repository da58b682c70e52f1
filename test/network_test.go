package test_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// writePod writes the manifest of a pod of the shop that serves port 8080.
func writePod(t *testing.T, dir, name, node string, ips ...string) {
	t.Helper()
	text := fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {namespace: shop, name: %s}\nspec:\n  nodeName: %s\n"+
		"  containers: [{name: x, ports: [{containerPort: 8080}]}]\nstatus:\n  phase: Running\n  podIP: %s\n  podIPs:\n",
		name, node, ips[0])
	for _, ip := range ips {
		text += fmt.Sprintf("    - ip: %q\n", ip)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// podDevices returns the devices of pods on a node of a sandbox.
func podDevices(t testing.TB, node string) []string {
	t.Helper()
	l := regexp.MustCompile(`\bfl[0-9a-f]{10}\b`).FindAllString(must(t, "ip", "-n", node, "-o", "link"), -1)
	slices.Sort(l)
	return slices.Compact(l)
}

// TestPodNetwork has a sandbox's pods connected by the plugin and the agents: on one link, and through VXLAN.
func TestPodNetwork(t *testing.T) {
	for network, device := range map[string]string{"own": "dev eth0", "own-apart": "dev fl-vxlan"} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			name, dir := boxOf(t, []string{"--network", network}, "--policy-mode", "Ignore")
			answered := func(from, to string) bool {
				_, err := try(fairlead, "sandbox", "ask", "--name", name, from, to)
				return err == nil
			}
			node := name + "-node-a"
			contains(t, must(t, "ip", "-n", node, "route"), "10.128.3.0/24 via ", device, "unreachable 10.128.1.0/24")
			for _, to := range []string{"10.128.1.10:8080", "10.128.3.10:8080", "[fd00:128:1::10]:8080",
				"[fd00:128:3::10]:8080"} {
				for _, from := range []string{"a", "b", "shop/client", "shop/web-1", "outside"} {
					if !answered(from, to) {
						t.Errorf("no answer from %s to %s", to, from)
					}
				}
			}
			contains(t, must(t, fairlead, "sandbox", "ask", "--name", name, "shop/client", "10.128.3.10:8080"),
				"10.128.2.99:") // the source that is seen
			if _, err := try(fairlead, "sandbox", "exec", "--name", name, "a", "--", fairlead, "clean",
				"--network"); err == nil {
				t.Error("clean --network took pods' network")
			}
			contains(t, must(t, onNode(name, "a", dir, "show", "network")...), "10.128.1.0/24", "250", "10.128.3.0/24", "c",
				"shop/web-1", "10.128.1.10, fd00:128:1::10", "0 missing, 0 too many")
			before := podDevices(t, node)
			if err := syscall.Kill(agentIn(node), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			writePod(t, dir, "late", "a", "10.128.1.77", "fd00:128:1::77")
			eventually(t, "a pod that comes while the agent restarts is connected", func() bool {
				return answered("shop/client", "10.128.1.77:8080") && answered("shop/client", "[fd00:128:1::77]:8080")
			})
			if err := os.Remove(filepath.Join(dir, "late.yaml")); err != nil {
				t.Fatal(err)
			}
			eventually(t, "a deleted pod's device is gone", func() bool {
				return slices.Equal(podDevices(t, node), before)
			})
			writePod(t, dir, "next", "a", "10.128.1.77", "fd00:128:1::77")
			eventually(t, "another pod can have its addresses", func() bool {
				return answered("shop/client", "10.128.1.77:8080")
			})
		})
	}
}

// TestPortsOfNodesBehindTheTunnel has a pod and its node connect to a host port and a node port of a node behind the
// tunnel: the pod through it, with its own source, its node by the underlay, whatever reverse path filtering is.
func TestPortsOfNodesBehindTheTunnel(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables", "ebpf"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			dir := shop(t)
			writePod(t, dir, "held", "a", "10.128.1.40", "fd00:128:1::40")
			file := filepath.Join(dir, "held.yaml")
			b, err := os.ReadFile(file)
			if err == nil {
				err = os.WriteFile(file, []byte(strings.Replace(string(b), "{containerPort: 8080}",
					"{containerPort: 8080, hostPort: 9090}", 1)), 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}
			name := boxIn(t, dir, []string{"--network", "own-apart"}, "--mode", mode, "--policy-mode", "Ignore")
			seen := func(from, to string) string {
				out, err := try(fairlead, "sandbox", "ask", "--name", name, from, to)
				if err != nil {
					return "no answer"
				}
				f := strings.Fields(out)
				at, err := netip.ParseAddrPort(f[len(f)-1])
				if err != nil {
					t.Fatal(err, out)
				}
				return at.Addr().String()
			}
			ports := []string{"172.18.0.11:9090", "[fd00:18::11]:9090"}
			eventually(t, "the host port is open", func() bool { return seen("outside", ports[1]) != "no answer" })
			check := func(when, from string, want ...string) {
				t.Helper()
				for i, to := range ports {
					if got := seen(from, to); got != want[i] {
						t.Errorf("%s, from %s to %s: %s, want %s", when, from, to, got, want[i])
					}
				}
			}
			for _, filter := range []string{"0", "1", "2"} {
				for _, node := range []string{"a", "b"} {
					must(t, "ip", "netns", "exec", name+"-node-"+node, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter="+filter)
				}
				check("with rp_filter "+filter, "shop/client", "10.128.2.99", "fd00:128:2::99")
				check("with rp_filter "+filter, "b", "172.18.0.12", "fd00:18::12")
			}
			must(t, "ip", "netns", "exec", name+"-node-a", "nft",
				"add table inet x; add chain inet x o { type filter hook output priority 0; }; "+
					"add rule inet x o udp dport 4789 drop")
			check("without a tunnel", "shop/client", "no answer", "no answer")
			check("without a tunnel", "b", "172.18.0.12", "fd00:18::12")
			contains(t, must(t, onNode(name, "b", dir, "show", "network", "--mode", mode)...), "172.18.0.11/32",
				"tunneled, for pods", "0 missing, 0 too many")
		})
	}
}

// TestChainedAgent has the agent behind another plugin: its list, a pod that comes and goes, and what clean leaves.
func TestChainedAgent(t *testing.T) {
	a := newAttaching(t)
	a.mode = "Chained"
	agent := a.startAgent()
	defer func() { agent.Kill() }()
	theirs, ours := filepath.Join(a.folder, "20-x.conflist"), filepath.Join(a.folder, "01-fairlead.conflist")
	const text = `{"cniVersion":"1.0.0","name":"x","plugins":[{"type":"x"}]}`
	if err := os.WriteFile(theirs, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent chains itself to the other plugin", func() bool {
		b, err := os.ReadFile(ours)
		return err == nil && strings.Contains(string(b), `"fairlead-cni"`) && strings.Contains(string(b), `"x"`)
	})
	const result = `{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/x"}],` +
		`"ips":[{"address":"10.9.0.2/24","interface":0}],"dns":{"search":["y"]}}`
	a.config = fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":"x","type":"fairlead-cni","socket":%q,"records":%q,`+
		`"prevResult":%s}`, filepath.Join(a.folder, "cni.sock"), filepath.Join(a.folder, "attachments"), result)
	records := func() int {
		l, _ := filepath.Glob(filepath.Join(a.folder, "attachments", "attachment-*"))
		return len(l)
	}
	pod := netnstest.New(t)
	for _, command := range []string{"ADD", "CHECK", "DEL"} {
		want, left := "", 1
		switch command {
		case "ADD":
			want = result
		case "DEL":
			left = 0
		}
		out, err := a.call(command, pod)
		if err != nil || strings.TrimSpace(string(out)) != want || records() != left {
			t.Errorf("%s: %v, %d records, %s", command, err, records(), out)
		}
	}
	agent.Kill()
	must(t, "ip", "netns", "exec", a.node.Name, fairlead, "clean", "--network", "--network-cni-folder", a.folder)
	if b, err := os.ReadFile(theirs); err != nil || string(b) != text {
		t.Errorf("the other plugin's configuration: %s, %v", b, err)
	}
	if _, err := os.Stat(ours); err == nil {
		t.Error("ours is left")
	}
}

// TestPoliciesAreInForceOnceAttached sends a datagram to each pod as soon as it is attached, from a pod that a policy
// lets in and from one that it doesn't: whatever is not in force yet drops the first, or lets the second pass.
func TestPoliciesAreInForceOnceAttached(t *testing.T) {
	a := newAttaching(t)
	a.flags = []string{"--policy-mode", "Enforce", "--policy-engine", "nftables"}
	pods := make([]*netns.Namespace, 12) // the first two are clients
	text := "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {namespace: shop, name: web}\nspec:\n" +
		"  podSelector: {matchLabels: {app: web}}\n  ingress: [{from: [{podSelector: {matchLabels: {app: friend}}}]}]\n"
	for i := range pods {
		pods[i] = netnstest.New(t)
		app := "web"
		if i < 2 {
			app = [...]string{"friend", "stranger"}[i]
		}
		text += fmt.Sprintf("---\napiVersion: v1\nkind: Pod\nmetadata: {namespace: shop, name: %s, labels: {app: %s}}\n"+
			"spec: {nodeName: a, containers: [{name: x}]}\n", pods[i].Name, app)
	}
	if err := os.WriteFile(filepath.Join(a.folder, "objects", "pods.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	agent := a.startAgent()
	defer func() { agent.Kill() }()
	all(pods[:2], func(p *netns.Namespace) { a.add(p) })
	for _, pod := range pods[2:] {
		got := listen(t, pod)
		addresses := a.add(pod)
		for _, to := range addresses {
			for _, from := range []*netns.Namespace{pods[1], pods[0]} {
				send(t, from, netip.AddrPortFrom(to, 9), from.Name)
			}
			if from := <-got; from != pods[0].Name {
				t.Errorf("%s at %s: got a datagram of %s, want that of %s alone", pod.Name, to, from, pods[0].Name)
			}
		}
	}
}

// listen returns what comes to a pod at UDP port 9.
func listen(t *testing.T, pod *netns.Namespace) <-chan string {
	t.Helper()
	got := make(chan string, 10)
	var c net.PacketConn
	if err := pod.Do(func() (err error) { c, err = net.ListenPacket("udp", ":9"); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetReadDeadline(time.Now().Add(time.Minute))
	go func() {
		defer close(got)
		for b := make([]byte, 100); ; {
			n, _, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			got <- string(b[:n])
		}
	}()
	return got
}

// send sends a datagram.
func send(t *testing.T, from *netns.Namespace, to netip.AddrPort, text string) {
	t.Helper()
	err := from.Do(func() error {
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		if err != nil {
			return err
		}
		_, err = c.Write([]byte(text))
		return errors.Join(err, c.Close())
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestSettingsArePutBack has the settings of a node's devices made ahead of an agent in a container, and put back by
// clean, which passes over a device that has gone.
func TestSettingsArePutBack(t *testing.T) {
	ns, folder := netnstest.New(t), t.TempDir()
	inside := func(command ...string) string {
		return must(t, append([]string{"ip", "netns", "exec", ns.Name}, command...)...)
	}
	for _, device := range []string{"eth0", "gone", "off"} {
		inside("ip", "link", "add", device, "type", "veth", "peer", "name", "x-"+device)
		inside("ip", "address", "add", "192.168.0.1/24", "dev", device)
		inside("sysctl", "-qw", "net.ipv6.conf."+device+".accept_ra="+map[bool]string{true: "0", false: "1"}[device == "off"])
	}
	setting := func(device, want string) {
		t.Helper()
		if got := strings.TrimSpace(inside("sysctl", "-n", "net.ipv6.conf."+device+".accept_ra")); got != want {
			t.Errorf("accept_ra of %s is %s, want %s", device, got, want)
		}
	}
	folders := []string{"--network-cni-folder", folder, "--network-run-folder", folder}
	inside(slices.Concat([]string{fairlead, "run", "--init-only", "--network-mode", "Own", "--node", "a",
		"--conntrack-max-per-core", "0", "--conntrack-min", "0"}, folders)...)
	setting("eth0", "2")
	setting("off", "0")
	inside("ip", "link", "delete", "gone")
	inside(append([]string{fairlead, "clean", "--network"}, folders...)...)
	setting("eth0", "1")
	setting("off", "0")
}
