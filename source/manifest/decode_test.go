package manifest

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	k8syaml "sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// What an object looks like once it was read: with defaults, without what nothing reads.
func TestDecode(t *testing.T) {
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name, Namespace: "default"} }
	port := func(n int32) corev1.ServicePort {
		return corev1.ServicePort{Protocol: corev1.ProtocolTCP, Port: n, TargetPort: intstr.FromInt32(n)}
	}
	for _, tt := range []struct {
		name, text string
		want       source.Object
	}{
		{"least Service", `{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {ports: [{port: 80}]}}`,
			&corev1.Service{
				ObjectMeta: meta("a"),
				Spec: corev1.ServiceSpec{
					Type: corev1.ServiceTypeClusterIP, SessionAffinity: corev1.ServiceAffinityNone,
					Ports:                 []corev1.ServicePort{port(80)},
					InternalTrafficPolicy: new(corev1.ServiceInternalTrafficPolicyCluster),
				},
			}},
		{"dual LoadBalancer", `
apiVersion: v1
kind: Service
metadata: {name: a}
spec:
  type: LoadBalancer
  clusterIPs: [10.96.0.1, "fd00::1"]
  sessionAffinity: ClientIP
  internalTrafficPolicy: Local
  ports: [{name: dns, protocol: UDP, port: 53, targetPort: dns, nodePort: 30053}]
status:
  loadBalancer: {ingress: [{ip: 192.0.2.1}, {ip: 192.0.2.2, ipMode: Proxy}, {hostname: a.example}]}
  conditions: [{type: x, status: "True", reason: why, message: z, lastTransitionTime: "2026-01-01T00:00:00Z"}]
`, &corev1.Service{
			ObjectMeta: meta("a"),
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1", "fd00::1"},
				IPFamilies:      []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
				SessionAffinity: corev1.ServiceAffinityClientIP, SessionAffinityConfig: &corev1.SessionAffinityConfig{
					ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(10800))}},
				Ports: []corev1.ServicePort{{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53,
					TargetPort: intstr.FromString("dns"), NodePort: 30053}},
				InternalTrafficPolicy:         new(corev1.ServiceInternalTrafficPolicyLocal),
				ExternalTrafficPolicy:         corev1.ServiceExternalTrafficPolicyCluster,
				AllocateLoadBalancerNodePorts: new(true),
			},
			Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{
				{IP: "192.0.2.1", IPMode: new(corev1.LoadBalancerIPModeVIP)},
				{IP: "192.0.2.2", IPMode: new(corev1.LoadBalancerIPModeProxy)}, {Hostname: "a.example"},
			}}},
		}},
		{"external address, no affinity's timeout", `
apiVersion: v1
kind: Service
metadata: {name: a}
spec: {clusterIP: "fd00::1", externalIPs: [192.0.2.1], sessionAffinityConfig: {clientIP: {timeoutSeconds: 5}}, ports: [{port: 80, targetPort: 0}]}
`, &corev1.Service{
			ObjectMeta: meta("a"),
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeClusterIP, ClusterIP: "fd00::1", ClusterIPs: []string{"fd00::1"},
				IPFamilies:  []corev1.IPFamily{corev1.IPv6Protocol},
				ExternalIPs: []string{"192.0.2.1"}, SessionAffinity: corev1.ServiceAffinityNone,
				Ports:                 []corev1.ServicePort{port(80)},
				InternalTrafficPolicy: new(corev1.ServiceInternalTrafficPolicyCluster),
				ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyCluster,
			},
		}},
		{"external name",
			`{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {type: ExternalName, externalName: a.example}}`,
			&corev1.Service{
				ObjectMeta: meta("a"),
				Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "a.example",
					SessionAffinity: corev1.ServiceAffinityNone},
			}},
		{"metadata", `
apiVersion: v1
kind: Namespace
metadata:
  name: a
  uid: 0f3b
  resourceVersion: "7"
  generation: 2
  generateName: a-
  selfLink: /a
  finalizers: [a/b]
  ownerReferences: [{apiVersion: v1, kind: Pod, name: a, uid: b}]
  managedFields: [{manager: kubectl, operation: Update}]
  labels: {a: b}
  annotations: {c: d, kubectl.kubernetes.io/last-applied-configuration: "{}"}
  creationTimestamp: "2026-01-02T03:04:05Z"
  deletionTimestamp: "2026-01-02T03:04:06Z"
spec: {finalizers: [kubernetes]}
status: {phase: Active, conditions: []}
`, &corev1.Namespace{
			ObjectMeta: metav1.ObjectMeta{
				Name: "a", Labels: map[string]string{"a": "b", "kubernetes.io/metadata.name": "a"},
				Annotations:       map[string]string{"c": "d"},
				CreationTimestamp: metav1.Unix(1767323045, 0), DeletionTimestamp: new(metav1.Unix(1767323046, 0)),
			},
			Status: corev1.NamespaceStatus{Phase: corev1.NamespaceActive},
		}},
		{"EndpointSlice", `
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a}
addressType: IPv4
endpoints:
- addresses: [10.0.0.1, 10.0.0.11]
  conditions: {ready: true, terminating: false}
  hostname: h
  nodeName: node
  zone: z
  deprecatedTopology: {a: b}
  hints: {forZones: [{name: z}], forNodes: [{name: node}]}
  targetRef: {apiVersion: v1, kind: Pod, namespace: default, name: p, uid: u, resourceVersion: "1", fieldPath: x}
- addresses: [10.0.0.2]
  targetRef: {kind: VM, name: v}
ports: [{port: 80}, {name: any, protocol: UDP, appProtocol: x}]
`, &discoveryv1.EndpointSlice{
			ObjectMeta: meta("a"), AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints: []discoveryv1.Endpoint{{
				Addresses: []string{"10.0.0.1", "10.0.0.11"}, Conditions: discoveryv1.EndpointConditions{Ready: new(true),
					Terminating: new(false)},
				NodeName: new("node"), Zone: new("z"), TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "default",
					Name: "p"},
				Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z"}},
					ForNodes: []discoveryv1.ForNode{{Name: "node"}}},
			}, {Addresses: []string{"10.0.0.2"}}},
			Ports: []discoveryv1.EndpointPort{
				{Name: new(""), Protocol: new(corev1.ProtocolTCP), Port: new(int32(80))},
				{Name: new("any"), Protocol: new(corev1.ProtocolUDP), AppProtocol: new("x")},
			},
		}},
		{"Node", `
apiVersion: v1
kind: Node
metadata: {name: a}
spec: {podCIDR: 10.1.0.0/24, providerID: p, unschedulable: true, taints: [{key: k, effect: NoSchedule}], configSource: {}}
status:
  capacity: {cpu: "4"}
  images: [{names: [a], sizeBytes: 7}]
  addresses: [{type: InternalIP, address: 192.0.2.1}]
  conditions: [{type: Ready, status: "True"}]
`, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "a"},
			Spec: corev1.NodeSpec{PodCIDR: "10.1.0.0/24", PodCIDRs: []string{"10.1.0.0/24"}, ProviderID: "p",
				Unschedulable: true, Taints: []corev1.Taint{{Key: "k", Effect: corev1.TaintEffectNoSchedule}}},
			Status: corev1.NodeStatus{
				Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}},
				Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
			},
		}},
		{"Pod", `
apiVersion: v1
kind: Pod
metadata: {name: a}
spec:
  nodeName: node
  hostNetwork: true
  serviceAccountName: s
  volumes: [{name: v, emptyDir: {sizeLimit: 1Gi}}]
  initContainers: [{name: i, image: x, restartPolicy: Always, ports: [{name: p, containerPort: 1}]}]
  containers: [{name: c, image: x, resources: {limits: {cpu: 100m}}, env: [{name: a, value: b}], ports: [{containerPort: 80, protocol: SCTP}]}, {name: d}]
status:
  phase: Running
  podIPs: [{ip: 10.0.0.1}, {ip: "fd00::1"}]
  hostIP: 192.0.2.1
  conditions: [{type: Ready, status: "True", lastTransitionTime: "2026-01-02T03:04:05Z", message: x}]
  containerStatuses: [{name: c, ready: true, restartCount: 0, image: x, imageID: z}]
`, &corev1.Pod{
			ObjectMeta: meta("a"),
			Spec: corev1.PodSpec{
				NodeName: "node", HostNetwork: true,
				InitContainers: []corev1.Container{{Name: "i", RestartPolicy: new(corev1.ContainerRestartPolicyAlways),
					Ports: []corev1.ContainerPort{{Name: "p", ContainerPort: 1, Protocol: corev1.ProtocolTCP}}}},
				Containers: []corev1.Container{{Name: "c",
					Ports: []corev1.ContainerPort{{ContainerPort: 80, Protocol: corev1.ProtocolSCTP}}}, {Name: "d"}},
			},
			Status: corev1.PodStatus{
				Phase: corev1.PodRunning, PodIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}, {IP: "fd00::1"}},
				HostIP: "192.0.2.1",
			},
		}},
		{"ServiceCIDR", `
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: {name: a}
spec: {cidrs: [10.96.0.0/12, "fd00:96::/108"]}
`, &networkingv1.ServiceCIDR{
			ObjectMeta: metav1.ObjectMeta{Name: "a"},
			Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/12", "fd00:96::/108"}},
		}},
		{"NetworkPolicy", `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: a}
spec:
  podSelector: {}
  ingress: [{ports: [{port: 80}]}]
  egress: [{to: [{podSelector: {matchLabels: {a: b}}}], ports: [{port: dns, protocol: UDP}]}]
`, &networkingv1.NetworkPolicy{
			ObjectMeta: meta("a"),
			Spec: networkingv1.NetworkPolicySpec{
				PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
				Ingress: []networkingv1.NetworkPolicyIngressRule{
					{Ports: []networkingv1.NetworkPolicyPort{{Protocol: new(corev1.ProtocolTCP), Port: new(intstr.FromInt32(80))}}}},
				Egress: []networkingv1.NetworkPolicyEgressRule{{
					To: []networkingv1.NetworkPolicyPeer{
						{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}},
					Ports: []networkingv1.NetworkPolicyPort{{Protocol: new(corev1.ProtocolUDP), Port: new(intstr.FromString("dns"))}},
				}},
			},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, _ := content{}.read([]byte(tt.text), strip.New())
			if len(c.all()) != 1 {
				t.Fatalf("%d objects; %v", len(c.all()), (&file{content: c}).problems())
			}
			if d := cmp.Diff(tt.want, c.all()[0]); d != "" {
				t.Errorf("want -, got +:\n%s", d)
			}
		})
	}
}

