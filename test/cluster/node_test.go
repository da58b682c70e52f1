package cluster

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
)

const nodeList = "/api/v1/nodes"

// node reports the API server of a Node with an address, and returns what takes that back.
func node(t testing.TB, name, address string) (remove func()) {
	t.Helper()
	plane.must(t, "POST", nodeList, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.NodeSpec{PodCIDR: "10.128.1.0/24", PodCIDRs: []string{"10.128.1.0/24"}}}, nil)
	plane.must(t, "PATCH", nodeList+"/"+name+"/status", addressed(address), nil)
	return func() { plane.must(t, "DELETE", nodeList+"/"+name, nil, nil) }
}

// addressed returns the change that leaves a Node with one address.
func addressed(ip string) any {
	return map[string]any{"status": corev1.NodeStatus{
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}}}}
}

// configuration writes a file of kube-proxy's and ours, in one step, and returns its path.
func configuration(t testing.TB, dir, node, mode string) string {
	t.Helper()
	kubeconfig, err := plane.Kubeconfig("fairlead", first)
	check(t, err)
	file := filepath.Join(dir, "config.conf")
	check(t, os.WriteFile(file+".new", fmt.Appendf(nil, `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
hostnameOverride: %s
clientConnection: {kubeconfig: %s}
---
apiVersion: fairlead.dev/v1alpha1
kind: FairleadConfiguration
mode: %s
`, node, kubeconfig, mode), 0o644), os.Rename(file+".new", file))
	return file
}

// The node gets another name, and then other modes, by its configuration file, under traffic: no connection fails, and
// what counts as local follows.
func TestConfigurationChanged(t *testing.T) {
	dir := t.TempDir()
	h, err := box.Node("a")
	check(t, err)
	a := follow(t, h, exec.Command(os.Getenv("FAIRLEAD"), "run", "--config", configuration(t, dir, "a", "nftables")))
	to, local := service(t, "kept", web1, web2), service(t, "local", web1)
	plane.must(t, "PATCH", "/api/v1/namespaces/default/services/local",
		map[string]any{"spec": map[string]any{"internalTrafficPolicy": "Local"}}, nil)
	on := func(node1, node2 string) any {
		s := slice("", web1, web2)
		s.Endpoints[0].NodeName, s.Endpoints[1].NodeName = &node1, &node2
		return map[string]any{"endpoints": s.Endpoints}
	}
	plane.must(t, "PATCH", sliceList+"/local", on("a", "c"), nil)
	a.serving(t)
	reaches(t, local, "web-1")
	external := nodePort(t, "kept", to.Port())
	until(t, "the node port is there", func() error {
		_, err := request(external)
		return err
	})
	client, err := box.Pod("default", "client")
	check(t, err)
	f, k := flow(to), newFlows()
	begin := func() {
		k.begin(t, client, to)
		k.begin(t, box.External(), external)
	}
	begin()
	t.Cleanup(node(t, "c", "172.18.0.11"))
	goOn := 0 // how often the agent has said of another mode's connections that they do
	for _, as := range []struct {
		node, mode, pod string
		goOn            int
	}{
		{"c", "nftables", "web-2", 0}, {"c", "ebpf", "web-2", 1}, {"a", "iptables", "web-1", 1},
		{"c", "nftables", "web-2", 1}, {"a", "ebpf", "web-1", 1},
	} {
		configuration(t, dir, as.node, as.mode)
		until(t, fmt.Sprintf("it serves node %s in mode %s", as.node, as.mode), func() error {
			s, err := a.state()
			if err == nil && (s.Node != as.node || s.Mode != as.mode || !s.Ready) {
				err = fmt.Errorf("node %s, mode %s, ready: %t", s.Node, s.Mode, s.Ready)
			}
			return err
		})
		latency := reaches(t, local, as.pod)
		t.Logf("node %s, mode %s: local endpoints %v after it was ready", as.node, as.mode, latency)
		goOn += as.goOn
		until(t, "what the mode before needs no more is cleaned", func() error {
			if n := strings.Count(a.log.String(), "continue by its rules"); n < goOn {
				return fmt.Errorf("connections that go on are told of %d times, not %d", n, goOn)
			}
			return nil
		})
		begin()
	}
	f.end(t)
	k.end(t)
}

// nodePort makes a Service one of node ports, and returns where that is from outside.
func nodePort(t testing.TB, name string, port uint16) netip.AddrPort {
	t.Helper()
	var made corev1.Service
	plane.must(t, "PATCH", "/api/v1/namespaces/default/services/"+name,
		map[string]any{"spec": map[string]any{"type": "NodePort",
			"ports": []corev1.ServicePort{{Port: int32(port), TargetPort: intstr.FromInt32(8080)}}}}, &made)
	return netip.AddrPortFrom(netip.MustParseAddr("172.18.0.11"), uint16(made.Spec.Ports[0].NodePort))
}

// A node gets another address: node ports are there, as soon as the kernel or the Node object says so.
func TestNodeAddresses(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			h, err := box.Node("a")
			check(t, err)
			a := startAgent(t, "fairlead", mode, "--nodeport-addresses", "198.18.0.0/24,primary")
			s := service(t, "web", web1)
			port := nodePort(t, "web", s.Port()).Port()
			at := func(ip string) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(ip), port) }
			a.serving(t)
			reaches(t, at("172.18.0.11"), "web-1")
			for _, ip := range []string{"198.18.0.1", "203.0.113.1"} {
				if pod, err := request(at(ip)); err == nil {
					t.Errorf("%s leads to %s before the node has that address", at(ip), pod)
				}
			}
			interfaceHas(t, h.Namespace, "198.18.0.1/32", "203.0.113.1/32")
			reaches(t, at("198.18.0.1"), "web-1")
			if pod, err := request(at("203.0.113.1")); err == nil {
				t.Errorf("%s leads to %s, which is not asked for", at("203.0.113.1"), pod)
			}
			plane.must(t, "PATCH", nodeList+"/a/status", addressed("203.0.113.1"), nil)
			defer plane.must(t, "PATCH", nodeList+"/a/status", addressed("172.18.0.11"), nil)
			reaches(t, at("203.0.113.1"), "web-1")
		})
	}
}

// interfaceHas returns a namespace's wire addresses until the test ends.
func interfaceHas(t testing.TB, namespace string, addresses ...string) {
	t.Helper()
	ns, err := netns.Open(namespace)
	check(t, err)
	defer ns.Close()
	c, err := link.Dial(ns)
	check(t, err)
	defer c.Close()
	dev, err := c.Index("eth0")
	check(t, err)
	for _, a := range addresses {
		check(t, c.AddAddress(dev, netip.MustParsePrefix(a)))
		t.Cleanup(func() {
			if out, err := exec.Command("ip", "-n", namespace, "address", "delete", a, "dev",
				"eth0").CombinedOutput(); err != nil {
				t.Errorf("take %s from eth0: %v: %s", a, err, out)
			}
		})
	}
}
