package policy

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// seedVariable names the environment variable that has the seed of the random worlds, as in package conformance.
const seedVariable = "CONFORMANCE_SEED"

// dice draw a world: a seed's, rapid's, which shrink what fails, or the bytes of a fuzzer.
type dice interface {
	roll(what string, sides int) int // from 0
	Fatalf(format string, args ...any)
}

type seedDice struct {
	*testing.T
	*rand.Rand
}

func (d seedDice) roll(_ string, sides int) int { return d.IntN(sides) }

type rapidDice struct{ *rapid.T }

func (d rapidDice) roll(what string, sides int) int {
	return rapid.IntRange(0, sides-1).Draw(d.T, what)
}

// byteDice uses a byte for each roll, and rolls 0 once there is none left.
type byteDice struct {
	*testing.T
	bytes []byte
}

func (d *byteDice) roll(_ string, sides int) int {
	if len(d.bytes) == 0 {
		return 0
	}
	b := d.bytes[0]
	d.bytes = d.bytes[1:]
	return int(b) % sides
}

func draw[T any](t dice, what string, from ...T) T { return from[t.roll(what, len(from))] }

func several(t dice, what string, most int, one func()) {
	for range t.roll("number of "+what, most+1) {
		one()
	}
}

// A small world, so that objects meet: three nodes, three namespaces, few labels, few addresses, good and bad values.

var (
	worldNodes      = []string{"n1", "n2", "n3"}
	worldNamespaces = []string{"shop", "bank", "ops"}
	worldCIDRs      = []string{"10.0.1.0/24", "10.0.0.0/16", "0.0.0.0/0", "::/0", "10.0.1.2/32", "10.0.1.3/32",
		"10.0.2.0/30", "fd00:1::/64", "fd00:1::2/128", "192.168.0.1/32", "192.168.0.0/24", "198.51.100.0/24",
		"198.51.100.7/32", "10.0.1.9/24", "10.0.1.0/31", "198.51.100.6/31", "0.0.0.0/1"}
	badCIDRs = []string{"x", "::ffff:10.0.0.0/104", "10.0.01.0/24", "10.0.1.1", ""}
)

func drawSelector(t dice) *metav1.LabelSelector {
	s := &metav1.LabelSelector{}
	several(t, "labels", 1, func() {
		s.MatchLabels = map[string]string{draw(t, "key", "app", "tier"): draw(t, "value", "web", "db", "x")}
	})
	if t.roll("expression?", 3) == 0 {
		e := metav1.LabelSelectorRequirement{Key: draw(t, "key", "app", "tier", "old"),
			Operator: draw(t, "operator", metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn,
				metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist)}
		if e.Operator == metav1.LabelSelectorOpIn || e.Operator == metav1.LabelSelectorOpNotIn {
			e.Values = []string{draw(t, "value", "web", "db"), draw(t, "value", "db", "x", "y")}
		}
		s.MatchExpressions = append(s.MatchExpressions, e)
	}
	return s
}

func drawNamespaceSelector(t dice) *metav1.LabelSelector {
	switch t.roll("namespaces", 5) {
	case 0:
		return &metav1.LabelSelector{}
	case 1:
		return &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: draw(t, "namespace",
			worldNamespaces...)}}
	case 2:
		return &metav1.LabelSelector{MatchLabels: map[string]string{"team": draw(t, "team", "a", "b")}}
	case 3:
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "team",
			Operator: metav1.LabelSelectorOpNotIn, Values: []string{"a"}}}}
	}
	return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "team",
		Operator: metav1.LabelSelectorOpExists}}}
}

func drawNamespace(t dice) *corev1.Namespace {
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: draw(t, "namespace", worldNamespaces...)}}
	n.Labels = map[string]string{corev1.LabelMetadataName: n.Name}
	if team := draw(t, "team", "", "a", "b"); team != "" {
		n.Labels["team"] = team
	}
	return n
}

func drawNode(t dice) *corev1.Node {
	i := t.roll("node", len(worldNodes))
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: worldNodes[i], Labels: map[string]string{"tier": draw(t,
		"tier", "web", "db")}}}
	n.Spec.PodCIDRs = []string{fmt.Sprintf("10.0.%d.0/24", i+1), fmt.Sprintf("fd00:%d::/64", i+1)}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("192.168.0.%d", i+1)},
		{Type: corev1.NodeHostName, Address: n.Name}}
	if t.roll("dual?", 2) == 0 {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP,
			Address: fmt.Sprintf("fd99::%d", i+1)})
	}
	return n
}

