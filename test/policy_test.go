package test_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
)

// The shop's database, which its policies let the web pods reach alone.
const database = "10.128.1.12:5432"

// connects reports whether a pod reaches an address in a sandbox.
func connects(name, from, to string) bool {
	_, err := try(fairlead, "sandbox", "ask", "--name", name, from, to)
	return err == nil
}

// policyTable reports whether a sandbox's node has the policies' table.
func policyTable(t *testing.T, name, node string) bool {
	t.Helper()
	return strings.Contains(ruleset(t, name+"-node-"+node), "fairlead-policy")
}

// status returns the status page of a node's agent, "" while there is none.
func status(t *testing.T, name, node string) (page string) {
	t.Helper()
	ns, err := netns.Open(name + "-node-" + node)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	web := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			err = ns.Do(func() error { c, err = new(net.Dialer).DialContext(ctx, network, address); return err })
			return c, err
		}}}
	r, err := web.Get("http://127.0.0.1:10249/status")
	if err != nil {
		return ""
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return ""
	}
	return string(b)
}

// fastPath waits until packets to pods of node a bypass the host stack, or don't.
func fastPath(t *testing.T, name string, enabled bool) {
	t.Helper()
	var page struct {
		FastPath struct{ IPv4, IPv6 struct{ Enabled bool } }
	}
	eventually(t, fmt.Sprintf("packets bypass the host stack: %t", enabled), func() bool {
		err := json.Unmarshal([]byte(status(t, name, "a")), &page)
		return err == nil && page.FastPath.IPv4.Enabled == enabled && page.FastPath.IPv6.Enabled == enabled
	})
}

// What policies don't allow is dropped, what they allow passes, show names who decides, and nothing is left of policies
// once their file is gone.
func TestPolicyDropsPackets(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables", "ebpf", "userspace"} {
		t.Run(mode, func(t *testing.T) { policyDropsPackets(t, mode) })
	}
}

func policyDropsPackets(t *testing.T, mode string) {
	var network []string
	flags := []string{"--mode", mode}
	if mode == "ebpf" { // another engine than its own turns the fast path off
		network, flags = []string{"--network", "wires"}, append(flags, "--policy-engine", "nftables")
	}
	name, dir := boxOf(t, network, flags...)
	rows := []struct {
		from, to string
		passes   bool
	}{
		{"shop/client", database, false},
		{"shop/web-1", database, true},
		{"shop/web-2", database, true},
		{"shop/client", "shop/cart:grpc", true},
		{"shop/client", "shop/dns:53/udp", true},
		{"shop/cart-1", "shop/web:http", false},
		{"outside", "a:30080", true},
		{"outside", database, false},
		{"a", database, true}, // the pod's own node
		{"b", database, false},
	}
	for _, c := range rows {
		if mode == "userspace" && c.to == "shop/cart:grpc" {
			continue // an endpoint on another node sees the client's node: see the problem below
		}
		if connects(name, c.from, c.to) != c.passes {
			t.Errorf("%s to %s: want an answer: %t", c.from, c.to, c.passes)
		}
	}
	show := onNode(name, "a", dir, append([]string{"show"}, flags...)...)
	contains(t, must(t, show...), "engine nftables", "shop/db-0", "NetworkPolicy shop/db")
	switch mode {
	default:
		contains(t, must(t, show...), "0 missing, 0 too many")
	case "userspace":
		contains(t, status(t, name, "b"), "PoliciesSeeNodes", "shop/cart")
	case "ebpf":
		contains(t, must(t, show...), "0 missing, 0 too many")
		fastPath(t, name, false)
	}
	contains(t, must(t, append(show, "-o", "json")...), `"engine": "nftables"`, `"ingress": [`)
	if !policyTable(t, name, "a") {
		t.Fatal("the node has no table of policies")
	}
	file := filepath.Join(dir, "policies.yaml")
	policies, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for from, want := range map[string]string{
		"shop/client": "dropped: ingress of shop/db-0: isolated by NetworkPolicy shop/db ingress, ",
		"shop/web-1":  "accepted: ingress of shop/db-0: allowed by NetworkPolicy shop/db ingress[0]",
	} {
		contains(t, must(t, onNode(name, "a", dir, "explain", from, database)...), want, "policies in sync")
	}
	os.Remove(file)
	eventually(t, "the policies are gone", func() bool { return !policyTable(t, name, "a") && !policyTable(t, name, "b") })
	if !connects(name, "shop/client", database) {
		t.Error("a pod that no policy selects doesn't answer")
	}
	if mode == "ebpf" {
		fastPath(t, name, true)
	}
	os.WriteFile(file, policies, 0o644)
	eventually(t, "the policies are back", func() bool { return policyTable(t, name, "a") && policyTable(t, name, "b") })
	if connects(name, "shop/client", database) {
		t.Error("what the policies deny passes once they are back")
	}
}