func TestSplit(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       []chunk
	}{
		{"nothing", "", nil},
		{"blanks and comments", "\n# a\n---\n \t\n--- # b\n...\n---", nil},
		{"one", "a: b\n", []chunk{{[]byte("a: b\n"), 1, false}}},
		{"two", "# x\n\na: b\n---\n# y\nc: d", []chunk{{[]byte("a: b\n"), 3, false}, {[]byte("c: d"), 6, false}}},
		{"returns", "\r\na: b\r\n---\r\nc: d\r\n", []chunk{{[]byte("a: b\n"), 2, false}, {[]byte("c: d\n"), 4, false}}},
		{"returns alone", "\ra: b\r---\rc: d\r", []chunk{{[]byte("a: b\n"), 2, false}, {[]byte("c: d\n"), 4, false}}},
		{"UTF-16", utf16Text(binary.LittleEndian, "a: ä\r\n---\r\nc: 𝄞"), []chunk{{[]byte("a: ä\n"), 1, false},
			{[]byte("c: 𝄞"), 3, false}}},
		{"UTF-16, big end first", utf16Text(binary.BigEndian, "a: b\n---\nc: d"), []chunk{{[]byte("a: b\n"), 1, false},
			{[]byte("c: d"), 3, false}}},
		{"byte order mark", "\xef\xbb\xbfa: b", []chunk{{[]byte("a: b"), 1, false}}},
		{"end mark", "a: b\n...\nc: d\n", []chunk{{[]byte("a: b\n"), 1, false}, {[]byte("c: d\n"), 3, false}}},
		{"directive", "%YAML 1.1\n---\na: b\n", []chunk{{[]byte("a: b\n"), 3, false}}},
		{"behind the mark", "--- {a: b}\n---x: y\n", []chunk{{[]byte(" {a: b}\n---x: y\n"), 1, true}}},
		{"JSON in a row", "{\"a\": \"}\\\"{\"}\n\n{\"b\": [1]} {}\n",
			[]chunk{{[]byte(`{"a": "}\"{"}`), 1, true}, {[]byte(`{"b": [1]}`), 3, true}, {[]byte(`{}`), 3, true}}},
		{"JSON, then words", "{}\nx\n", []chunk{{[]byte("{}\nx\n"), 1, true}}},
		{"JSON, cut short", "{\"a\": \"b\n", []chunk{{[]byte("{\"a\": \"b\n"), 1, true}}},
		{"dashes inside", "a: |\n  ---\n  b\nc: ---\n", []chunk{{[]byte("a: |\n  ---\n  b\nc: ---\n"), 1, false}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if d := cmp.Diff(tt.want, split([]byte(tt.text)), cmp.AllowUnexported(chunk{})); d != "" {
				t.Errorf("want -, got +:\n%s", d)
			}
		})
	}
}