func drawPod(t dice) *corev1.Pod {
	i := draw(t, "node", 0, 0, 0, 1, 2)
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: draw(t, "namespace", worldNamespaces...),
		Name:   draw(t, "name", "p1", "p2", "p3", "p4", "p5", "p6"),
		Labels: map[string]string{"app": draw(t, "app", "web", "db", "x")}}}
	if tier := draw(t, "tier", "", "web", "db"); tier != "" {
		p.Labels["tier"] = tier
	}
	p.CreationTimestamp = metav1.Unix(int64(t.roll("age", 3)), 0)
	p.Spec.NodeName = worldNodes[i]
	host := 1 + t.roll("address", 6)
	if t.roll("IPv4?", 6) > 0 {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: fmt.Sprintf("10.0.%d.%d", i+1, host)})
	}
	if t.roll("IPv6?", 2) == 0 {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: fmt.Sprintf("fd00:%d::%d", i+1, host)})
	}
	if t.roll("further address?", 4) == 0 {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: fmt.Sprintf("10.0.%d.%d", i+1, 7+t.roll("further", 3))})
	}
	p.Status.Phase = draw(t, "phase", corev1.PodRunning, corev1.PodRunning, corev1.PodRunning, corev1.PodPending,
		corev1.PodSucceeded, corev1.PodFailed)
	if t.roll("host network?", 12) == 0 {
		p.Spec.HostNetwork = true
		p.Status.PodIPs = []corev1.PodIP{{IP: fmt.Sprintf("192.168.0.%d", i+1)}}
	}
	if t.roll("terminating?", 8) == 0 {
		now := metav1.Unix(9, 0)
		p.DeletionTimestamp = &now
	}
	c := corev1.Container{}
	several(t, "ports", 2, func() {
		c.Ports = append(c.Ports, corev1.ContainerPort{Name: draw(t, "port name", "http", "dns", ""),
			ContainerPort: draw[int32](t, "port", 80, 81, 53),
			Protocol:      draw[corev1.Protocol](t, "protocol", "TCP", "UDP", "", "SCTP")})
	})
	if t.roll("init?", 4) == 0 {
		p.Spec.InitContainers = []corev1.Container{c}
	} else {
		p.Spec.Containers = []corev1.Container{c}
	}
	return p
}

func drawAudit(t dice) map[string]string {
	if t.roll("audit?", 5) == 0 {
		return map[string]string{AuditAnnotation: draw(t, "audit", "true", "true", "false")}
	}
	return nil
}

func drawPolicy(t dice) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: draw(t, "namespace",
		worldNamespaces...), Name: draw(t, "name", "a", "b", "c"), Annotations: drawAudit(t)}}
	if t.roll("named ports in blocks?", 6) == 5 {
		http := intstr.FromString(draw(t, "port name", "http", "dns"))
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
		p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{
			Ports: []networkingv1.NetworkPolicyPort{{Port: &http, Protocol: draw(t, "protocol", nil, new(corev1.ProtocolUDP))}},
			To:    []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: drawCIDR(t)}}}}}
		return p
	}
	p.Spec.PodSelector = *drawSelector(t)
	p.Spec.PolicyTypes = draw(t, "types", nil, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
		[]networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
		[]networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress})
	several(t, "ingress rules", 2, func() {
		r := networkingv1.NetworkPolicyIngressRule{Ports: drawPorts(t)}
		several(t, "from", 2, func() { r.From = append(r.From, drawPeer(t)) })
		p.Spec.Ingress = append(p.Spec.Ingress, r)
	})
	several(t, "egress rules", 2, func() {
		r := networkingv1.NetworkPolicyEgressRule{Ports: drawPorts(t)}
		several(t, "to", 2, func() { r.To = append(r.To, drawPeer(t)) })
		p.Spec.Egress = append(p.Spec.Egress, r)
	})
	return p
}

func drawPorts(t dice) (out []networkingv1.NetworkPolicyPort) {
	several(t, "ports", 2, func() {
		var p networkingv1.NetworkPolicyPort
		if s := draw(t, "protocol", "", "TCP", "UDP", "SCTP", "ICMP"); s != "" {
			q := corev1.Protocol(s)
			p.Protocol = &q
		}
		switch t.roll("port", 6) {
		case 0:
		case 1, 2:
			q := intstr.FromInt32(draw[int32](t, "number", 80, 81, 53, 0, 65536))
			p.Port = &q
		case 3, 4:
			q := intstr.FromString(draw(t, "port name", "http", "dns", "none"))
			p.Port = &q
		default:
			q, e := intstr.FromInt32(draw[int32](t, "first", 1, 80, 81, 53)), draw[int32](t, "last", 80, 81, 65535, 65536, 52)
			p.Port, p.EndPort = &q, &e
		}
		out = append(out, p)
	})
	return out
}