// A sandbox whose agents have policies off enforces none.
func TestPoliciesOff(t *testing.T) {
	name, _ := box(t, "--policy-mode", "Ignore")
	if !connects(name, "shop/client", database) {
		t.Error("a policy is enforced though policies are off")
	}
	if policyTable(t, name, "a") {
		t.Error("the node has a table of policies though they are off")
	}
}

// policyMode writes a configuration that has a mode of policies.
func policyMode(t *testing.T, file, mode string) {
	t.Helper()
	text := "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\npolicy: {mode: " + mode + "}\n"
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A changed configuration turns policies on, to audit and off, while what they allow passes without a gap.
func TestPolicyModeFollowsTheConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "fairlead.yaml")
	policyMode(t, file, "Ignore")
	name, _ := box(t, "--config", file)
	failures := make(chan string)
	go func() {
		_, err := try(fairlead, "sandbox", "ask", "--name", name, "--count", "3000", "shop/web-2", database)
		failures <- fmt.Sprint(err)
	}()
	for _, c := range []struct {
		mode   string
		passes bool
	}{{"Enforce", false}, {"Audit", true}, {"Enforce", false}, {"Ignore", true}} {
		policyMode(t, file, c.mode)
		eventually(t, "policy mode "+c.mode+" is in force", func() bool {
			return connects(name, "shop/client", database) == c.passes && policyTable(t, name, "a") == (c.mode != "Ignore")
		})
	}
	if err := <-failures; err != "<nil>" {
		t.Errorf("connections that the policies allow failed: %s", err)
	}
	eventually(t, "nothing is left of policies", func() bool { return !policyTable(t, name, "b") })
}

// forger sends a client's packets by the device of another pod of its node, and sees which are answered.
type forger struct {
	t       *testing.T
	box     string
	answers net.PacketConn // what the client gets over TCP
	port    uint16         // of the next packet's source
}

func newForger(t *testing.T, box string) *forger {
	f := &forger{t: t, box: box, port: 20000}
	f.in("client", func() (err error) {
		f.answers, err = net.ListenPacket("ip4:tcp", "10.128.2.99")
		return err
	})
	t.Cleanup(func() { f.answers.Close() })
	return f
}

// in calls do in the namespace of a pod.
func (f *forger) in(pod string, do func() error) {
	f.t.Helper()
	ns, err := netns.Open(f.box + "-pod-shop." + pod)
	if err == nil {
		err = errors.Join(ns.Do(do), ns.Close())
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

// send sends a first packet of the client's to web by a pod's device, and returns its port.
func (f *forger) send(by string) uint16 {
	f.t.Helper()
	f.port++
	to := netip.MustParseAddrPort("10.128.1.10:8080")
	f.in(by, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, syn(netip.AddrPortFrom(netip.MustParseAddr("10.128.2.99"), f.port), to), 0,
			&unix.SockaddrInet4{Addr: to.Addr().As4()})
	})
	return f.port
}

// answered returns the port of the next packet that is answered, 0 where none is for a while.
func (f *forger) answered(wait time.Duration) uint16 {
	f.answers.SetReadDeadline(time.Now().Add(wait))
	b := make([]byte, 100)
	if n, _, err := f.answers.ReadFrom(b); err != nil || n < 4 {
		return 0
	}
	return binary.BigEndian.Uint16(b[2:])
}

// A changed configuration switches the check of sources off and on, where a pod's packets come in by another device
// than its own.
func TestSourceCheckFollowsTheConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "fairlead.yaml")
	check := func(value string) { policyMode(t, file, "Enforce, engine: nftables, sourceCheck: "+value) }
	check("Never")
	name, _ := boxOf(t, []string{"--network", "wires"}, "--config", file)
	f := newForger(t, name)
	if p := f.send("cart-1"); f.answered(5*time.Second) != p {
		t.Error("a packet by another device is dropped though sources are not checked")
	}
	contains(t, status(t, name, "b"), `"sourceCheck":false`, "SourcesNotChecked")
	check("Always")
	drops := func() bool { // since the chains were written
		out := must(t, "ip", "netns", "exec", name+"-node-b", "nft", "list", "chain", "inet", "fairlead-policy", "forged")
		return !strings.Contains(out, "counter packets 0 ")
	}
	eventually(t, "a packet by another device is dropped", func() bool {
		f.send("cart-1")
		return drops()
	})
	forged := f.send("cart-1")
	for p := f.send("client"); ; {
		switch f.answered(20 * time.Second) {
		case p:
		case forged:
			t.Error("a packet by another device is answered")
			continue
		case 0:
			t.Error("the pod's own packet is not answered")
		default:
			continue // from before it was dropped
		}
		break
	}
	if page := status(t, name, "b"); !strings.Contains(page, `"sourceCheck":true`) ||
		strings.Contains(page, "SourcesNotChecked") {
		t.Errorf("the status says nothing of it: %s", page)
	}
	check("Never")
	last := f.port
	eventually(t, "a packet by another device is answered", func() bool {
		f.send("cart-1")
		return f.answered(100*time.Millisecond) > last
	})
}
