package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/node"
	"fairlead.dev/fairlead/agent/service"
	"fairlead.dev/fairlead/agent/subsystem/subsystemtest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// forwarding is a node that serves a pod's node ports to a client outside in both families: 30080 with the client's
// source masqueraded, 30081 with it kept.
type forwarding struct {
	*testing.T
	*service.Planes
	node, pod, external *sandbox.Host
}

// Addresses of the node and the pod.
var (
	forwardingNode = []netip.Addr{netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("fd00:77::1")}
	forwardingPod  = []netip.Addr{netip.MustParseAddr("10.244.1.1"), netip.MustParseAddr("fd00:10:244:1::1")}
)

// upForwarding makes the node in a mode, after a setting of the node's kernel.
func upForwarding(t *testing.T, chosen, setting, value string) *forwarding {
	t.Helper()
	f := &forwarding{T: t}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.PodSpec{NodeName: "a",
			Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{ContainerPort: 8080}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: forwardingPod[0].String()}}
	parts := []model.ServicePart{&model.ServiceNode{Node: &model.Node{Name: "a", Addresses: forwardingNode},
		Localhost: true, NodePorts: []model.Range{{First: netip.IPv4Unspecified(),
			Last: netip.AddrFrom4([4]byte{255, 255, 255, 255})},
			{First: forwardingNode[1], Last: forwardingNode[1]}}}}
	for i, any := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		node.Status.Addresses = append(node.Status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: forwardingNode[i].String()})
		pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: forwardingPod[i].String()})
		pool := &model.Pool{ID: uint64(1 + i), Protocol: model.TCP,
			Backends: []model.Backend{{Addr: netip.AddrPortFrom(forwardingPod[i], 8080), Local: true}}}
		to := model.Target{Pool: pool}
		parts = append(parts, pool)
		for port, masquerade := range map[uint16]model.Origins{30080: model.AllOrigins,
			30081: model.OriginsOf(model.FromNode)} {
			entry := model.Entry{Addr: any, Port: port, Protocol: model.TCP}
			parts = append(parts, &model.Frontend{Entry: entry, Internal: to, External: to, Masquerade: masquerade})
		}
	}
	cluster, err := sandbox.Up(t.Context(), sandbox.Options{Objects: []source.Object{node, pod}, Serve: true})
	f.must(err)
	t.Cleanup(func() { f.must(cluster.Down()) })
	f.node, err = cluster.Node("a")
	f.must(err)
	f.pod, err = cluster.Pod("default", "web")
	f.must(err)
	f.external = cluster.External()
	m, err := mode.Of(chosen)
	f.must(err)
	f.must(f.node.Do(func() (err error) {
		if setting != "" {
			err = os.WriteFile("/proc/sys/"+setting, []byte(value), 0o644)
		}
		if err == nil {
			f.Planes, err = service.OpenPlanes(m, slog.New(slog.DiscardHandler))
		}
		return err
	}))
	t.Cleanup(func() { f.must(f.Close()) })
	f.Change(parts, nil)
	f.must(f.Sync(t.Context()))
	return f
}

func (f *forwarding) must(err error) {
	if err != nil {
		f.Helper()
		f.Fatal(err)
	}
}

// run runs a command on the node.
func (f *forwarding) run(args ...string) string {
	f.Helper()
	var out []byte
	err := f.node.Do(func() (err error) {
		out, err = exec.Command(args[0], args[1:]...).CombinedOutput()
		return err
	})
	if err != nil {
		f.Fatalf("%v: %v: %s", args, err, out)
	}
	return string(out)
}

// probe queries once from a host.
func (f *forwarding) probe(from *sandbox.Host, to netip.AddrPort, wait time.Duration) error {
	ctx, cancel := context.WithTimeout(f.Context(), wait)
	defer cancel()
	return from.Do(func() error {
		_, err := echo.Request(ctx, model.TCP, to, echo.Options{})
		return err
	})
}