func drawPeer(t dice) (p networkingv1.NetworkPolicyPeer) {
	switch t.roll("peer", 8) {
	case 0, 1, 2:
		p.PodSelector = drawSelector(t)
	case 3, 4:
		p.NamespaceSelector = drawNamespaceSelector(t)
	case 5:
		p.PodSelector, p.NamespaceSelector = drawSelector(t), drawNamespaceSelector(t)
	default:
		p.IPBlock = &networkingv1.IPBlock{CIDR: drawCIDR(t)}
		several(t, "except", 2, func() { p.IPBlock.Except = append(p.IPBlock.Except, drawCIDR(t)) })
	}
	if t.roll("odd peer?", 20) == 0 {
		p = draw(t, "odd", networkingv1.NetworkPolicyPeer{}, networkingv1.NetworkPolicyPeer{PodSelector: drawSelector(t),
			IPBlock: &networkingv1.IPBlock{CIDR: "0.0.0.0/0"}})
	}
	return p
}

func drawCIDR(t dice) string {
	if t.roll("bad CIDR?", 16) == 0 {
		return draw(t, "bad CIDR", badCIDRs...)
	}
	return draw(t, "CIDR", worldCIDRs...)
}

func drawCluster(t dice) *cnpv1.ClusterNetworkPolicy {
	p := &cnpv1.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: draw(t, "name", "k", "l", "m", "n"),
		Annotations: drawAudit(t)}}
	p.Spec.Tier = draw(t, "tier", cnpv1.AdminTier, cnpv1.AdminTier, cnpv1.BaselineTier)
	if t.roll("odd tier?", 20) == 0 {
		p.Spec.Tier = "Odd"
	}
	p.Spec.Priority = int32(t.roll("priority", 3))
	switch t.roll("subject", 10) {
	case 0:
	case 1, 2, 3, 4:
		p.Spec.Subject.Namespaces = drawNamespaceSelector(t)
	default:
		p.Spec.Subject.Pods = drawNamespacedPod(t)
	}
	several(t, "ingress rules", 2, func() {
		r := cnpv1.ClusterNetworkPolicyIngressRule{Action: drawAction(t), Protocols: drawProtocols(t)}
		several(t, "from", 2, func() {
			q := drawClusterPeer(t, 3)
			r.From = append(r.From, cnpv1.ClusterNetworkPolicyIngressPeer{Namespaces: q.Namespaces, Pods: q.Pods})
		})
		p.Spec.Ingress = append(p.Spec.Ingress, r)
	})
	several(t, "egress rules", 2, func() {
		r := cnpv1.ClusterNetworkPolicyEgressRule{Action: drawAction(t), Protocols: drawProtocols(t)}
		several(t, "to", 2, func() { r.To = append(r.To, drawClusterPeer(t, 7)) })
		p.Spec.Egress = append(p.Spec.Egress, r)
	})
	return p
}

func drawAction(t dice) cnpv1.ClusterNetworkPolicyRuleAction {
	return draw(t, "action", cnpv1.ClusterNetworkPolicyRuleActionAccept, cnpv1.ClusterNetworkPolicyRuleActionDeny,
		cnpv1.ClusterNetworkPolicyRuleActionPass)
}

func drawNamespacedPod(t dice) *cnpv1.NamespacedPod {
	return &cnpv1.NamespacedPod{NamespaceSelector: *drawNamespaceSelector(t), PodSelector: *drawSelector(t)}
}

func drawClusterPeer(t dice, kinds int) (p cnpv1.ClusterNetworkPolicyEgressPeer) {
	if t.roll("odd peer?", 20) == 0 {
		return p
	}
	switch t.roll("peer", kinds) {
	case 0:
		p.Namespaces = drawNamespaceSelector(t)
	case 1, 2:
		p.Pods = drawNamespacedPod(t)
	case 3:
		p.Nodes = draw(t, "nodes", &metav1.LabelSelector{}, &metav1.LabelSelector{MatchLabels: map[string]string{
			"tier": "web"}})
	case 4:
		p.DomainNames = []cnpv1.DomainName{draw[cnpv1.DomainName](t, "name", "example.com", "*.example.com", "a.example.com")}
	default:
		for range 1 + t.roll("networks", 2) {
			p.Networks = append(p.Networks, cnpv1.CIDR(drawCIDR(t)))
		}
	}
	return p
}

