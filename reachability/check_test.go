package reachability

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// world is two nodes with pods of two namespaces, and policies: shop/web lets bank come to http, everything else of
// shop is isolated for ingress; bank/out lets bank send to shop and DNS alone.
const world = `
apiVersion: v1
kind: Node
metadata: {name: a}
spec: {podCIDRs: [10.0.1.0/24, "fd00:1::/64"]}
status: {addresses: [{type: InternalIP, address: 192.168.0.1}, {type: InternalIP, address: "fd99::1"}]}
---
apiVersion: v1
kind: Node
metadata: {name: b}
spec: {podCIDRs: [10.0.2.0/24, "fd00:2::/64"]}
status: {addresses: [{type: InternalIP, address: 192.168.0.2}, {type: InternalIP, address: "fd99::2"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web-1, namespace: shop, labels: {app: web}}
spec: {nodeName: a, containers: [{name: c, ports: [{name: http, containerPort: 8080}, {name: admin, containerPort: 9000}]}]}
status: {phase: Running, podIPs: [{ip: 10.0.1.2}, {ip: "fd00:1::2"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web-2, namespace: shop, labels: {app: web}}
spec: {nodeName: b, containers: [{name: c, ports: [{name: http, containerPort: 8080}, {name: admin, containerPort: 9000}]}]}
status: {phase: Running, podIPs: [{ip: 10.0.2.2}, {ip: "fd00:2::2"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db, namespace: shop, labels: {app: db}}
spec: {nodeName: a, containers: [{name: c, ports: [{name: sql, containerPort: 5432}]}]}
status: {phase: Running, podIPs: [{ip: 10.0.1.3}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: bank, labels: {app: client}}
spec: {nodeName: b, containers: [{name: c}]}
status: {phase: Running, podIPs: [{ip: 10.0.2.4}, {ip: "fd00:2::4"}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1], type: NodePort, ports: [{name: http, port: 80, targetPort: http, nodePort: 30080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-4, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- {addresses: [10.0.1.2], nodeName: a, conditions: {ready: true}}
- {addresses: [10.0.2.2], nodeName: b, conditions: {ready: true}}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec: {clusterIP: None, ports: [{name: sql, port: 1, targetPort: sql}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-4, namespace: shop, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
ports: [{name: sql, port: 5432}]
endpoints: [{addresses: [10.0.1.3], nodeName: a, conditions: {ready: true}}]
---
apiVersion: v1
kind: Service
metadata: {name: empty, namespace: shop}
spec: {clusterIP: 10.96.0.2, clusterIPs: [10.96.0.2], ports: [{port: 80}]}
---
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
  ingress:
  - from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: bank}}}, {ipBlock: {cidr: 192.168.0.1/32}}]
    ports: [{port: http}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: out, namespace: bank}
spec:
  podSelector: {}
  policyTypes: [Egress]
  egress: [{to: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: shop}}}]}, {ports: [{port: 53, protocol: UDP}]}]
`