// utf16Text returns s in UTF-16 with a byte order mark.
func utf16Text(order binary.AppendByteOrder, s string) string {
	var b []byte
	for _, u := range utf16.Encode([]rune("\ufeff" + s)) {
		b = order.AppendUint16(b, u)
	}
	return string(b)
}

// No document is lost in silence: what follows behind a document's end is read or named.
func TestTrailingDocument(t *testing.T) {
	const service = "{apiVersion: v1, kind: Service, metadata: {name: %s}, spec: {ports: [{port: 80}]}}\n"
	a, b := fmt.Sprintf(service, "a"), fmt.Sprintf(service, "b")
	utf16 := utf16Text(binary.LittleEndian, a+"---\n"+b)
	for _, tt := range []struct {
		name, text string
		objects    int
		reasons    []string
	}{
		{"two documents", a + "---\n" + b, 2, nil},
		{"CR alone", strings.ReplaceAll(a+"---\n"+b, "\n", "\r"), 2, nil},
		{"UTF-16", utf16, 2, nil},
		{"UTF-16, cut inside a character", utf16[:len(utf16)-1], 1, []string{Syntax}},
		{"no marker", a + b, 2, nil},
		{"words", a + "x: y\n", 0, []string{Syntax}},
		{"NEL", strings.ReplaceAll(a+"---\n"+b, "\n", "\u0085"), 0, []string{Syntax}},
		{"line separator", strings.ReplaceAll(a+"---\n"+b, "\n", "\u2028"), 0, []string{Syntax}},
		{"less indented", "  apiVersion: v1\n  kind: Namespace\n  metadata: {name: a}\nspec: {}\n", 0,
			[]string{Syntax}},
		{"behind a kind that is not read", "  apiVersion: apps/v1\n  kind: Deployment\nspec: {}\n", 0,
			[]string{Syntax}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, _ := content{}.read([]byte(tt.text), strip.New())
			var reasons []string
			for _, p := range (&file{content: c}).problems() {
				reasons = append(reasons, p.Reason)
			}
			if len(c.all()) != tt.objects || !slices.Equal(reasons, tt.reasons) {
				t.Errorf("%d objects, problems %v; want %d, %v", len(c.all()), reasons, tt.objects, tt.reasons)
			}
		})
	}
}