func drawProtocols(t dice) (out []cnpv1.ClusterNetworkPolicyProtocol) {
	several(t, "protocols", 2, func() {
		var port *cnpv1.Port
		switch t.roll("destination", 4) {
		case 0:
			port = &cnpv1.Port{Range: &cnpv1.PortRange{Start: draw[int32](t, "start", 1, 53, 80), End: draw[int32](t, "end", 81,
				65535)}}
		case 1, 2:
			port = &cnpv1.Port{Number: draw[int32](t, "number", 53, 80, 81)}
		}
		var p cnpv1.ClusterNetworkPolicyProtocol
		switch t.roll("protocol", 9) {
		case 0, 1, 2:
			p.TCP = &cnpv1.ClusterNetworkPolicyProtocolTCP{DestinationPort: port}
		case 3, 4:
			p.UDP = &cnpv1.ClusterNetworkPolicyProtocolUDP{DestinationPort: port}
		case 5:
			p.SCTP = &cnpv1.ClusterNetworkPolicyProtocolSCTP{DestinationPort: port}
		case 6, 7:
			p.DestinationNamedPort = draw(t, "port name", "http", "dns", "none")
		}
		out = append(out, p)
	})
	return out
}

func drawObject(t dice) source.Object {
	switch t.roll("kind", 13) {
	case 12:
		return drawName(t)
	case 0:
		return drawNamespace(t)
	case 1:
		return drawNode(t)
	case 2, 3, 4, 5:
		return drawPod(t)
	case 6, 7, 8:
		return drawPolicy(t)
	}
	return drawCluster(t)
}

// drawName draws a domain name with addresses outside, of pods, nodes, and of pods that aren't known.
func drawName(t dice) *source.ResolvedName {
	n := &source.ResolvedName{ObjectMeta: metav1.ObjectMeta{Name: draw(t, "resolved name", "example.com", "a.example.com",
		"a.b.example.com", "other.org")}}
	for range 1 + t.roll("addresses", 3) {
		n.Addresses = append(n.Addresses, netip.MustParseAddr(draw(t, "address", "198.51.100.7", "198.51.100.6",
			"203.0.113.1", "192.168.0.2", "10.0.1.2", "10.0.2.3", "10.0.3.200", "2001:db8::1", "fd00:1::2")))
	}
	return n
}

func drawConfig(t dice) Config {
	c := Config{Node: "n1", UnknownPods: draw(t, "unknown pods", DenyUnknownPods, AllowUnknownPods),
		ImpliedNamespaces: t.roll("implied namespaces", 2) == 0, Audit: t.roll("audit all", 12) == 0}
	several(t, "addresses", 1, func() {
		c.Addresses = append(c.Addresses, netip.MustParseAddr("192.168.0.1"), netip.MustParseAddr("10.0.1.1"))
	})
	several(t, "pod ranges", 1, func() { c.PodRanges = append(c.PodRanges, netip.MustParsePrefix("10.0.0.0/16")) })
	return c
}

// drawPacket draws a packet of one family, between any of these addresses and others.
func drawPacket(t dice, addresses []netip.Addr) verdict.Packet {
	v6 := t.roll("family", 3) == 0
	var some []netip.Addr
	for _, a := range addresses {
		if a.Is6() == v6 {
			some = append(some, a)
		}
	}
	others := []string{"198.51.100.7", "198.51.100.6", "203.0.113.1", "192.168.0.1", "192.168.0.2", "192.168.0.3",
		"10.0.1.1", "10.0.1.2", "10.0.1.7", "10.0.2.3", "10.0.3.200"}
	if v6 {
		others = []string{"2001:db8::1", "fd99::1", "fd99::2", "fd00:1::2", "fd00:1::7", "fd00:2::3"}
	}
	end := func() netip.Addr {
		if len(some) > 0 && t.roll("known?", 4) > 0 {
			return draw(t, "address", some...)
		}
		return netip.MustParseAddr(draw(t, "other address", others...))
	}
	src, dst := end(), end()
	p := verdict.Packet{Protocol: draw(t, "protocol", model.TCP, model.TCP, model.UDP, model.SCTP, model.Protocol(1))}
	port := draw[uint16](t, "port", 80, 80, 81, 53, 443, 65535)
	if p.Protocol == 1 {
		port = 0
	}
	p.Src, p.Dst = netip.AddrPortFrom(src, 40000), netip.AddrPortFrom(dst, port)
	return p
}

// addresses returns those of the pods, sorted.
func (w *walk) addresses() (out []netip.Addr) {
	for _, k := range keysOf(w.there) {
		if p, ok := w.there[k].(*corev1.Pod); ok {
			for _, ip := range p.Status.PodIPs {
				out = append(out, netip.MustParseAddr(ip.IP))
			}
		}
	}
	return out
}

// walk is a world that changes, and what is thought of it.
type walk struct {
	dice
	config   Config
	there    map[source.Key]source.Object
	resolver *Resolver
	sum      sum
}

func newWalk(t dice) *walk {
	c := drawConfig(t)
	return &walk{dice: t, config: c, there: map[source.Key]source.Object{}, resolver: New(c), sum: newSum()}
}

