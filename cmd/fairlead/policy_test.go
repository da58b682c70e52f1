package main

import (
	"bytes"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source/manifest"
)

// command runs fairlead, and returns what it prints and its exit status.
func command(t *testing.T, args ...string) (string, int) {
	t.Helper()
	var b bytes.Buffer
	c := rootCommand()
	c.SetOut(&b)
	c.SetErr(&b)
	c.SetArgs(args)
	err := c.ExecuteContext(t.Context())
	s := cli.Status{Code: 1}
	if err == nil {
		return b.String(), 0
	}
	if errors.As(err, &s); s.Err != nil || s == (cli.Status{Code: 1}) {
		b.WriteString(err.Error())
	}
	return b.String(), s.Code
}

const shopPolicies = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: closed, namespace: shop}
spec: {podSelector: {}, policyTypes: [Ingress]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress: [{from: [{podSelector: {matchLabels: {app: client}}}], ports: [{port: http}]}]
`

// shop returns a folder with the Nodes, pods and Services of examples/shop, and these policies.
func shop(t *testing.T, policies string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"cluster", "client", "web", "db", "cart"} {
		b, err := os.ReadFile("../../examples/shop/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		write(t, dir, name, string(b))
	}
	write(t, dir, "policies", policies)
	return dir
}

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	file := filepath.Join(dir, name+".yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestPolicyCheck(t *testing.T) {
	dir := shop(t, shopPolicies)
	head := "apiVersion: fairlead.dev/v1alpha1\nkind: PolicyExpectations\nexpectations:\n"
	good := write(t, t.TempDir(), "good", head+"- {from: shop/client, to: shop/web, port: http, expect: allowed}\n")
	// a file of expectations may stand among the manifests
	bad := write(t, dir, "bad", head+"- {from: shop/client, to: shop/db, port: sql, expect: allowed}\n")
	slip := write(t, t.TempDir(), "slip", head+"- {form: shop/client, to: shop/db, port: sql, expect: allowed}\n")
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{good, "--source", dir}, 0, "1 of 1 expectations hold"},
		{[]string{good, bad, "--source", dir}, 1, "FAILED"},
		{[]string{bad, "--source", dir}, 1, "isolated by NetworkPolicy shop/closed ingress"},
		{[]string{bad, "--source", dir, "-o", "junit"}, 1, "<failure message="},
		{[]string{bad, "--source", dir, "-o", "json"}, 1, `"ok": false`},
		{[]string{slip, "--source", dir}, 2, `slip.yaml:4: unknown field "form": did you mean "from"?`},
		{[]string{good, "--source", dir + "/none"}, 2, "none"},
		{[]string{good, "--source", dir, "-o", "xml"}, 2, "invalid --output"},
		{[]string{"--source", dir}, 2, "requires at least 1 arg"},
	} {
		got, code := command(t, append([]string{"policy", "check"}, c.args...)...)
		if code != c.status || !strings.Contains(got, c.want) || strings.Contains(got, "warning") {
			t.Errorf("%q: exit status %d, want %d and %q: %s", c.args, code, c.status, c.want, got)
		}
	}
}

// What examples/shop says of its policies holds, and fails without them.
func TestShopExpectations(t *testing.T) {
	const file = "../../examples/shop/expectations.yaml"
	if got, code := command(t, "policy", "check", file, "--source", "../../examples/shop"); code != 0 {
		t.Errorf("exit status %d: %s", code, got)
	}
	if got, code := command(t, "policy", "check", file, "--source", shop(t, shopPolicies)); code != 1 {
		t.Errorf("with other policies: exit status %d: %s", code, got)
	}
}

// The table of the matrix fits the terminal, in parts if it must, and the page is written.
func TestPolicyMatrix(t *testing.T) {
	dir, page := shop(t, shopPolicies), filepath.Join(t.TempDir(), "page.html")
	for _, width := range []string{"40", "80"} {
		t.Setenv("COLUMNS", width)
		got, code := command(t, "policy", "matrix", "--source", dir)
		if code != 0 || !strings.Contains(got, "8080") || strings.Count(got, "outside") < 2 {
			t.Errorf("exit status %d: %s", code, got)
		}
		for line := range strings.Lines(got) {
			if n := len([]rune(strings.TrimRight(line, "\n"))); width == "80" && n > 80 || n > 60 && width == "40" {
				t.Errorf("%s columns, but %d: %s", width, n, line)
			}
		}
	}
	got, code := command(t, "policy", "matrix", "--source", dir, "--html", page)
	if b, err := os.ReadFile(page); err != nil || code != 0 || !strings.Contains(string(b), "shop/web") {
		t.Errorf("%s: exit status %d, %v", got, code, err)
	}
	if got, code := command(t, "policy", "matrix", "--source", dir, "--namespace", "sohp"); code != 1 ||
		!strings.Contains(got, `did you mean namespace "shop"?`) {
		t.Errorf("exit status %d: %s", code, got)
	}
}

func TestPlanAgainst(t *testing.T) {
	old := shop(t, shopPolicies)
	now := shop(t, strings.ReplaceAll(shopPolicies, "app: client", "app: cart"))
	got, code := command(t, "plan", "--source", now, "--against", old)
	for _, want := range []string{"NEWLY ALLOWED", "NEWLY DENIED", "shop/cart      shop/web  8080/tcp",
		"1 newly allowed, 1 newly denied"} {
		if code != 1 || !strings.Contains(got, want) {
			t.Errorf("exit status %d, want 1 and %q: %s", code, want, got)
		}
	}
	if got, code := command(t, "plan", "--source", old, "--against", old); code != 0 {
		t.Errorf("no change: exit status %d: %s", code, got)
	}
	if got, code := command(t, "plan", "--source", old, "--against", old+"/none"); code != 2 {
		t.Errorf("no such folder: exit status %d: %s", code, got)
	}
}

// otherPolicies are of kinds that are not evaluated, as clusters have them.
const otherPolicies = `
apiVersion: policy.networking.k8s.io/v1alpha1
kind: AdminNetworkPolicy
metadata: {name: deny-clients}
spec:
  priority: 10
  subject: {namespaces: {}}
  ingress: [{action: Deny, from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: client}}}}]}]
