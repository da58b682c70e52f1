package test_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/sandbox/echo"
)

// A pod that sends as a pod of another node, which policies allow, reaches nothing, and explain says by which device.
func TestPodCannotSendAsRemotePod(t *testing.T) {
	for _, engine := range []string{"nftables", "iptables", "ebpf"} {
		t.Run(engine, func(t *testing.T) {
			name, dir := boxOf(t, []string{"--network", "wires"}, "--policy-engine", engine, "--mode",
				map[string]string{"nftables": "nftables", "iptables": "iptables", "ebpf": "ebpf"}[engine])
			f := &forger{t: t, box: name}
			f.in("db-0", func() (err error) {
				f.answers, err = net.ListenPacket("ip4:tcp", "10.128.1.12")
				return err
			})
			defer f.answers.Close()
			own, remote := netip.MustParseAddr("10.128.1.10"), netip.MustParseAddr("10.128.3.10")
			for i, src := range []netip.Addr{own, remote, own} {
				f.in("web-1", func() error { return sendSYN(netip.AddrPortFrom(src, 20000+uint16(i))) })
			}
			for last := uint16(0); last != 20002; {
				b := make([]byte, 100)
				f.answers.SetReadDeadline(time.Now().Add(20 * time.Second))
				_, from, err := f.answers.ReadFrom(b)
				if err != nil {
					t.Fatal(err)
				}
				if last = uint16(b[0])<<8 | uint16(b[1]); from.String() == remote.String() {
					t.Errorf("a pod of node a sends as %s", remote)
				}
			}
			route := must(t, "ip", "-n", name+"-node-a", "route", "get", own.String())
			device := regexp.MustCompile(`dev (\S+)`).FindStringSubmatch(route)[1]
			args := []string{"explain", remote.String(), database, "--mode", engine, "--policy-engine", engine}
			contains(t, must(t, onNode(name, "a", dir, args...)...), "accepted: ingress of shop/db-0: allowed by")
			contains(t, must(t, onNode(name, "a", dir, append(args, "--in", device)...)...), "policies in sync",
				"forged source: 10.128.3.10 came in by device "+device+" of shop/web-1, which may not send from it")
		})
	}
}

// sendSYN sends the first packet of a connection to shop/db-0, from any source.
func sendSYN(src netip.AddrPort) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	to := netip.MustParseAddrPort(database)
	return unix.Sendto(fd, syn(src, to), 0, &unix.SockaddrInet4{Addr: to.Addr().As4()})
}

const bridged = `
apiVersion: v1
kind: Node
metadata: {name: n1}
spec: {podCIDRs: [10.77.0.0/24]}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop}
spec: {nodeName: n1, containers: [{name: c, image: i}]}
status: {phase: Running, podIP: 10.77.0.2, podIPs: [{ip: 10.77.0.2}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db, namespace: shop}
spec: {nodeName: n1, containers: [{name: c, image: i}]}
status: {phase: Running, podIP: 10.77.0.3, podIPs: [{ip: 10.77.0.3}]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny, namespace: shop}
spec: {podSelector: {}, policyTypes: [Ingress]}
`