// change draws a few changes and applies them.
func (w *walk) change(most int) {
	var batch []source.Change
	for range 1 + w.roll("changes", most) {
		var c source.Change
		if len(w.there) > 0 && w.roll("delete?", 4) == 3 {
			c.Key = draw(w, "deleted", keysOf(w.there)...)
		} else {
			o := drawObject(w)
			c = source.Change{Key: source.KeyOf(o), Object: o}
		}
		batch = append(batch, c)
	}
	if w.roll("other addresses?", 10) == 9 {
		w.config.Addresses = nil
		several(w, "addresses", 1, func() {
			w.config.Addresses = append(w.config.Addresses, netip.MustParseAddr("10.0.1.3"))
		})
		w.resolver.SetAddresses(w.config.Addresses)
	}
	w.apply(batch)
}

func (w *walk) apply(batch []source.Change) {
	for _, c := range batch {
		if w.there[c.Key] = c.Object; c.Object == nil {
			delete(w.there, c.Key)
		}
	}
	w.sum.apply(w, w.resolver.Apply(batch))
	whole := map[model.PolicyPart]bool{}
	for _, p := range w.resolver.Policies().Parts() {
		whole[p] = true
	}
	if !maps.Equal(whole, w.sum.parts) {
		w.Fatalf("the whole (-) is not the sum of changes (+):\n%s", cmp.Diff(describe(w.resolver.Policies()),
			describe(w.sum.now)))
	}
}

func keysOf(there map[source.Key]source.Object) []source.Key {
	return slices.SortedFunc(maps.Keys(there), func(a,
		b source.Key) int {
		return strings.Compare(a.String(), b.String())
	})
}

// fresh checks that a resolver that sees everything at once comes to the same.
func (w *walk) fresh() {
	var all []source.Change
	for _, k := range keysOf(w.there) {
		all = append(all, source.Change{Key: k, Object: w.there[k]})
	}
	r, s := New(w.config), newSum()
	s.apply(w, r.Apply(all))
	if !reflect.DeepEqual(s.now, w.sum.now) {
		w.Fatalf("parts (-fresh +stepped):\n%s", cmp.Diff(describe(s.now), describe(w.sum.now))+
			cmp.Diff(s.now, w.sum.now, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
				cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })))
	}
	if a, b := r.Problems(), w.resolver.Problems(); !reflect.DeepEqual(a, b) {
		w.Fatalf("problems (-fresh +stepped):\n%s", cmp.Diff(a, b))
	}
}

// judge checks what becomes of a packet against the second opinion.
func (w *walk) judge(n *naive, p verdict.Packet) {
	want, got := n.judge(p), verdict.Policy(w.sum.now, p)
	reported := len(got.Reported()) > 0
	if (got.Verdict == model.VerdictDrop) != want.drop || !want.drop && reported != want.reported {
		w.Fatalf("%v: want %+v, got %v, reported %v: %s\n%s", p, want, got.Verdict, got.Reported(), got.Reason, w.show())
	}
	if want.by != "" && (len(got.By) != 1 || got.By[0].PolicyRef.Name != want.by) {
		w.Fatalf("%v: want it by %s, got %v", p, want.by, got.By)
	}
	denied, count := verdict.Denied(w.sum.now, p), len(got.Steps)
	if denied && !want.drop || !denied && count > 0 && got.Steps[count-1].Decision.Verdict == model.VerdictDrop {
		w.Fatalf("%v: denied %v, but %v: %s\n%s", p, denied, got.Verdict, got.Reason, w.show())
	}
	for _, s := range got.Steps { // data planes have verdicts, people rules: they must agree
		d, _, _ := s.Entry.PeerTable.Decide(func(q *model.Peers) bool {
			return s.Peer != nil && slices.Contains(s.Peer.Identity.Match, q)
		})
		if d != s.Decision {
			w.Fatalf("%v: the rules of %s say %v, its verdict %v", p, s.Ruleset.Name, d, s.Decision)
		}
	}
}

func (w *walk) show() string {
	var b strings.Builder
	for _, k := range keysOf(w.there) {
		o := w.there[k]
		fmt.Fprintf(&b, "%s labels %v annotations %v", k, o.GetLabels(), o.GetAnnotations())
		switch o := o.(type) {
		case *corev1.Pod:
			fmt.Fprintf(&b, " %s %v %s host %v %v %v", o.Spec.NodeName, o.Status.PodIPs, o.Status.Phase, o.Spec.HostNetwork,
				o.Spec.Containers, o.Spec.InitContainers)
		case *networkingv1.NetworkPolicy:
			fmt.Fprintf(&b, " %v", o.Spec.String())
		case *cnpv1.ClusterNetworkPolicy:
			fmt.Fprintf(&b, " %+v", o.Spec)
		}
		b.WriteByte('\n')
	}
	return b.String() + fmt.Sprintf("%+v", w.config)
}