// objectsOf returns the objects in YAML texts, of which the first counts where two have one object.
func objectsOf(t testing.TB, texts ...string) []source.Object {
	t.Helper()
	dir := t.TempDir()
	for i, text := range texts {
		if err := os.WriteFile(filepath.Join(dir, string(rune('a'+i))+".yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	objects, _, err := manifest.Load(dir)
	if err != nil || len(objects) == 0 {
		t.Fatal(err)
	}
	return objects
}

// load returns the cluster of the YAML texts.
func load(t testing.TB, texts ...string) *Cluster {
	t.Helper()
	return New(objectsOf(t, texts...), Options{Policies: policy.Config{ImpliedNamespaces: true}})
}

const head = "apiVersion: fairlead.dev/v1alpha1\nkind: PolicyExpectations\nexpectations:\n"

func TestCheck(t *testing.T) {
	c := load(t, world)
	for _, w := range []struct{ item, want string }{ // want: "" for one that holds, else part of what is printed
		{"{from: bank/client, to: shop/web-1, port: 8080, expect: allowed, by: shop/web}", ""},
		{"{from: bank/client, to: shop/web-1, port: http/tcp, expect: allowed, by: NetworkPolicy bank/out}", ""},
		{"{from: bank/client, to: shop/web-1, port: admin, expect: denied, by: shop/closed}", ""},
		{"{from: bank/client, to: shop/web, port: http, expect: allowed}", ""},
		{"{from: bank/client, to: shop/web, port: 80, expect: denied}",
			"bank/client → Service shop/web:80/tcp is allowed: ingress of shop/web-1: allowed by NetworkPolicy shop/web " +
				"ingress[0]"},
		{"{from: shop/app=web, to: shop/app=web, port: http, expect: denied}", ""},
		{"{from: shop/*, to: shop/db, port: sql, expect: denied, by: shop/closed}", ""}, // headless: db-0:5432
		{"{from: bank/*, to: outside, port: 53/udp, expect: allowed}", ""},
		{"{from: bank/*, to: [outside, 203.0.113.9], port: [53, 443], expect: denied, by: bank/out}", ""},
		{"{from: outside, to: bank/client, port: '*', expect: allowed}", ""},
		{"{from: bank/client, to: outside, port: '*', expect: denied}",
			"is mixed: denied: egress of bank/client: isolated by NetworkPolicy bank/out egress, and none of their rules " +
				"allows it (tcp); allowed: egress of bank/client: allowed by NetworkPolicy bank/out egress[1] (53/udp)"},
		{"{from: outside, to: shop/db, port: '*', expect: denied}", `port "*" of Service shop/db`},
		{"{from: outside, to: shop/app=db, port: '*', expect: denied}", ""},
		// a pod's own node may always come in; another one is evaluated by its address
		{"{from: node/a, to: shop/db-, port: 5432, expect: allowed}", `"shop/db-"`},
		{"{from: node/a, to: shop/app=db, port: 5432, expect: allowed}", ""},
		{"{from: node/b, to: shop/app=db, port: 5432, expect: denied}", ""},
		// a node port at a: the backend on b sees the address of node a, which it allows; node a is that of the other
		{"{from: outside, to: node/a, port: 30080, expect: allowed}",
			"outside → node/a:30080/tcp is mixed: denied at 1 of 2 backends: ingress of shop/web-1: isolated by"},
		{"{from: node/a, to: shop/web, port: http, expect: allowed}", ""},
		{"{from: node/b, to: shop/web, port: http, expect: allowed}", "is mixed: denied at 1 of 2 backends"},
		{"{from: bank/client, to: shop/empty, port: 80, expect: denied}", "is unreachable: no endpoint"},
		{"{from: bank/client, to: shop/web-1, port: http, expect: allowed, by: shop/closed}", "allowed, not by shop/closed"},
		{"{from: bank/client, to: shop/web-1, port: http, expect: allowed, by: shop/wbe}", `did you mean "shop/web"?`},
		{"{from: bank/client, to: shop/web-1, port: htpp, expect: allowed}", `did you mean "http"?`},
		{"{from: bank/clinet, to: shop/web-1, port: http, expect: allowed}", `did you mean "bank/client"?`},
		{"{from: bnak/*, to: shop/web-1, port: http, expect: allowed}", `did you mean namespace "bank"?`},
		{"{from: shop/web, to: shop/web-1, port: http, expect: allowed}", "is a Service, which opens no connections"},
		{"{from: shop/web-1, to: shop/web-1, port: http, expect: allowed}", "it names no connection"},
		{"{from: shop/app=(, to: shop/web-1, port: http, expect: allowed}", "selector"},
		{"{from: '10.0.2.4', to: '[fd00:1::2]', port: http, expect: allowed}", "no address"},
	} {
		l, err := ReadExpectations("f", []byte(head+"- "+w.item))
		if err != nil {
			t.Errorf("%s: %v", w.item, err)
			continue
		}
		r := c.Check(l)[0]
		got := []string{r.Error}
		for _, k := range r.Failures {
			got = append(got, k.String())
		}
		if all := strings.Join(got, "\n"); r.OK() != (w.want == "") || !strings.Contains(all, w.want) {
			t.Errorf("%s: %q; want %q", w.item, all, w.want)
		}
	}
}

// Of pods that policies can't tell apart two are evaluated, so that also what is between them is.
func TestSelectedPodsAreEvaluatedByClass(t *testing.T) {
	var b strings.Builder
	for i := range 200 {
		b.WriteString(strings.NewReplacer("web-1", "more-"+string(rune('a'+i/26))+string(rune('a'+i%26)), "10.0.1.2",
			"10.0.1."+strings.TrimSpace(string([]byte{byte('0' + (i+20)/100), byte('0' + (i+20)/10%10), byte('0' + i%10)})),
			`, {ip: "fd00:1::2"}`, "").Replace(strings.Split(world, "---")[2]) + "---\n")
	}
	c := load(t, world, strings.ReplaceAll(b.String(), "10.0.1.0", "10.0.1."))
	l, err := c.ends("shop/app=web", false)
	names := []string{}
	for _, e := range l {
		names = append(names, e.name)
	}
	if err != nil || len(l) != 4 {
		t.Errorf("%v, %v: want two of 200 pods without IPv6, and web-1 and web-2", names, err)
	}
}

func TestReadExpectations(t *testing.T) {
	for _, w := range []struct{ text, want string }{
		{head + "- {from: a, too: b, port: 1, expect: allowed}", `f:4: unknown field "too": did you mean "to"?`},
		{head + "- {from: a, to: b, port: 1, expect: allow}", `f:4: invalid expect "allow": use allowed or denied`},
		{head + "- {from: a, to: b, expect: allowed}", `f:4: field "port" is missing`},
		{head + "- {from: a, from: c, to: b, port: 1, expect: allowed}", `f:4: field "from" stands twice`},
		{head + "- {from: [], to: b, port: 1, expect: allowed}", "f:4: the list is empty"},
		{head + "- {from: [[]], to: b, port: 1, expect: allowed}", "f:4: text is missing"},
		{head + "- {from: &x a, to: *x, port: 1, expect: allowed}", "f:4: alias *x: write the text out"},
		{head + "- text", "f:4: a mapping is missing"},
		{head + "  from: x", "a list is missing"},
		{head, "a list is missing"},
		{"", "f: no expectation"},
		{"expectations: []", `f:1: apiVersion "" and kind "": use apiVersion: fairlead.dev/v1alpha1`},
		{"apiVersion: fairlead.dev/v1alpha1\nkind: PolicyExpectations", `field "expectations" is missing`},
		{"a: [", "f: line 1: did not find"},
		{strings.Repeat(" ", maxBytes+1), "are the limit: split it"},
		{head + strings.Repeat("- x\n", 100), "80 more errors"},
	} {
		_, err := ReadExpectations("f", []byte(w.text))
		if err == nil || !strings.Contains(err.Error(), w.want) {
			t.Errorf("%.90q: %v; want %s", w.text, err, w.want)
		}
	}
}

func FuzzReadExpectations(f *testing.F) {
	f.Add(head + "- {name: x, from: shop/a, to: [b, c], port: [80, http], expect: denied, by: shop/p}")
	f.Add(head + "- &x {from: *x}\n---\n# nothing\n")
	f.Add("? [a]\n: {}\n<<: 1")
	f.Fuzz(func(t *testing.T, text string) {
		l, err := ReadExpectations("f", []byte(text))
		if err != nil {
			return
		}
		for _, e := range l {
			if e.Line < 1 || len(e.From)*len(e.To)*len(e.Ports) == 0 || e.Expect != Allowed && e.Expect != Denied ||
				slices.Contains(slices.Concat(e.From, e.To, e.Ports), "") {
				t.Errorf("%q: %+v", text, e)
			}
		}
	})
}
