package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/network"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/sandbox/vm/vmtest"
)

// TestInSecondKernel has agents connect pods as the host's kernel may not be able to.
func TestInSecondKernel(t *testing.T) {
	if !*second {
		vmtest.Run(t, "fairlead.dev/fairlead/agent", "^TestInSecondKernel$", "-second-kernel")
		return
	}
	for _, mode := range []string{"nftables", "ebpf"} {
		t.Run("IPIP, "+mode, func(t *testing.T) { throughIPIP(t, mode) })
	}
	t.Run("ipvlan", servedByIPVLAN)
}

// throughIPIP has agents of two nodes in a mode, with a router in between, connect a pod each.
func throughIPIP(t *testing.T, mode string) {
	router := netnstest.New(t)
	objects := sourceOf{networkNode("a", "192.168.0.1", "10.244.1.0/24"), networkNode("b", "172.16.0.1", "10.244.2.0/24")}
	nodes, pods := map[string]*netns.Namespace{}, map[string]*netns.Namespace{}
	for name, net := range map[string]string{"a": "192.168.0", "b": "172.16.0"} {
		ns := netnstest.New(t)
		script := strings.NewReplacer("NET", net, "NODE", ns.Name, "PORT", "to-"+name).Replace(`
			sysctl -qw net.ipv4.ip_forward=1
			ip link add PORT type veth peer name eth0 netns NODE
			ip address add NET.254/24 dev PORT
			ip link set PORT up
			ip -n NODE address add NET.1/24 dev eth0
			ip -n NODE link set eth0 up
			ip -n NODE route add default via NET.254`)
		if err := router.Do(func() error { return exec.Command("sh", "-ec", script).Run() }); err != nil {
			t.Fatal(err)
		}
		nodes[name], pods[name] = ns, netnstest.New(t)
		socket := startAgent(t, ns, mode, network.Config{Node: name, Tunnel: model.IPIP}, objects)
		if err := attachPod(t.Context(), socket, "c-1", pods[name]); err != nil {
			t.Fatal(err)
		}
	}
	for _, x := range [][2]string{{"a", "b"}, {"b", "a"}} {
		from, address := pods[x[0]], map[string]string{"a": "10.244.1.2", "b": "10.244.2.2"}
		received, sent := tunnelPackets(t, nodes[x[0]])
		saw, err := awaitReply(t, from, netip.MustParseAddr(address[x[1]]))
		if err != nil || saw != netip.MustParseAddr(address[x[0]]) {
			t.Errorf("pod of %s to pod of %s: from %s, %v", x[0], x[1], saw, err)
		}
		for range 10 { // in mode ebpf, those behind the first might be redirected to the tunnel
			if _, err := awaitReply(t, from, netip.MustParseAddr(address[x[1]])); err != nil {
				t.Error(err)
			}
		}
		lost, err := exec.Command("ip", "-n", nodes[x[0]].Name, "-s", "-s", "-json", "link", "show", "fl-ipip").Output()
		if err != nil || strings.Count(string(lost), `"fifo_errors":0`) != 2 {
			t.Errorf("node %s, %v: packets were lost at the tunnel: %s", x[0], err, lost)
		}
		if r, s := tunnelPackets(t, nodes[x[0]]); r < received+3 || s < sent+3 {
			t.Errorf("node %s: a connection took %d packets through the tunnel, %d back", x[0], s-sent, r-received)
		}
	}
}