// sum is what changes come to.
type sum struct {
	parts   map[model.PolicyPart]bool
	now     *model.Policies
	rebuilt bool // everything may be made anew
}

func newSum() sum { return sum{parts: map[model.PolicyPart]bool{}, now: model.NewPolicies()} }

func (s *sum) apply(t dice, c model.Change[model.PolicyPart]) {
	gone := map[string]model.PolicyPart{}
	for _, p := range c.Del {
		if !s.parts[p] {
			t.Fatalf("%T %v is deleted but not there", p, p)
		}
		delete(s.parts, p)
		gone[nameOf(p)] = p
	}
	for _, p := range c.Put {
		if s.parts[p] {
			t.Fatalf("%T %v is put but there", p, p)
		}
		s.parts[p] = true
		if old := gone[nameOf(p)]; !s.rebuilt && old != nil && reflect.DeepEqual(old, p) {
			t.Fatalf("%s is put again as it was", nameOf(p))
		}
	}
	s.now.Apply(c)
	n := len(s.now.Devices) + len(s.now.Subjects) + len(s.now.Singles) + len(s.now.Ranges) + len(s.now.Rulesets) +
		len(s.now.Tables) + len(s.now.Verdicts) + 1
	if n != len(s.parts) {
		t.Fatalf("%d parts, of which %d have different names", len(s.parts), n)
	}
	s.sound(t)
}

// sound checks that parts name only parts that are there, and that ranges are flat.
func (s *sum) sound(t dice) {
	for _, x := range s.now.Subjects {
		for _, rs := range slices.Concat(x.Out[:], x.In[:]) {
			if rs != nil && !s.parts[rs] {
				t.Fatalf("%v has ruleset %v, which is not there", x, rs)
			}
		}
	}
	for _, rs := range s.now.Rulesets {
		for i, e := range append(rs.Ports[:len(rs.Ports):len(rs.Ports)], rs.Default) {
			if !s.parts[e.PeerTable] {
				t.Fatalf("%s has a peer table that is not there", rs.Name)
			}
			if i > 0 && i < len(rs.Ports) {
				if a := rs.Ports[i-1]; a.Protocol > e.Protocol || a.Protocol == e.Protocol && a.Last >= e.First ||
					e.First > e.Last {
					t.Fatalf("%s has port entries %v and %v", rs.Name, a, e)
				}
			}
		}
	}
	identities := map[*model.Identity]bool{}
	for i, p := range s.now.Ranges {
		identities[p.Identity] = true
		if p.Range.Last.Less(p.Range.First) || i > 0 && !s.now.Ranges[i-1].Range.Last.Less(p.Range.First) {
			t.Fatalf("range %v is not flat", p.Range)
		}
	}
	for _, p := range s.now.Singles {
		identities[p.Identity] = true
	}
	for _, v := range s.now.Verdicts {
		if !s.parts[v.PeerTable] || !identities[v.Identity] || v.Decision == v.PeerTable.Otherwise {
			t.Fatalf("peer verdict %v", v)
		}
	}
}

func nameOf(p model.PolicyPart) string {
	switch p := p.(type) {
	case *model.Device:
		return "device " + p.Name
	case *model.Subject:
		return "subject " + p.Addr.String()
	case *model.Ruleset:
		return fmt.Sprint("ruleset ", p.ID)
	case *model.PeerTable:
		return fmt.Sprint("peer table ", p.ID)
	case *model.Peer:
		return "peer " + p.Range.String()
	case *model.PeerVerdict:
		return fmt.Sprint("verdict ", p.Key())
	}
	return "node"
}

// describe lists parts for people.
func describe(s *model.Policies) (out []string) {
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	match := func(i *model.Identity) (l []string) {
		for _, p := range i.Match {
			l = append(l, p.Text)
		}
		return l
	}
	add("node %+v", *s.Node)
	for _, x := range s.Subjects {
		for i, rs := range slices.Concat(x.Out[:], x.In[:]) {
			if rs != nil {
				add("subject %s %s %d %x", x.Addr, x.Pod, i, rs.ID)
			}
		}
	}
	for _, rs := range s.Rulesets {
		add("ruleset %x %s %d default %x", rs.ID, rs.Name, len(rs.Ports), rs.Default.PeerTable.ID)
	}
	for _, x := range s.Tables {
		add("table %x %v %d rules", x.ID, x.Otherwise, len(x.Rules))
	}
	for _, p := range slices.Concat(s.Ranges, slices.Collect(maps.Values(s.Singles))) {
		add("peer %v %s %v", p.Range, p.Name, match(p.Identity))
	}
	for _, v := range s.Verdicts {
		add("verdict %x %v %v", v.PeerTable.ID, match(v.Identity), v.Decision)
	}
	slices.Sort(out)
	return out
}