// A key of a mapping overrides one that is merged into it; a repeated key is named by its path, and by nothing else.
func TestYAMLToJSON(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"merge, then own key", "a: &a {x: 1, z: 2}\nb: {<<: *a, x: 3}", `{"a":{"x":1,"z":2},"b":{"x":3,"z":2}}`},
		{"several merges", "a: &a {x: 1}\nb: &b {z: 2}\nc: {<<: [*a, *b], x: 3}",
			`{"a":{"x":1},"b":{"z":2},"c":{"x":3,"z":2}}`},
		{"repeated", "a: {b: 1, b: 2}\nc: [{d: 1}, {e: 1, e: 2, e: 3}]",
			`{"a":{"b":2,"b":2},"c":[{"d":1},{"e":3,"e":3}]}`},
		{"repeated in an alias", "a: &a {b: 1, b: 2}\nc: *a", `{"a":{"b":2,"b":2},"c":{"b":2,"b":2}}`},
		{"merge and repeated", "a: &a {x: 1}\nb: {<<: *a, x: 3, z: 1, z: 2}", `{"a":{"x":1},"b":{"x":3,"z":2,"z":2}}`},
		{"keys that are no text", "{1: a, yes: b, on: c, 1.5: d}", `{"1":"a","1.5":"d","true":"c","true":"c"}`},
		{"nothing", "# a comment", "null"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, err := yamlToJSON([]byte(tt.text)); err != nil || string(got) != tt.want {
				t.Errorf("got %s, %v; want %s", got, err, tt.want)
			}
		})
	}
}

