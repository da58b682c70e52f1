package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// chart is what a chart's output holds: workloads, a Service and policies, but no Pods, EndpointSlices or Nodes.
const chart = `
apiVersion: apps/v1
kind: Deployment
metadata: {namespace: shop, name: web}
spec:
  selector: {matchLabels: {app: web}}
  template: {metadata: {labels: {app: web}}, spec: {containers: [{name: c, ports: [{name: http, containerPort: 8080}]}]}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {namespace: shop, name: db}
spec:
  serviceName: db
  selector: {matchLabels: {app: db}}
  template: {metadata: {labels: {app: db}}, spec: {containers: [{name: c, ports: [{name: sql, containerPort: 5432}]}]}}
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: db}
spec: {selector: {app: db}, ports: [{port: 5432}]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {namespace: shop, name: db}
spec:
  podSelector: {matchLabels: {app: db}}
  ingress: [{from: [{podSelector: {matchLabels: {app: web}}}], ports: [{port: 5432}]}]
`

const chartExpectations = `
apiVersion: fairlead.dev/v1alpha1
kind: PolicyExpectations
expectations:
- {from: shop/web, to: shop/db, port: 5432, expect: allowed, by: shop/db}
- {from: [shop/app=db, outside], to: shop/db, port: 5432, expect: denied}
`

// dnsPolicy selects web, and allows DNS of a cluster, which no chart holds.
const dnsPolicy = `
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {namespace: shop, name: web}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Egress]
  egress:
  - {to: [{podSelector: {matchLabels: {app: db}}}]}
  - {to: [{podSelector: {matchLabels: {k8s-app: kube-dns}}, namespaceSelector: {}}], ports: [{port: 53, protocol: UDP}]}
`

func folder(t *testing.T, text string) string {
	t.Helper()
	dir := t.TempDir()
	write(t, dir, "all", text)
	return dir
}

// Manifests without Pods are checked by their pod templates, from a folder and from standard input, and what they lack
// is named without another exit status.
func TestPoliciesOfAChart(t *testing.T) {
	expectations := write(t, t.TempDir(), "e", chartExpectations)
	open := strings.Split(chart, "---\napiVersion: networking")[0]
	slip := strings.Replace(chart, "containers:", "containres:", 1)
	for _, c := range []struct {
		args         []string
		source       string
		status       int
		want, refuse string
	}{
		{[]string{"check", expectations}, chart, 0, "2 of 2 expectations hold", "warning"},
		{[]string{"check", expectations}, open, 1, "is allowed: no policy applies", "warning"},
		{[]string{"check", expectations}, slip, 2, "spec.template.spec.containres: there is no such field", "hold"},
		{[]string{"check", expectations}, chart + dnsPolicy, 0, "warning: NetworkPolicy shop/web: spec.egress[1]: the " +
			"source has no pod that matches peer pods{k8s-app=kube-dns} in namespaces{}", ""},
		{[]string{"check", expectations, "-o", "junit"}, chart, 0, `tests="2" failures="0"`, "warning"},
		{[]string{"matrix"}, chart, 0, "2 pod templates of 2 workloads", "warning"},
		{[]string{"matrix"}, chart, 0, "shop/web      5432", "10.244"},
		{[]string{"matrix", "-o", "json"}, chart, 0, `"shop/deployment/web"`, "10.244"},
	} {
		args := append([]string{"policy"}, c.args...)
		got, code := command(t, append(args, "--source", folder(t, c.source))...)
		if code != c.status || !strings.Contains(got, c.want) || c.refuse != "" && strings.Contains(got, c.refuse) {
			t.Errorf("%q: exit status %d, want %d and %q: %s", c.args, code, c.status, c.want, got)
		}
		piped(t, c.source)
		if again, code := command(t, append(args, "--source", "-")...); code != c.status || !strings.Contains(again, c.want) {
			t.Errorf("%q from standard input: exit status %d, want %d and %q: %s", c.args, code, c.status, c.want, again)
		}
	}
}

// piped has standard input hold a text, until the test ends.
func piped(t *testing.T, text string) {
	t.Helper()
	file, err := os.Open(write(t, t.TempDir(), "stdin", text))
	if err != nil {
		t.Fatal(err)
	}
	stdin := os.Stdin
	os.Stdin = file
	t.Cleanup(func() { os.Stdin = stdin; file.Close() })
}

// A change of a chart is compared by its templates, and flows of a cluster are replayed by them.
func TestPlanAndWhatifOfAChart(t *testing.T) {
	old, now := folder(t, chart), folder(t, strings.Replace(chart, "port: 5432}]}]", "port: 5433}]}]", 1))
	got, code := command(t, "plan", "--source", now, "--against", old)
	for _, want := range []string{"shop/web       shop/db  5433/tcp", "shop/web      shop/db  5432/tcp",
		"1 newly allowed, 1 newly denied"} {
		if code != 1 || !strings.Contains(got, want) {
			t.Errorf("exit status %d, want 1 and %q: %s", code, want, got)
		}
	}
	if got, code := command(t, "plan", "--source", old, "--against", old); code != 0 {
		t.Errorf("no change: exit status %d: %s", code, got)
	}
	flows := filepath.Join(t.TempDir(), "a.flows")
	if err := os.WriteFile(flows, []byte(`{"kind":"fairlead-flows","version":1,"node":"a","start":"2025-06-01T12:00:00Z",`+
		`"end":"2025-06-01T13:00:00Z","lost":0,"beyondLimit":0,"unclear":0}
{"pod":"shop/db-0","node":"a","labels":{"app":"db"}}
{"pod":"shop/web-5d9c-x7","node":"a","labels":{"app":"web","pod-template-hash":"5d9c"}}
{"from":{"ip":"10.0.0.2","pod":"shop/web-5d9c-x7"},"to":{"ip":"10.0.0.3","pod":"shop/db-0"},"protocol":6,"port":5432,`+
		`"connections":3}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, code := command(t, "policy", "whatif", "--flows", flows, "--source", old); code != 0 ||
		!strings.Contains(got, "1 recorded flows evaluated: 0 would be cut") {
		t.Errorf("exit status %d: %s", code, got)
	}
	if got, code := command(t, "policy", "whatif", "--flows", flows, "--source", now); code != 1 ||
		!strings.Contains(got, "1 recorded flows evaluated: 1 would be cut") {
		t.Errorf("of the change: exit status %d: %s", code, got)
	}
}
