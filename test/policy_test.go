package test_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
	if mode == "ebpf" { // the guard of the agents' own network turns the fast path off
		network = []string{"--network", "wires"}
	}
	name, dir := boxOf(t, network, "--mode", mode)
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
	show := onNode(name, "a", dir, "show", "--mode", mode)
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
