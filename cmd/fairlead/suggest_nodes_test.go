package main

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source/manifest"
)

// nodeYAML returns a Node whose number is the last of its addresses.
func nodeYAML(name string, n int) string {
	return fmt.Sprintf(`
---
apiVersion: v1
kind: Node
metadata: {name: %s}
spec: {podCIDRs: [10.128.%d.0/24, "fd00:128:%[2]d::/64"]}
status: {addresses: [{type: InternalIP, address: 172.18.0.1%[2]d}, {type: InternalIP, address: "fd00:18::1%[2]d"}]}
`, name, n)
}

// podYAML returns a Pod of namespace t.
func podYAML(name, node, labels, ip, spec string) string {
	return fmt.Sprintf(`
---
apiVersion: v1
kind: Pod
metadata: {namespace: t, name: %s, labels: {%s}}
spec: {nodeName: %s, %s}
status: {phase: Running, podIPs: [{ip: %s}]}
`, name, labels, node, spec, ip)
}

// twoNodes is two nodes with an exporter in the network of each, and pods.
var twoNodes = nodeYAML("a", 1) + nodeYAML("b", 2) +
	podYAML("exp-a", "a", "app: exporter", "172.18.0.11", "hostNetwork: true, containers: [{name: c, ports: "+
		"[{containerPort: 9100}]}]") +
	podYAML("exp-b", "b", "app: exporter", "172.18.0.12", "hostNetwork: true, containers: [{name: c, ports: "+
		"[{containerPort: 9100}]}]") +
	podYAML("web", "a", "app: web", "10.128.1.10}, {ip: 'fd00:128:1::10'", "containers: [{name: c, ports: "+
		"[{containerPort: 8080}]}]") +
	podYAML("client", "a", "app: client", "10.128.1.20", "containers: [{name: c}]")

// theDefinition is all that is read of the definition of ClusterNetworkPolicies.
const theDefinition = `
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: clusternetworkpolicies.policy.networking.k8s.io}
`

// nodeFlow is a connection of pods, by namespace/name, or addresses.
type nodeFlow struct {
	from, to string
	port     uint16
}

// nodeFlows writes what both nodes record. Pods have the labels of their names here, besides those given.
func nodeFlows(t *testing.T, flows []nodeFlow, labels map[string]map[string]string) string {
	t.Helper()
	ips := map[string]string{"t/client": "10.128.1.20", "t/web": "10.128.1.10", "t/web to fd": "fd00:128:1::10"}
	at := time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)
	f := &flowlog.File{Header: flowlog.Header{Node: "a", Start: at, End: at.Add(time.Hour)},
		Pods: map[string]flowlog.Pod{}}
	end := func(name, other string, n int) flowlog.End {
		if a, err := netip.ParseAddr(name); err == nil {
			return flowlog.End{Addr: a}
		}
		l := labels[name]
		if l == nil {
			l = map[string]string{"app": strings.TrimPrefix(name, "t/")}
		}
		f.Pods[name] = flowlog.Pod{Name: name, Node: "a", Labels: l}
		ip := ips[name]
		if strings.HasPrefix(other, "fd") {
			ip = ips[name+" to fd"]
		}
		if ip == "" {
			ip = fmt.Sprintf("10.128.1.%d", 100+n)
		}
		return flowlog.End{Addr: netip.MustParseAddr(ip), Pod: name}
	}
	for i, c := range flows {
		f.Flows = append(f.Flows, flowlog.Flow{Client: end(c.from, c.to, i), Server: end(c.to, c.from, i),
			Protocol: model.TCP, Port: c.port, Count: 1})
	}
	var b bytes.Buffer
	file := filepath.Join(t.TempDir(), "a.flows")
	if err := f.Write(&b); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// suggested returns the policies that are suggested, which the same flows must pass.
func suggested(t *testing.T, flows, objects string) string {
	t.Helper()
	dir := folder(t, objects)
	text, code := command(t, "policy", "suggest", flows, "--source", dir)
	if code != 0 {
		t.Fatalf("exit status %d: %s", code, text)
	}
	file := write(t, t.TempDir(), "suggested", text)
	if _, problems, err := manifest.Load(file); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v: %s", err, problems, text)
	}
	if got, code := command(t, "policy", "whatif", file, "--only", "--flows", flows, "--source", dir); code != 0 {
		t.Errorf("whatif: exit status %d: %s\n%s", code, got, text)
	}
	return text
}

// Addresses of nodes are named, those in the ranges of pods too, with who listens there and what breaks.
func TestSuggestNamesNodes(t *testing.T) {
	flows := nodeFlows(t, []nodeFlow{{"t/client", "172.18.0.11", 9100}, {"t/client", "172.18.0.12", 9100},
		{"t/web", "172.18.0.11", 10250}, {"t/client", "198.51.100.7", 9100}, {"10.128.2.1", "t/web", 8080},
		{"fd00:128:2::1", "t/web", 8080}}, nil)
	text := suggested(t, flows, twoNodes)
	for _, want := range []string{
		`    - ipBlock: {cidr: "172.18.0.11/32"} # node a; host-network pods that listen: t/exporter` + "\n",
		`    - ipBlock: {cidr: "172.18.0.12/32"} # node b; host-network pods that listen: t/exporter` + "\n",
		`    - ipBlock: {cidr: "172.18.0.11/32"} # node a` + "\n    ports:\n    - {port: 10250",
		`    - ipBlock: {cidr: "198.51.100.7/32"}` + "\n",
		`    - ipBlock: {cidr: "10.128.2.1/32"} # node b, by its address in the range of its pods` + "\n",
		"  # 2 connections\n  #   a node that comes later, or gets another address, is denied until its address stands " +
			"here\n",
		"# To all nodes on one port connect t/client: the kind ClusterNetworkPolicy with nodes as peers",
		"  #   what comes from a node is its own, or of clients that it masquerades\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("want %q: %s", want, text)
		}
	}
	if strings.Contains(text, "Left out") || strings.Contains(text, "\nkind: ClusterNetworkPolicy") {
		t.Errorf("connections left out, or a ClusterNetworkPolicy where there is no such kind: %s", text)
	}
}