// invalid has the client hold a connection with its source kept, sends it a segment of the pod's that lies outside the
// connection's window, and asks over the connection again.
func (f *forwarding) invalid(to netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(f.Context(), 30*time.Second)
	defer cancel()
	var capture int
	f.must(f.pod.Do(func() (err error) { // it hears the segment's like
		capture, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0x0300) // ETH_P_ALL
		return err
	}))
	defer unix.Close(capture)
	var held *echo.Flow
	f.must(f.external.Do(func() (err error) {
		held, err = echo.Open(ctx, model.TCP, to, echo.Options{})
		return err
	}))
	defer held.Close()
	_, err := held.Request(ctx)
	f.must(err)
	f.must(f.pod.Do(func() error { return sendOutOfWindow(capture) }))
	for range 3 {
		if _, err := held.Request(ctx); err != nil {
			return err
		}
	}
	return nil
}

// sendOutOfWindow sends a TCP segment with data that the calling thread's namespace has sent again, 2^30 bytes
// further on.
func sendOutOfWindow(capture int) error {
	b := make([]byte, 64<<10)
	for {
		n, from, err := unix.Recvfrom(capture, b, 0)
		if err != nil {
			return err
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); !ok || ll.Pkttype != unix.PACKET_OUTGOING {
			continue
		}
		head, to := 20, unix.Sockaddr(&unix.SockaddrInet4{Addr: [4]byte(b[16:])})
		family, addresses, protocol := unix.AF_INET, b[12:20], b[9]
		if b[0]>>4 == 6 {
			head, to = 40, &unix.SockaddrInet6{Addr: [16]byte(b[24:])}
			family, addresses, protocol = unix.AF_INET6, b[8:40], b[6]
		}
		segment := b[head:n]
		if protocol != unix.IPPROTO_TCP || binary.BigEndian.Uint16(segment) != 8080 || len(segment) <= int(segment[12]>>4)*4 {
			continue
		}
		binary.BigEndian.PutUint32(segment[4:], binary.BigEndian.Uint32(segment[4:])+1<<30)
		segment[16], segment[17] = 0, 0
		sum := uint32(protocol) + uint32(len(segment))
		for _, part := range [][]byte{addresses, append(segment[:len(segment):len(segment)], 0)} {
			for i := 0; i+1 < len(part); i += 2 {
				sum += uint32(binary.BigEndian.Uint16(part[i:]))
			}
		}
		for sum > 0xffff {
			sum = sum>>16 + sum&0xffff
		}
		binary.BigEndian.PutUint16(segment[16:], ^uint16(sum))
		fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		return errors.Join(unix.Sendto(fd, b[:n], 0, to), unix.Close(fd))
	}
}