// servedByIPVLAN has pods that are children of the uplink reach a Service with one of them as its backend.
func servedByIPVLAN(t *testing.T) {
	node, wire, pods := netnstest.New(t), netnstest.New(t), []*netns.Namespace{netnstest.New(t), netnstest.New(t)}
	script := strings.ReplaceAll(`
		ip link add eth0 type veth peer name x netns WIRE
		ip address add 192.168.0.1/24 dev eth0
		ip link set eth0 up
		ip route add default via 192.168.0.2
		ip -n WIRE link set x up`, "WIRE", wire.Name)
	if err := node.Do(func() error { return exec.Command("sh", "-ec", script).Run() }); err != nil {
		t.Fatal(err)
	}
	port, ready, tcp := int32(80), true, corev1.ProtocolTCP
	c := network.Config{Node: "a", Overlay: network.Never, Device: model.IPVLANL3}
	socket := startAgent(t, node, "ebpf", c, sourceOf{
		networkNode("a", "192.168.0.1", "10.244.1.0/24"),
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: corev1.ServiceSpec{
			ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"}, Ports: []corev1.ServicePort{{Port: 80}}}},
		&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", Labels: map[string]string{
			discoveryv1.LabelServiceName: "web"}}, AddressType: discoveryv1.AddressTypeIPv4,
			Ports: []discoveryv1.EndpointPort{{Port: &port, Protocol: &tcp}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.1.2"},
				Conditions: discoveryv1.EndpointConditions{Ready: &ready}}}}})
	for i, pod := range pods {
		if err := attachPod(t.Context(), socket, fmt.Sprint("c-", i), pod); err != nil {
			t.Fatal(err)
		}
	}
	saw, err := awaitReply(t, pods[1], netip.MustParseAddr("10.96.0.10"))
	if err != nil || saw != netip.MustParseAddr("10.244.1.3") {
		t.Errorf("pod to Service: from %s, %v", saw, err)
	}
	if _, err := awaitReply(t, node, netip.MustParseAddr("10.96.0.10")); err != nil {
		t.Errorf("node to Service: %v", err)
	}
}

// startAgent runs a whole agent in a node's network namespace until the test ends, and returns its plugin's socket.
func startAgent(t *testing.T, ns *netns.Namespace, by string, c network.Config, objects sourceOf) (socket string) {
	return startAgentWith(t, ns, by, objects, NetworkOptions{Resolve: c})
}

// startAgentWith is startAgent with options of the pod network.
func startAgentWith(t *testing.T, ns *netns.Namespace, by string, objects sourceOf, n NetworkOptions) (socket string) {
	folder := t.TempDir()
	socket = filepath.Join(folder, "cni.sock")
	n.Socket, n.Boot, n.Records = socket, "x", filepath.Join(folder, "records")
	chosen, err := mode.Of(by)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Mode: chosen, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Source: objects, Network: &n,
		Resolve: resolve.Config{Node: n.Resolve.Node}}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- ns.Do(func() error {
			interfaces, err := link.OpenInterfaces()
			if err != nil {
				return err
			}
			defer interfaces.Close()
			o.Network.Follow = func(ctx context.Context, notify func([]network.Device, bool)) error {
				return followInterfaces(ctx, interfaces, notify)
			}
			return Run(ctx, o)
		})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("agent of node %s: %v", n.Resolve.Node, err)
		}
	})
	return socket
}

// tunnelPackets returns how many packets a node's tunnel has received and sent.
func tunnelPackets(t *testing.T, node *netns.Namespace) (received, sent int) {
	t.Helper()
	read := func(direction string) int {
		out, err := exec.Command("ip", "netns", "exec", node.Name, "cat",
			"/sys/class/net/fl-ipip/statistics/"+direction+"_packets").Output()
		n, failed := strconv.Atoi(strings.TrimSpace(string(out)))
		if err = errors.Join(err, failed); err != nil {
			t.Fatal(err)
		}
		return n
	}
	return read("rx"), read("tx")
}

// awaitReply returns the source that a pod's server saw of another pod, once it replies.
func awaitReply(t *testing.T, from *netns.Namespace, to netip.Addr) (saw netip.Addr, err error) {
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		err = from.Do(func() error {
			ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
			defer stop()
			reply, err := echo.Request(ctx, model.TCP, netip.AddrPortFrom(to, 80), echo.Options{})
			saw = reply.Client.Addr()
			return err
		})
		if err == nil {
			return saw, nil
		}
	}
	return saw, fmt.Errorf("no reply within a minute: %w", err)
}

// followInterfaces calls notify with the devices of the calling thread's network namespace, and again whenever they
// have changed, until ctx ends.
func followInterfaces(ctx context.Context, all *link.Interfaces, notify func([]network.Device, bool)) error {
	return all.Follow(ctx, func(l []link.Interface) {
		var devices []network.Device
		for _, i := range l {
			devices = append(devices, network.Device{Name: i.Name, MTU: i.MTU, Prefixes: i.Prefixes})
		}
		notify(devices, all.NoIPv6())
	})
}