// packetsPerRun is how many packets the random worlds have in one run.
const packetsPerRun = 100_000

func TestRandomWorldsAgreeWithNaiveEvaluation(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv(seedVariable); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s: %v", seedVariable, err)
		}
	}
	t.Logf("%s=%d", seedVariable, seed)
	d := seedDice{t, rand.New(rand.NewPCG(seed, 0))}
	fates := map[string]int{}
	for packets := 0; packets < packetsPerRun; {
		w := newWalk(d)
		for _, one := range []func(dice) source.Object{
			func(t dice) source.Object { return drawNamespace(t) }, func(t dice) source.Object { return drawNode(t) },
			func(t dice) source.Object { return drawPod(t) }, func(t dice) source.Object { return drawPod(t) },
			func(t dice) source.Object { return drawPod(t) }, func(t dice) source.Object { return drawPolicy(t) },
			func(t dice) source.Object { return drawCluster(t) }} {
			var batch []source.Change
			for range 1 + d.roll("objects", 6) {
				o := one(d)
				batch = append(batch, source.Change{Key: source.KeyOf(o), Object: o})
			}
			w.apply(batch)
		}
		for range 20 {
			w.change(3)
			w.fresh()
			n, addresses := newNaive(w.config, w.there), w.addresses()
			for range 20 {
				p := drawPacket(d, addresses)
				w.judge(n, p)
				packets++
				switch o := verdict.Policy(w.sum.now, p); {
				case len(o.Reported()) > 0:
					fates["report"]++
				case len(o.By) > 0:
					fates[o.Verdict.String()+" by rule"]++
				default:
					fates[o.Verdict.String()]++
				}
			}
		}
	}
	t.Log(fates)
	for _, fate := range []string{"drop by rule", "accept by rule", "report"} {
		if fates[fate] < packetsPerRun/100 {
			t.Errorf("the worlds are one-sided: %v", fates)
		}
	}
}

// steps walks through a world and back to nothing.
func steps(t dice) {
	w := newWalk(t)
	for range 1 + t.roll("steps", 10) {
		w.change(4)
		w.fresh()
		n, addresses := newNaive(w.config, w.there), w.addresses()
		for range 5 {
			w.judge(n, drawPacket(t, addresses))
		}
	}
	for len(w.there) > 0 {
		k := draw(t, "deleted", keysOf(w.there)...)
		delete(w.there, k)
		w.sum.apply(t, w.resolver.Apply([]source.Change{{Key: k}}))
		w.fresh()
	}
	mustBeEmpty(t, w.resolver)
}

// boundedSteps walks through a world in which much is beyond a bound.
func boundedSteps(t dice) {
	w := newWalk(t)
	b := Bounds{Peers: 2 + t.roll("peers", 8), Ports: 1 + t.roll("ports", 6), Terms: 2 + t.roll("terms", 12), Excepts: 2}
	w.config.Limits = Limits{Policy: b, Namespace: b.plus(b), Ports: 2 + t.roll("port entries", 6),
		Products: 4 + t.roll("products", 20), Total: 5 + t.roll("total", 60)}
	settled := t.roll("settled?", 2) == 0
	if l := &w.config.Limits; !settled { // what these close depends on what was there before
		l.Entries, l.Matches = 5+t.roll("entries", 30), 20+t.roll("matches", 80)
		l.Evaluations, l.Comparisons = 5+t.roll("evaluations", 40), 5+t.roll("comparisons", 100)
		w.sum.rebuilt = true
	}
	w.resolver = New(w.config)
	for range 1 + t.roll("steps", 20) {
		w.change(6)
		w.within()
		if settled {
			w.fresh()
		}
	}
	for _, k := range keysOf(w.there) {
		w.sum.apply(t, w.resolver.Apply([]source.Change{{Key: k}}))
	}
	mustBeEmpty(t, w.resolver)
	if l := w.resolver.Problems(); len(l) > 0 {
		t.Fatalf("problems %v are left", l)
	}
}