// Pods on a bridge whose packets netfilter doesn't see reach each other whatever policies say: a problem of the node
// names it, with the way out, and explain says so; once the kernel's setting is mended, policies hold.
func TestPoliciesBetweenPodsOfABridge(t *testing.T) {
	name := fmt.Sprintf("t%x", time.Now().UnixNano()%(1<<28))
	node := name + "-node-n1"
	for _, ns := range []string{node, name + "-web", name + "-db"} {
		must(t, "ip", "netns", "add", ns)
		t.Cleanup(func() { try("ip", "netns", "del", ns) })
		must(t, "ip", "-n", ns, "link", "set", "lo", "up")
	}
	must(t, "ip", "-n", node, "link", "add", "cni0", "type", "bridge")
	must(t, "ip", "-n", node, "address", "add", "10.77.0.1/24", "dev", "cni0")
	must(t, "ip", "-n", node, "link", "set", "cni0", "up")
	for i, pod := range []string{"web", "db"} {
		must(t, "ip", "-n", node, "link", "add", pod, "type", "veth", "peer", "name", "eth0", "netns", name+"-"+pod)
		must(t, "ip", "-n", node, "link", "set", pod, "master", "cni0", "up")
		must(t, "ip", "-n", name+"-"+pod, "address", "add", fmt.Sprintf("10.77.0.%d/24", 2+i), "dev", "eth0")
		must(t, "ip", "-n", name+"-"+pod, "link", "set", "eth0", "up")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(bridged), 0o644); err != nil {
		t.Fatal(err)
	}
	filtered := func(value string) {
		must(t, "ip", "netns", "exec", node, "sysctl", "-qw", "net.bridge.bridge-nf-call-iptables="+value)
	}
	filtered("1")
	web, err := netns.Open(name + "-web")
	if err != nil {
		t.Fatal(err)
	}
	defer web.Close()
	id := uint16(0)
	reaches := func(expected bool) bool {
		wait := time.Second
		if expected {
			wait = 10 * time.Second
		}
		ctx, end := context.WithTimeout(t.Context(), wait)
		defer end()
		id++
		from := netip.AddrPortFrom(netip.MustParseAddr("10.77.0.2"), id)
		return web.Do(func() error { return echo.Ping(ctx, netip.MustParseAddr("10.77.0.3"), from) }) == nil
	}
	if !reaches(true) {
		t.Fatal("the pods don't reach each other")
	}
	run := exec.Command("ip", "netns", "exec", node, fairlead, "run", "--source", dir, "--node", "n1", "--policy-mode",
		"Enforce", "--policy-engine", "nftables")
	var log bytes.Buffer
	run.Stdout, run.Stderr = &log, &log
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		run.Process.Signal(syscall.SIGTERM)
		if err := run.Wait(); err != nil || t.Failed() {
			t.Errorf("the agent ended with %v:\n%s", err, &log)
		}
	}()
	command := func(args ...string) string {
		return must(t, append([]string{"ip", "netns", "exec", node, fairlead}, append(args, "--source", dir, "--node", "n1",
			"--policy-mode", "Enforce", "--policy-engine", "nftables")...)...)
	}
	eventually(t, "policies hold on the bridge", func() bool { return !reaches(false) })
	eventually(t, "the agent says what it can't check", func() bool {
		return strings.Contains(status(t, name, "n1"), "SourcesNotChecked")
	})
	if page := status(t, name, "n1"); strings.Contains(page, "BridgeNotFiltered") {
		t.Errorf("policies don't hold: %s", page)
	}
	const denied, said = "dropped: ingress of shop/db", "bridge cni0 forwards between shop/web and shop/db without"
	if out := command("explain", "shop/web", "shop/db:80"); !strings.Contains(out, denied) || strings.Contains(out, said) {
		t.Errorf("explain: %s", out)
	}
	filtered("0")
	eventually(t, "the node has the problem", func() bool {
		return strings.Contains(status(t, name, "n1"), "BridgeNotFiltered")
	})
	contains(t, status(t, name, "n1"), "net.bridge.bridge-nf-call-iptables is 0", "cni0", "br_netfilter")
	if !reaches(true) {
		t.Error("policies hold though the bridge bypasses them: the test says nothing")
	}
	contains(t, command("explain", "shop/web", "shop/db:80"), said, "policies not enforced here")
	contains(t, command("show"), "BridgeNotFiltered")
	filtered("1")
	eventually(t, "the problem is over", func() bool {
		return !strings.Contains(status(t, name, "n1"), "BridgeNotFiltered")
	})
	if reaches(false) {
		t.Error("policies don't hold once the setting is mended")
	}
}