// Mode iptables accepts in FORWARD what it masquerades and established connections, whatever the chain's policy, and
// drops what connection tracking calls invalid, so that it resets no connection. It counts what it drops, and
// connections to node ports on localhost.
func TestIptablesForwards(t *testing.T) {
	for _, variant := range []string{"legacy", "nft"} {
		t.Run(variant, func(t *testing.T) {
			t.Parallel()
			f := upForwarding(t, "iptables-"+variant, "", "")
			a := stillWith(t, Options{}, f.Planes)
			counted := func(metric string, want float64) {
				t.Helper()
				if is, ok := subsystemtest.Values(t, a.registry)["kubeproxy_iptables_"+metric]; is != want || !ok {
					t.Errorf("%s is %v, %t; want %v", metric, is, ok, want)
				}
			}
			counted("ct_state_invalid_dropped_packets_total", 0)
			for i, at := range forwardingNode {
				if err := f.invalid(netip.AddrPortFrom(at, 30081)); err != nil {
					t.Errorf("a connection to %s after an invalid packet: %v", at, err)
				}
				counted("ct_state_invalid_dropped_packets_total", float64(1+i))
				f.run([]string{"iptables-", "ip6tables-"}[i]+variant, "-P", "FORWARD", "DROP")
				if err := f.probe(f.external, netip.AddrPortFrom(at, 30080), 5*time.Second); err != nil {
					t.Errorf("a node port at %s with FORWARD's policy DROP: %v", at, err)
				}
				pod := netip.AddrPortFrom(forwardingPod[i], 8080)
				if err := f.probe(f.external, pod, 300*time.Millisecond); !errors.Is(err, echo.Timeout) {
					t.Errorf("a pod asked from outside with FORWARD's policy DROP: %v, want no answer", err)
				}
			}
			f.healthChecks(variant)
			counted("localhost_nodeports_accepted_packets_total", 0)
			for _, to := range []string{"127.0.0.1:30080", "192.168.77.1:30080"} {
				if err := f.probe(f.node, netip.MustParseAddrPort(to), 5*time.Second); err != nil {
					t.Errorf("%s asked from the node: %v", to, err)
				}
				counted("localhost_nodeports_accepted_packets_total", 1)
			}
			save := f.run("iptables-"+variant+"-save", "-t", "nat")
			all, random := strings.Count(save, "-j MASQUERADE"), strings.Count(save, "-j MASQUERADE --random-fully")
			if all == 0 || all != random {
				t.Errorf("%d of %d rules masquerade with random ports", random, all)
			}
		})
	}
}

// healthChecks queries a health check, and another port, of a node whose policy of INPUT is DROP.
func (f *forwarding) healthChecks(variant string) {
	f.Helper()
	var server *echo.Server
	f.must(f.node.Do(func() (err error) {
		server, err = echo.Serve("node", []echo.Port{{Number: 32100, Protocol: model.TCP},
			{Number: 32101, Protocol: model.TCP}})
		return err
	}))
	defer server.Close()
	check := []model.ServicePart{&model.HealthCheck{Owner: model.Owner{Kind: model.KindService, Namespace: "default",
		Name: "web"}, Port: 32100}}
	f.Change(check, nil)
	f.must(f.Sync(f.Context()))
	for i, at := range forwardingNode {
		command := []string{"iptables-", "ip6tables-"}[i] + variant
		f.run(command, "-A", "INPUT", "-p", "tcp", "--dport", "32000:32200", "-j", "DROP")
		if err := f.probe(f.external, netip.AddrPortFrom(at, 32100), 5*time.Second); err != nil {
			f.Errorf("a health check at %s behind a firewall: %v", at, err)
		}
		if err := f.probe(f.external, netip.AddrPortFrom(at, 32101), 300*time.Millisecond); !errors.Is(err, echo.Timeout) {
			f.Errorf("another port at %s behind a firewall: %v, want no answer", at, err)
		}
	}
	f.Change(nil, check)
	f.must(f.Sync(f.Context()))
	if rules := f.run("iptables-" + variant + "-save"); strings.Contains(rules, "HEALTH") {
		f.Errorf("rules for a health check that is no more:\n%s", rules)
	}
}

// Mode iptables accepts packets to the health check of a Service, and an audit finds that as it should be.
func TestHealthCheckIsAccepted(t *testing.T) {
	m, err := mode.Of("iptables-nft")
	if err != nil {
		t.Fatal(err)
	}
	objects := webAt("shop", "web", "10.96.0.1", 1)
	spec := &objects[0].(*corev1.Service).Spec
	spec.Type, spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
	spec.HealthCheckNodePort = 32100
	inNode(t, func(ctx context.Context) error {
		a, _ := runAgent(t, ctx, m, objects...)
		if _, err := until(ctx, a.handler(), "/readyz", http.StatusOK); err != nil {
			return err
		}
		for _, command := range []string{"iptables-nft-save", "ip6tables-nft-save"} {
			rules, err := exec.Command(command).CombinedOutput()
			if err != nil || !strings.Contains(string(rules), "--dport 32100 -j ACCEPT") {
				t.Errorf("%s: %v:\n%s", command, err, rules)
			}
		}
		audit, err := mode.Check(ctx, m, decidedFor(m, objects))
		if err == nil && len(audit.Put)+len(audit.Del) > 0 {
			t.Errorf("missing %q, extra %q", audit.Put, audit.Del)
		}
		return err
	})
}