---
apiVersion: policy.networking.k8s.io/v1alpha1
kind: BaselineAdminNetworkPolicy
metadata: {name: default}
spec: {subject: {namespaces: {}}}
---
apiVersion: crd.projectcalico.org/v1
kind: GlobalNetworkPolicy
metadata: {name: g}
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: c, namespace: shop}
`

// Policies of kinds that are not evaluated are named by every command that evaluates policies.
func TestOtherPoliciesAreNamed(t *testing.T) {
	dir, old := shop(t, shopPolicies+"---"+otherPolicies), shop(t, shopPolicies)
	file := write(t, t.TempDir(), "e", "apiVersion: fairlead.dev/v1alpha1\nkind: PolicyExpectations\nexpectations:\n"+
		"- {from: shop/client, to: shop/web, port: http, expect: allowed}\n")
	flows := shopFlows(t)[0]
	const want = "4 policies of kinds that Fairlead doesn't evaluate: 1 AdminNetworkPolicy, " +
		"1 BaselineAdminNetworkPolicy, 1 CiliumNetworkPolicy.cilium.io, 1 GlobalNetworkPolicy.crd.projectcalico.org; " +
		"fairlead policy convert"
	for _, args := range [][]string{{"policy", "matrix"}, {"policy", "check", file}, {"policy", "suggest", flows},
		{"policy", "whatif", "--flows", flows}, {"plan", "--against", old}} {
		if got, _ := command(t, append(args, "--source", dir)...); !strings.Contains(got, want) {
			t.Errorf("%q: want %q: %s", args, want, got)
		}
		if got, _ := command(t, append(args, "--source", old)...); strings.Contains(got, "doesn't evaluate") {
			t.Errorf("%q names policies that aren't there: %s", args, got)
		}
	}
}

// What is converted decides, and is left out where it has no counterpart. Converting again changes nothing.
func TestPolicyConvert(t *testing.T) {
	file := write(t, t.TempDir(), "other", otherPolicies)
	got, code := command(t, "policy", "convert", "-f", file)
	for _, want := range []string{"name: deny-clients", "name: baseline-default", "warning: " + file +
		":15: GlobalNetworkPolicy.crd.projectcalico.org g: policies of this kind are not converted"} {
		if code != 1 || !strings.Contains(got, want) {
			t.Errorf("exit status %d, want 1 and %q: %s", code, want, got)
		}
	}
	var out, errs bytes.Buffer
	c := rootCommand()
	c.SetIn(strings.NewReader(strings.Split(otherPolicies, "---")[0]))
	c.SetOut(&out)
	c.SetErr(&errs)
	c.SetArgs([]string{"policy", "convert", "-f", "-"})
	if err := c.ExecuteContext(t.Context()); err != nil || errs.Len() > 0 {
		t.Fatal(err, errs.String())
	}
	now, old := shop(t, shopPolicies+out.String()), shop(t, shopPolicies)
	got, code = command(t, "plan", "--source", now, "--against", old)
	if code != 1 || !strings.Contains(got, "Admin deny-clients") || strings.Contains(got, "NEWLY ALLOWED") {
		t.Errorf("the converted policy: exit status %d: %s", code, got)
	}
	converted := write(t, t.TempDir(), "converted", strings.ReplaceAll(out.String(), "v1beta1", "v1alpha2"))
	again, code := command(t, "policy", "convert", "-f", converted)
	if code != 0 || again != out.String() {
		t.Errorf("exit status %d: %s", code, again)
	}
	before := shop(t, shopPolicies+strings.ReplaceAll(out.String(), "v1beta1", "v1alpha2"))
	if got, code := command(t, "plan", "--source", now, "--against", before); code != 0 {
		t.Errorf("v1alpha2 becomes v1beta1: exit status %d: %s", code, got)
	}
	for _, args := range [][]string{{"-f", write(t, t.TempDir(), "none", shopPolicies)}, {}, {"-f", file + "/none"}} {
		if got, code := command(t, append([]string{"policy", "convert"}, args...)...); code != 2 {
			t.Errorf("%q: exit status %d, want 2: %s", args, code, got)
		}
	}
}

func TestOverlay(t *testing.T) {
	below, _, err := manifest.Load(shop(t, shopPolicies))
	above, _, failed := manifest.Load(write(t, t.TempDir(), "p", shopPolicies))
	if err != nil || failed != nil || len(overlay(below, above)) != len(below) || overlay(below, above)[0] != above[0] {
		t.Error(err, failed, len(overlay(below, above)), len(below))
	}
}

// The objects of a cluster are evaluated as those of a folder, and files change them for plan.
func TestPoliciesOfACluster(t *testing.T) {
	dir := shop(t, shopPolicies)
	objects, _, err := manifest.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	api := httptest.NewServer(apiserver.New(objects...))
	defer api.Close()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, apiserver.Kubeconfig(api.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	got, code := command(t, "policy", "matrix", "-o", "json", "--kubeconfig", kubeconfig)
	if want, _ := command(t, "policy", "matrix", "-o", "json", "--source", dir); code != 0 || got != want {
		t.Errorf("exit status %d, of the cluster:\n%s\nof the folder:\n%s", code, got, want)
	}
	changed := write(t, t.TempDir(), "changed", strings.ReplaceAll(shopPolicies, "app: client", "app: cart"))
	got, code = command(t, "plan", "--source", changed, "--against", "cluster", "--kubeconfig", kubeconfig)
	if code != 1 || !strings.Contains(got, "1 newly allowed, 1 newly denied") {
		t.Errorf("plan: exit status %d: %s", code, got)
	}
}

// Policies of older kinds decide as before once they are converted, and what isn't converted is named.
func TestPlanAgainstOlderKinds(t *testing.T) {
	const pods = "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n---\napiVersion: v1\nkind: Pod\n" +
		"metadata: {name: web, namespace: shop}\nspec: {nodeName: a, containers: [{name: c}]}\n" +
		"status: {phase: Running, podIPs: [{ip: 10.0.0.1}]}\n---\napiVersion: v1\nkind: Pod\n" +
		"metadata: {name: client, namespace: shop}\nspec: {nodeName: a, containers: [{name: c}]}\n" +
		"status: {phase: Running, podIPs: [{ip: 10.0.0.2}]}\n"
	const older = "apiVersion: policy.networking.k8s.io/v1alpha1\nkind: AdminNetworkPolicy\nmetadata: {name: deny}\n" +
		"spec: {priority: 10, subject: {namespaces: {}}, ingress: [{name: d, action: Deny, from: [{namespaces: {}}]}]}\n" +
		"---\napiVersion: extensions/v1beta1\nkind: NetworkPolicy\nmetadata: {name: all, namespace: shop}\n" +
		"spec: {podSelector: {}, ingress: []}\n"
	old, now := t.TempDir(), t.TempDir()
	write(t, old, "pods", pods)
	write(t, now, "pods", pods)
	write(t, old, "policies", older)
	converted, code := command(t, "policy", "convert", "-f", filepath.Join(old, "policies.yaml"))
	if code != 0 {
		t.Fatalf("convert: exit status %d\n%s", code, converted)
	}
	write(t, now, "policies", converted)
	if got, code := command(t, "plan", "--source", now, "--against", old); code != 0 ||
		!strings.Contains(got, "0 newly allowed, 0 newly denied") {
		t.Errorf("exit status %d\n%s", code, got)
	}
	link := filepath.Join(t.TempDir(), "current") // as git-sync has it
	if err := os.Symlink(old, link); err != nil {
		t.Fatal(err)
	}
	if got, code := command(t, "plan", "--source", now, "--against", link); code != 0 {
		t.Errorf("by a link: exit status %d\n%s", code, got)
	}
	write(t, now, "policies", strings.Replace(converted, "action: Deny", "action: Accept", 1))
	got, code := command(t, "plan", "--source", now, "--against", old)
	if code != 1 || !strings.Contains(got, "shop/web") {
		t.Errorf("another action: exit status %d\n%s", code, got)
	}
}