// within checks that what there is is within the limits.
func (w *walk) within() {
	l, identities := w.resolver.limits, map[*model.Identity]bool{}
	for _, p := range w.sum.now.Parts() {
		if p, is := p.(*model.Peer); is {
			identities[p.Identity] = true
		}
	}
	matches := 0
	for i := range identities {
		if n := len(i.Match); n > 0 {
			matches += n + identityWeight
		}
	}
	entries, prefixes := len(w.sum.now.Verdicts), 0
	for _, p := range w.sum.now.Ranges {
		prefixes += p.Range.PrefixCount()
	}
	for _, rs := range w.sum.now.Rulesets {
		entries += len(rs.Ports)
	}
	if entries += prefixes / 2; entries > l.Entries || matches > l.Matches {
		w.Fatalf("%d entries, %d matches: want at most %d and %d", entries, matches, l.Entries, l.Matches)
	}
	cost := 0
	for _, rs := range w.sum.now.Rulesets {
		for _, e := range append(rs.Ports[:len(rs.Ports):len(rs.Ports)], rs.Default) {
			if len(e.Sources) > 0 {
				cost += 1 + len(e.Sources)
			}
		}
	}
	if cost > l.Total {
		w.Fatalf("rulesets cost %d: want at most %d", cost, l.Total)
	}
}

// TestBoundedSteps walks ten times as often as rapid by itself: what is beyond bounds rarely meets.
func TestBoundedSteps(t *testing.T) {
	for range 10 {
		rapid.Check(t, func(t *rapid.T) { boundedSteps(rapidDice{t}) })
	}
}

// mustBeEmpty checks that a resolver of which all objects are gone has nothing left of them.
func mustBeEmpty(t dice, r *Resolver) {
	r.collect()
	for what, n := range map[string]int{"namespaces": len(r.namespaces), "nodes": len(r.nodes),
		"addresses": r.addresses.len() - len(r.config.Addresses) + len(r.further),
		"policies": len(r.cluster) + r.policies + len(r.selecting) +
			len(r.selections) + len(r.unreadable), "numbers": len(r.numbers) + r.classes.len(), "local classes": len(r.local),
		"rulesets": len(r.rulesets) + len(r.plans) + len(r.rejections), "tables": len(r.tables) + len(r.groups),
		"peers": len(r.peers) + len(r.index), "signatures": len(r.signatures) - 1, "pieces": len(r.pieces) +
			len(r.blockPods), "verdicts": r.entriesUsed() + r.evaluations + r.matches, "costs": r.wanted,
		"IDs": len(r.ids.holders) + len(r.ids.own)} {
		if n != 0 {
			t.Fatalf("%d %s are left", n, what)
		}
	}
}

func TestSteps(t *testing.T) { rapid.Check(t, func(t *rapid.T) { steps(rapidDice{t}) }) }

// smallWorld is what the fuzzer changes: so little that an input is tried in a fraction of a millisecond, and of which
// everything meets.
func smallWorld() (changes []source.Change) {
	pod := func(node int, ns, name, app string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"app": app}}}
		p.Spec.NodeName = worldNodes[node-1]
		p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 80}}}}
		p.Status.PodIPs = []corev1.PodIP{{IP: fmt.Sprintf("10.0.%d.%s", node, name[1:])}}
		return p
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	node.Spec.PodCIDRs = []string{"10.0.1.0/24"}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.168.0.1"}}
	shop := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{
		corev1.LabelMetadataName: "shop", "team": "a"}}}
	for _, o := range []source.Object{node, shop, pod(1, "shop", "p2", "web"), pod(1, "shop", "p3", "db"),
		pod(2, "shop", "p4", "web"), pod(2, "bank", "p5", "x")} {
		changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	return changes
}

// mostFuzzed is how many bytes of an input count.
const mostFuzzed = 512

// fuzz changes a small world a few times, perhaps with limits that are easily exceeded, and compares packets with the
// second opinion, the sum of the changes with the whole, and in the end what is left of all with nothing.
func fuzz(t dice) {
	w := newWalk(t)
	limited := t.roll("limited?", 4) == 0
	if limited {
		w.config.Limits = Limits{Ports: 2 + t.roll("port entries", 4), Total: 5 + t.roll("total", 60),
			Entries: 5 + t.roll("entries", 30), Matches: 20 + t.roll("matches", 80)}
		w.sum.rebuilt = true
	}
	w.resolver = New(w.config)
	w.apply(smallWorld())
	for range 1 + t.roll("steps", 3) {
		w.change(4)
		if limited {
			w.within()
			continue
		}
		n, addresses := newNaive(w.config, w.there), w.addresses()
		for range 4 {
			w.judge(n, drawPacket(t, addresses))
		}
	}
	if !limited {
		w.fresh()
	}
	var gone []source.Change
	for _, k := range keysOf(w.there) {
		gone = append(gone, source.Change{Key: k})
	}
	w.sum.apply(t, w.resolver.Apply(gone))
	mustBeEmpty(t, w.resolver)
}

func FuzzApply(f *testing.F) {
	for seed := range 20 {
		data := make([]byte, mostFuzzed/4)
		rand.NewChaCha8([32]byte{byte(seed)}).Read(data)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		fuzz(&byteDice{t, data[:min(len(data), mostFuzzed)]})
	})
}