// Addresses of many nodes are joined as others are, and still named.
func TestSuggestNamesJoinedNodes(t *testing.T) {
	var nodes string
	var flows []nodeFlow
	for n := range 19 {
		nodes += nodeYAML(fmt.Sprintf("n%02d", n+10), n+10)
		if n > 0 {
			flows = append(flows, nodeFlow{"t/client", fmt.Sprint("172.18.0.1", n+10), 10250})
		}
	}
	text := suggested(t, nodeFlows(t, flows, nil), twoNodes+nodes)
	want := `    - ipBlock: {cidr: "172.18.0.0/24"} # nodes n11, n12,`
	if !strings.Contains(text, want) || !strings.Contains(text, " n26 and 2 more\n") ||
		!strings.Contains(text, "18 addresses were joined to 1 CIDRs") {
		t.Errorf("want %q: %s", want, text)
	}
}

// Where all nodes were seen, a ClusterNetworkPolicy allows them and those that come later, at these ports alone.
func TestSuggestAllowsAllNodes(t *testing.T) {
	flows := nodeFlows(t, []nodeFlow{{"t/client", "172.18.0.11", 9100}, {"t/client", "172.18.0.12", 9100},
		{"t/client", "172.18.0.12", 10250}, {"t/client", "198.51.100.7", 9100}, {"t/web", "172.18.0.11", 9100},
		{"t/web", "fd00:18::12", 9100}}, nil)
	text := suggested(t, flows, twoNodes+theDefinition)
	want := `---
apiVersion: policy.networking.k8s.io/v1beta1
kind: ClusterNetworkPolicy
metadata:
  name: "suggested-t.client"
spec:
  tier: Admin
  priority: 1000
  subject:
    pods:
      namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: "t"}}
      podSelector: {"matchLabels":{"app":"client"}}
  egress:
  # 2 connections
  #   all 2 nodes were seen; those that come later are allowed too
  #   host-network pods that listen: t/exporter
  - action: Accept
    to:
    - nodes: {}
    protocols:
    - tcp: {destinationPort: {number: 9100}}
`
	if !strings.Contains(text, want) || strings.Count(text, `cidr: "172.18`) != 1 ||
		strings.Count(text, "\nkind: ClusterNetworkPolicy") != 2 {
		t.Errorf("want %s in %s", want, text)
	}
	grown := folder(t, twoNodes+nodeYAML("c", 3)+"---\n"+text)
	expectations := write(t, t.TempDir(), "e", `
apiVersion: fairlead.dev/v1alpha1
kind: PolicyExpectations
expectations:
- {from: [t/client, t/web], to: [node/a, node/b, node/c], port: 9100, expect: allowed}
- {from: t/client, to: [node/a, node/c], port: 10250, expect: denied}
- {from: t/client, to: [node/b, "198.51.100.7"], port: [9101, 443], expect: denied}
`)
	if got, code := command(t, "policy", "check", expectations, "--source", grown); code != 0 {
		t.Errorf("exit status %d: %s", code, got)
	}
}

// A policy for pods of Jobs selects those of later runs, and none by labels of one run.
func TestSuggestSelectsLaterRuns(t *testing.T) {
	run := func(n int, more map[string]string) map[string]string {
		job := fmt.Sprint("nightly-", n)
		l := map[string]string{"batch.kubernetes.io/job-name": job, "job-name": job,
			"batch.kubernetes.io/controller-uid": fmt.Sprint("u", n), "controller-uid": fmt.Sprint("u", n),
			"batch.kubernetes.io/job-completion-index": "0"}
		maps.Copy(l, more)
		return l
	}
	labels := map[string]map[string]string{"t/nightly-1-x": run(1, map[string]string{"team": "a"}),
		"t/nightly-2-x": run(2, map[string]string{"team": "a"}), "t/app-1-x": run(3, map[string]string{"app": "report"}),
		"t/bare-1-x": run(4, nil)}
	var flows []nodeFlow
	for name := range labels {
		flows = append(flows, nodeFlow{name, "t/web", 8080})
	}
	text := suggested(t, nodeFlows(t, flows, labels), twoNodes+
		podYAML("nightly-3-x", "a", "team: a, job-name: nightly-3, controller-uid: u9", "10.128.1.90", "containers: "+
			"[{name: c}]")+
		podYAML("app-2-x", "a", "app: report, job-name: app-2", "10.128.1.91", "containers: [{name: c}]"))
	for _, want := range []string{`podSelector: {"matchLabels":{"team":"a"}}`, `podSelector: {"matchLabels":{"app":"report"}}`,
		"of pods without labels that outlive them, which no selector stands for: 1"} {
		if !strings.Contains(text, want) {
			t.Errorf("want %q: %s", want, text)
		}
	}
	for _, l := range []string{"job-name", "controller-uid", "completion-index", "nightly-"} {
		if strings.Contains(text, l) {
			t.Errorf("%s is of one run: %s", l, text)
		}
	}
}