// What Kubernetes' reader takes is read the same.
func FuzzYAMLToJSON(f *testing.F) {
	for _, s := range []string{"a: b", "a: &a {x: 1}\nb: {<<: *a, x: 3}", "{a: 1, a: 2}",
		"- yes\n- 0x1f\n- 2001-01-01\n- !!binary aGk=", "? {a: b}\n: c"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := yamlToJSON(text)
		want, wantErr := k8syaml.YAMLToJSONStrict(text)
		switch {
		case err != nil || wantErr != nil:
			if err == nil && !strings.Contains(wantErr.Error(), "already set in map") {
				t.Errorf("got %s, want %v", got, wantErr)
			}
		case string(got) != string(want):
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

// Two texts that one file has one after the other. Nothing panics; what is refused yields no object; an object is one
// that validate takes; and if all is well with the second text, the first one leaves no trace.
func FuzzRead(f *testing.F) {
	names, err := filepath.Glob("testdata/*.txtar")
	must(f, err)
	var before string
	for _, name := range names {
		b, err := os.ReadFile(name)
		must(f, err)
		for _, file := range txtar.Parse(b).Files {
			for _, c := range split(file.Data) {
				f.Add(before, string(c.text))
				before = string(c.text)
			}
		}
	}
	f.Fuzz(func(t *testing.T, one, two string) {
		w := strip.New()
		first, came := content{}.read([]byte(one), w)
		if len(first.spare) > 0 || len(came.remove) > 0 {
			t.Fatal("objects from nowhere")
		}
		sound(t, first)
		second, _ := first.read([]byte(two), w)
		retained(t, first, second)
		alone, _ := content{}.read([]byte(two), w)
		if sound(t, alone) && !reflect.DeepEqual(alone.all(), second.all()) {
			t.Errorf("after %q it says %v, alone %v", one, second.all(), alone.all())
		}
		again, d := second.read([]byte(two), w)
		if len(d.add) > 0 || len(d.remove) > 0 || !reflect.DeepEqual(again.all(), second.all()) {
			t.Errorf("read again, it differs: %v", d)
		}
		s := newStore()
		s.update("f", first, came)
		s.batch()
		(&file{content: second}).problems()
	})
}

// sound checks that each item has an object or a problem, and reports whether all have objects.
func sound(t *testing.T, c content) bool {
	all := true
	for _, d := range c.docs {
		for _, it := range d.items {
			switch {
			case (it.obj == nil) != (it.bad != nil):
				t.Errorf("an item with object %v and refusal %v", it.obj, it.bad)
			case it.bad != nil:
				all = false
				if len(it.bad.problems) == 0 || it.bad.problems[0].Reason != Syntax &&
					strings.Contains(it.bad.problems[0].Message, "%!") {
					t.Errorf("refused without a good word: %v", it.bad.problems)
				}
			default:
				o := it.obj
				if p := validate(o); p != nil {
					t.Errorf("%v came through with %v", source.KeyOf(o), p)
				}
			}
		}
	}
	return all
}

func TestNearestName(t *testing.T) {
	names := []string{"shop/web", "shop/db", "web", "outside", "a"}
	for written, want := range map[string]string{"shop/wbe": "shop/web", "wep": "web", "wbe": "web", "outsdie": "outside",
		"shop/elsewhere": "", "203.0.113.300": ""} {
		if got := Nearest(written, names); got != want {
			t.Errorf("%s suggests %q, want %q", written, got, want)
		}
	}
}