// Where the node drops forwarded packets by default, a mode whose rules don't accept them has a problem of the Node,
// for as long as that lasts, and says so in its notes.
func TestForwardPolicyIsAProblem(t *testing.T) {
	inNode(t, func(ctx context.Context) error {
		firewall, err := node.OpenFirewall()
		if err != nil {
			return err
		}
		defer firewall.Close()
		for _, policy := range []string{"ACCEPT", "DROP", "ACCEPT"} {
			for _, command := range []string{"iptables-nft", "ip6tables-legacy"} {
				if out, err := exec.Command(command, "-P", "FORWARD", policy).CombinedOutput(); err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
			}
			for _, m := range mode.All() {
				a := still(t, Options{})
				a.options.Mode, a.options.Firewall = m, firewall
				want := policy == "DROP" && !strings.HasPrefix(m.Name, "iptables")
				for where, list := range map[string][]source.Problem{"/status": a.state().Problems, "Events": a.activeProblems()} {
					is := slices.ContainsFunc(list, func(p source.Problem) bool {
						return p.Reason == "ForwardPolicyDrop" && p.Object.Kind == source.Node &&
							strings.Contains(p.Message, "nft list chain ip filter FORWARD, ip6tables-legacy -S FORWARD")
					})
					if is != want {
						t.Errorf("mode %s, policy %s: %s has the problem: %t; all: %v", m.Name, policy, where, is, list)
					}
				}
				if !strings.Contains(fmt.Sprint(m.Remarks), "forward") {
					t.Errorf("mode %s has no note on forwarded packets", m.Name)
				}
			}
		}
		return nil
	})
}

// In mode nftables, which drops no invalid packet, a metric tells that there are some.
func TestInvalidPacketsAreCounted(t *testing.T) {
	f := upForwarding(t, "nftables", "", "")
	a := stillWith(t, Options{}, f.Planes)
	if n, ok := subsystemtest.Values(t, a.registry)["fairlead_conntrack_invalid_packets_total"]; n != 0 || !ok {
		t.Errorf("%v invalid packets, %t, before there are any", n, ok)
	}
	for i, at := range forwardingNode {
		if err := f.invalid(netip.AddrPortFrom(at, 30081)); err != nil && !errors.Is(err, echo.Refused) {
			t.Errorf("a connection to %s after an invalid packet: %v", at, err)
		}
		if n := subsystemtest.Values(t, a.registry)["fairlead_conntrack_invalid_packets_total"]; n < float64(1+i) {
			t.Errorf("%v invalid packets, want %d at least", n, 1+i)
		}
	}
}

// Where connection tracking is told to be liberal, no packet outside a window resets a connection, and mode iptables
// drops none.
func TestLiberalTrackingResetsNothing(t *testing.T) {
	for _, chosen := range []string{"nftables", "iptables-nft"} {
		t.Run(chosen, func(t *testing.T) {
			t.Parallel()
			f := upForwarding(t, chosen, "net/netfilter/nf_conntrack_tcp_be_liberal", "1")
			for _, at := range forwardingNode {
				if err := f.invalid(netip.AddrPortFrom(at, 30081)); err != nil {
					t.Errorf("a connection to %s after a packet outside its window: %v", at, err)
				}
			}
			if rules := f.run("iptables-nft-save"); strings.Contains(rules, "INVALID -j DROP") {
				t.Error(fmt.Sprint("a rule drops invalid packets:\n", rules))
			}
		})
	}
}
