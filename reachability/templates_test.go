package reachability

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// repository is manifests as a Git repository or a chart has them: no Pods, EndpointSlices or Nodes.
const repository = `
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {kubernetes.io/metadata.name: shop}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {namespace: shop, name: web}
spec:
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: c, image: example.com/c, ports: [{name: http, containerPort: 8080}]}]}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {namespace: shop, name: db}
spec:
  serviceName: db
  replicas: 3
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db}}
    spec: {containers: [{name: c, image: example.com/c, ports: [{name: sql, containerPort: 5432}]}]}
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: db}
spec: {selector: {app: db}, ports: [{port: 1, targetPort: sql}]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {namespace: shop, name: db}
spec:
  podSelector: {matchLabels: {app: db}}
  ingress: [{from: [{podSelector: {matchLabels: {app: web}}}], ports: [{port: 5432}]}]
`

// templates returns the cluster of YAML texts, with the pod templates in them.
func templates(t *testing.T, texts ...string) *Cluster {
	t.Helper()
	file := filepath.Join(t.TempDir(), "all.yaml")
	if err := os.WriteFile(file, []byte(strings.Join(texts, "\n---\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	objects, problems, err := manifest.LoadTemplates(file)
	if err != nil || problems != nil {
		t.Fatal(err, problems)
	}
	return New(objects, Options{Policies: policy.Config{ImpliedNamespaces: true}})
}

// checks evaluates expectations: those of want "" hold, others have the text in what is printed.
func checks(t *testing.T, c *Cluster, l []struct{ item, want string }) {
	t.Helper()
	for _, w := range l {
		e, err := ReadExpectations("f", []byte(head+"- "+w.item))
		if err != nil {
			t.Fatal(err)
		}
		r := c.Check(e)[0]
		if got := strings.Join(r.Lines(), "\n"); r.OK() != (w.want == "") || !strings.Contains(got, w.want) {
			t.Errorf("%s: %q; want %q", w.item, got, w.want)
		}
	}
}

func TestTemplatesStandForPods(t *testing.T) {
	c := templates(t, repository)
	m, err := NewMatrix(c, nil)
	if err != nil || !strings.HasPrefix(m.Summary(), "2 pod templates of 2 workloads;") {
		t.Fatal(err, m.Summary())
	}
	for pair, want := range map[[2]string]string{
		{"shop/web", "shop/db"}:  "sql 5432/tcp allowed, rest denied",
		{"shop/db", "shop/db"}:   "none",
		{"outside", "shop/db"}:   "none",
		{"shop/db", "shop/web"}:  "all",
		{"shop/web", "shop/web"}: "all",
	} {
		if got := m.text(find(t, m, pair[0]), find(t, m, pair[1])); got != want {
			t.Errorf("%v: %s; want %s", pair, got, want)
		}
	}
	web, db := m.Groups[find(t, m, "shop/web")].Members, m.Groups[find(t, m, "shop/db")].Members
	if !slices.Equal(web, []string{"shop/deployment/web"}) || len(db) != 3 || db[2] != "shop/statefulset/db-2" {
		t.Errorf("members %q, %q", web, db)
	}
	checks(t, c, []struct{ item, want string }{
		{"{from: shop/deployment/web, to: shop/db, port: 1, expect: allowed, by: shop/db}", ""},
		{"{from: shop/web, to: shop/db-2, port: sql, expect: allowed}", ""},
		{"{from: [shop/app=db, outside], to: shop/app=db, port: sql, expect: denied}", ""},
		{"{from: shop/deployment/wbe, to: shop/db, port: 1, expect: denied}", `did you mean "shop/deployment/web"?`},
		{"{from: shop/web, to: shop/db, port: 1, expect: denied}", "shop/deployment/web-0 → shop/statefulset/db-0:5432/tcp " +
			"is allowed: ingress of shop/statefulset/db-0: allowed by NetworkPolicy shop/db ingress[0]"},
	})
	if l := c.Unmatched(); l != nil {
		t.Errorf("unmatched: %v", l)
	}
}

func TestEachWorkloadKindHasATemplate(t *testing.T) {
	const pod = `{metadata: {labels: {app: %s}}, spec: {containers: [{name: c, ports: [{name: p, containerPort: 7}]}]}}`
	for kind, spec := range map[string]string{
		"Deployment":  "apps/v1 {selector: {matchLabels: {app: x}}, template: " + pod + "}",
		"StatefulSet": "apps/v1 {serviceName: x, selector: {matchLabels: {app: x}}, template: " + pod + "}",
		"DaemonSet":   "apps/v1 {selector: {matchLabels: {app: x}}, template: " + pod + "}",
		"ReplicaSet":  "apps/v1 {selector: {matchLabels: {app: x}}, template: " + pod + "}",
		"Job":         "batch/v1 {template: " + pod + "}",
		"CronJob":     "batch/v1 {schedule: '@daily', jobTemplate: {spec: {template: " + pod + "}}}",
	} {
		version, of, _ := strings.Cut(fmt.Sprintf(spec, "x"), " ")
		c := templates(t, repository, fmt.Sprintf("apiVersion: %s\nkind: %s\nmetadata: {name: x, namespace: shop}\nspec: %s",
			version, kind, of))
		checks(t, c, []struct{ item, want string }{
			{"{from: shop/app=x, to: shop/db, port: 1, expect: denied, by: shop/db}", ""},
			{"{from: shop/web, to: shop/" + strings.ToLower(kind) + "/x, port: p, expect: allowed}", ""},
			{"{from: shop/x, to: shop/x, port: 7, expect: allowed}", ""},
		})
	}
}

// Services without EndpointSlices lead to the templates that they select, by numbers of named ports, whatever type they
// are of.
func TestServicesLeadToTemplates(t *testing.T) {
	service := func(name, spec string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: shop}\nspec: %s", name, spec)
	}
	c := templates(t, repository,
		service("vip", "{clusterIP: 10.96.0.7, selector: {app: db}, ports: [{port: 80, targetPort: sql}]}"),
		service("headless", "{clusterIP: None, selector: {app: db}, ports: [{name: sql, port: 80, targetPort: sql}]}"),
		service("number", "{type: NodePort, selector: {app: db}, ports: [{name: x, port: 80, targetPort: 5433}]}"),
		service("slip", "{selector: {app: db}, ports: [{name: x, port: 80, targetPort: sqll}, {name: z, port: 5432}]}"),
		service("none", "{selector: {app: gone}, ports: [{port: 80}]}"))
	checks(t, c, []struct{ item, want string }{
		{"{from: shop/web, to: [shop/vip, shop/headless], port: 80, expect: allowed, by: shop/db}", ""},
		{"{from: outside, to: [shop/vip, shop/headless, shop/number], port: 80, expect: denied, by: shop/db}", ""},
		{"{from: shop/web, to: shop/number, port: 80, expect: denied, by: shop/db}", ""},
		{"{from: shop/web, to: shop/slip, port: z, expect: allowed}", ""},
		{"{from: shop/web, to: shop/slip, port: x, expect: denied}", "neither a cluster IP nor an endpoint at port x"},
		{"{from: shop/web, to: shop/none, port: 80, expect: denied}", "neither a cluster IP nor an endpoint at port 80"},
	})
	var got []string
	for _, p := range c.Unmatched() {
		got = append(got, p.String())
	}
	for i, want := range []string{`Service shop/slip: spec.ports[0].targetPort: no container of its pods has a port named ` +
		`"sqll" of TCP`, "Service shop/none: spec.selector: the source has no pod that it matches"} {
		if len(got) != 2 || !strings.HasPrefix(got[i], want) {
			t.Errorf("%q; want %q", got, want)
		}
	}
}

// What a repository lacks is named, each peer once, and the rest of the rules is evaluated.
func TestUnmatchedSelectorsAreNamed(t *testing.T) {
	policies := `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: %s, namespace: shop}
spec:
  podSelector: {matchLabels: {app: %[2]s}}
  policyTypes: [Egress]
  egress:
  - to: [{podSelector: {matchLabels: {app: db}}}]
  - to:
    - podSelector: {matchLabels: {k8s-app: kube-dns}}
      namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kube-system}}
`
	cluster := `
apiVersion: policy.networking.k8s.io/v1beta1
kind: ClusterNetworkPolicy
metadata: {name: nodes}
spec:
  tier: Admin
  priority: 1
  subject: {namespaces: {}}
  egress: [{action: Accept, to: [{nodes: {}}, {namespaces: {matchLabels: {team: far}}}]}]
`
	c := templates(t, repository, fmt.Sprintf(policies, "a", "web"), fmt.Sprintf(policies, "b", "web"),
		fmt.Sprintf(policies, "old", "gone"), cluster)
	var got []string
	for _, p := range c.Unmatched() {
		got = append(got, p.String())
	}
	want := []string{
		"ClusterNetworkPolicy nodes: spec.egress[0]: the source has no Node that matches peer nodes{}: connections with it " +
			"are not evaluated (MatchesNothing)",
		"ClusterNetworkPolicy nodes: spec.egress[0]: the source has no pod that matches peer pods{} in " +
			"namespaces{team=far}: connections with it are not evaluated (MatchesNothing)",
		"NetworkPolicy shop/a: spec.egress[1]: the source has no pod that matches peer pods{k8s-app=kube-dns} in " +
			"namespaces{kubernetes.io/metadata.name=kube-system} (further rules with it: 1): connections with it are not " +
			"evaluated (MatchesNothing)",
		"NetworkPolicy shop/old: the source has no pod that it selects: nothing of it is evaluated (MatchesNothing)",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	checks(t, c, []struct{ item, want string }{
		{"{from: shop/web, to: shop/db, port: 1, expect: allowed}", ""},
		{"{from: shop/web, to: outside, port: 443, expect: denied}", ""},
		{"{from: shop/web, to: kube-system/k8s-app=kube-dns, port: 53/udp, expect: allowed}", "matches no running pod"},
	})
}

// Where there are pods of a template, they count and the template doesn't.
func TestTemplatesOfRunningPodsDoNotCount(t *testing.T) {
	running := `
apiVersion: v1
kind: Pod
metadata: {name: web-5d9c-x7, namespace: shop, labels: {app: web, pod-template-hash: 5d9c}}
spec: {nodeName: a, containers: [{name: c, ports: [{name: http, containerPort: 8080}]}]}
status: {phase: Running, podIPs: [{ip: 10.244.0.2}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db-0, namespace: shop, labels: {app: db, statefulset.kubernetes.io/pod-name: db-0}}
spec: {nodeName: a, containers: [{name: c}]}
status: {phase: Failed, podIPs: [{ip: 10.244.0.3}]}
---
apiVersion: v1
kind: Pod
metadata: {name: alone, namespace: shop, labels: {app: alone}}
spec: {containers: [{name: c}]}
`
	c := templates(t, repository, running)
	m, err := NewMatrix(c, []string{"shop"})
	if err != nil || !strings.HasPrefix(m.Summary(), "2 pods and 1 pod templates of 3 workloads;") {
		t.Fatal(err, m.Summary())
	}
	if web := m.Groups[find(t, m, "shop/web")].Members; !slices.Equal(web, []string{"shop/web-5d9c-x7"}) {
		t.Errorf("members %q", web)
	}
	checks(t, c, []struct{ item, want string }{
		{"{from: shop/app=web, to: shop/db, port: 1, expect: allowed}", ""},
		{"{from: shop/alone, to: shop/db, port: 1, expect: denied}", ""}, // no status: a pod that no cluster runs
	})
	seen := map[string]bool{}
	for a := range c.pods {
		seen[a.String()] = true
	}
	if len(seen) != 1+1+3 {
		t.Errorf("addresses %v: want one of each pod", seen)
	}
}

// Policies for the internet don't match pods of a repository, whatever range the cluster's pods have.
func TestTemplatesHaveAddressesOfPods(t *testing.T) {
	internet := `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: out, namespace: shop}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Egress]
  egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0, except: [10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16]}}]}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {namespace: shop, name: host}
spec:
  selector: {matchLabels: {app: host}}
  template: {metadata: {labels: {app: host}}, spec: {hostNetwork: true, containers: [{name: c}]}}
---
apiVersion: v1
kind: Service
metadata: {name: host, namespace: shop}
spec: {selector: {app: host}, ports: [{port: 9100}]}
`
	node := `
apiVersion: v1
kind: Node
metadata: {name: a}
spec: {podCIDRs: ["fd00:1::/64"]}
status: {addresses: [{type: InternalIP, address: "fd99::1"}]}
`
	c := templates(t, repository, internet)
	checks(t, c, []struct{ item, want string }{
		{"{from: shop/web, to: outside, port: 443, expect: allowed}", ""},
		{"{from: shop/web, to: shop/app=db, port: 5432, expect: denied}", ""},
		{"{from: shop/web, to: shop/host, port: 9100, expect: allowed}", ""}, // no selector matches it: it is a host
	})
	c = templates(t, repository, internet, node)
	for a := range c.pods {
		if !a.Is6() || c.NodeOf(a) != "" {
			t.Errorf("%s on node %q: want addresses of the Node's range, and no node", a, c.NodeOf(a))
		}
	}
	checks(t, c, []struct{ item, want string }{
		{"{from: shop/web, to: outside, port: 443, expect: denied}", ""}, // 0.0.0.0/0 is IPv4 alone
		{"{from: shop/app=db, to: shop/host, port: 9100, expect: allowed}", ""},
	})
}

func TestCompareTemplates(t *testing.T) {
	before, after := templates(t, repository), templates(t, strings.ReplaceAll(repository, "port: 5432}", "port: 5433}"),
		strings.NewReplacer("name: web", "name: more", "app: web", "app: more").Replace(strings.Split(repository, "---")[1]))
	c, err := Compare(before, after)
	if err != nil || c.Apart != 1 || len(c.Allowed) != 1 || c.Allowed[0].Summary != "5433/tcp" || len(c.Denied) != 1 {
		t.Errorf("%v: %+v", err, c)
	}
}

// Objects without templates are evaluated as they are.
func TestNoTemplatesNothingChanges(t *testing.T) {
	objects := objectsOf(t, world)
	got := withTemplates(objects, nil)
	if !slices.EqualFunc(got, objects, func(a, b source.Object) bool { return a == b }) {
		t.Errorf("%d objects of %d", len(got), len(objects))
	}
}
