package inspect

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// An overview has the Services that are named, with what is said of them and of no Service at all.
func TestOverviewOfNamedServices(t *testing.T) {
	meta := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name}
	}
	n := &Node{Objects: []source.Object{&corev1.Service{ObjectMeta: meta("shop", "web")},
		&corev1.Service{ObjectMeta: meta("shop", "db")}}}
	problem := func(name string) source.Problem {
		return source.Problem{Object: source.Key{Kind: source.Service, Namespace: "shop", Name: name}}
	}
	owner := func(name string) model.Owner {
		return model.Owner{Kind: model.KindService, Namespace: "shop", Name: name}
	}
	s := Overview{Frontends: []Frontend{{Service: "shop/web:http", Owner: owner("web")},
		{Service: "shop/db", Owner: owner("db")}, {Service: "shop/web2", Owner: owner("web2")}},
		Problems: []source.Problem{problem("web"), problem("db"), {Object: source.Key{Kind: source.Node, Name: "a"}}}}
	if err := s.filter(n, []string{"web"}); err != nil {
		t.Fatal(err)
	}
	if len(s.Frontends) != 1 || s.Frontends[0].Service != "shop/web:http" || len(s.Problems) != 2 ||
		s.Problems[0] != problem("web") {
		t.Errorf("left are %+v", s)
	}
	if err := s.filter(n, []string{"wbe"}); err == nil || !strings.Contains(err.Error(), `did you mean "web"`) {
		t.Errorf("an unknown name: %v", err)
	}
}
