package network

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/source"
)

// annotated is a Pod on node a with an annotation.
func annotated(namespace, name, text string) source.Change {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
		Annotations: map[string]string{AllowedSourcesAnnotation: text}}, Spec: corev1.PodSpec{NodeName: "a"}}
	return source.Change{Key: source.KeyOf(p), Object: p}
}

// sourcesResolver knows the nodes a and b, and what namespace vpn may.
func sourcesResolver() *Resolver {
	r := New(Config{Node: "a", ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
		AllowedSources: []Grant{{"vpn", netip.MustParsePrefix("203.0.113.0/24")}, {"vpn", netip.MustParsePrefix("0.0.0.0/0")},
			{"vpn", netip.MustParsePrefix("::/0")}, {"web", netip.MustParsePrefix("198.51.100.0/24")}}})
	for i, name := range []string{"a", "b"} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.NodeSpec{PodCIDRs: []string{fmt.Sprintf("10.244.%d.0/24", i+1)}},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP,
				Address: fmt.Sprintf("192.168.0.%d", i+1)}}}}
		r.Apply(source.Put(n))
	}
	return r
}

func TestAllowedSources(t *testing.T) {
	many := strings.Repeat("203.0.113.1, ", mostSources)
	for text, want := range map[string]string{
		"203.0.113.0/24": "[203.0.113.0/24]",
		" 203.0.113.7 ,203.0.113.0/28,2001:db8::/64":     "[203.0.113.0/28 2001:db8::/64]",
		"203.0.113.0/24,203.0.113.0/28,203.0.113.128/28": "[203.0.113.0/24]",
		"203.0.113.9/24":     "[203.0.113.0/24]",
		"203.0.113.0/24, x":  `has "x"`,
		"":                   "[]",
		",":                  `has ""`,
		"::ffff:203.0.113.1": "use ranges",
		"fe80::1%eth0":       "use ranges",
		"10.244.2.7":         "podCIDRs of Node b",
		"10.244.0.0/16":      "podCIDRs of Node a",
		"192.168.0.0/24":     "an address of Node a",
		"10.100.0.0/16":      "a range of Services",
		"127.0.0.1":          "loopback",
		"fe80::/64":          "link-local",
		"0.0.0.0/0":          "loopback",
		many + "203.0.113.1": fmt.Sprintf("names %d ranges", mostSources+1),
	} {
		r := sourcesResolver()
		before := len(r.Problems())
		r.Apply([]source.Change{annotated("vpn", "gate", text)})
		got := fmt.Sprint(r.Sources()["vpn/gate"])
		for _, p := range r.Problems()[before:] {
			got += p.Message
		}
		if strings.HasPrefix(want, "[") && got != want || !strings.Contains(got, want) ||
			!strings.HasPrefix(want, "[") && !strings.HasPrefix(got, "[]") {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// TestAllowedSourcesAreGrantedByNamespace has Pods name what another namespace may, and nodes and annotations change.
func TestAllowedSourcesAreGrantedByNamespace(t *testing.T) {
	r := sourcesResolver()
	r.Apply([]source.Change{annotated("web", "x", "203.0.113.1"), annotated("web", "y", "198.51.100.1"),
		annotated("other", "z", "198.51.100.1")})
	if got := fmt.Sprint(r.Sources()); got != "map[web/y:[198.51.100.1/32]]" {
		t.Errorf("%s", got)
	}
	text := fmt.Sprint(r.Problems())
	for _, want := range []string{"doesn't grant to namespace web", "doesn't grant to namespace other"} {
		if !strings.Contains(text, want) {
			t.Errorf("%s lacks %q", text, want)
		}
	}
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c"},
		Spec: corev1.NodeSpec{PodCIDRs: []string{"198.51.100.0/25"}}}
	r.Apply(source.Put(n))
	if got := fmt.Sprint(r.Sources()); got != "map[]" || !strings.Contains(fmt.Sprint(r.Problems()), "Node c") {
		t.Errorf("pods of a Node have that range now: %s, %v", got, r.Problems())
	}
	r.Apply([]source.Change{{Key: source.KeyOf(n)}, {Key: annotated("web", "x", "").Key},
		{Key: annotated("other", "z", "").Key}})
	if got := fmt.Sprint(r.Sources()); got != "map[web/y:[198.51.100.1/32]]" ||
		strings.Contains(fmt.Sprint(r.Problems()), "AllowedSources") {
		t.Errorf("%s, %v", got, r.Problems())
	}
}

// TestAllowedSourceProblemsAreBounded has a tenant's wrong annotations hide no Node's problem.
func TestAllowedSourceProblemsAreBounded(t *testing.T) {
	r := sourcesResolver()
	before := r.Problems()
	var l []source.Change
	for i := range 10 * mostSourceProblems {
		l = append(l, annotated("vpn", fmt.Sprint("p", i), "x"))
	}
	r.Apply(l)
	if got := r.Problems(); len(got) != len(before)+mostSourceProblems+1 ||
		fmt.Sprint(got[:len(before)]) != fmt.Sprint(before) {
		t.Errorf("%d problems: %v", len(got), got)
	}
}

func FuzzAllowedSources(f *testing.F) {
	f.Add("203.0.113.0/24, 2001:db8::/64")
	f.Fuzz(func(t *testing.T, text string) {
		r := sourcesResolver()
		l, err := r.sourcesOf("vpn", text)
		for i, p := range l {
			if err != nil || !p.IsValid() || i > 0 && (l[i-1].Overlaps(p) || l[i-1].Compare(p) >= 0) || r.holder(p) != "" {
				t.Errorf("%q: %v, %v", text, l, err)
			}
		}
	})
}
