package main

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/source"
)

func meta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}

func TestServiceNames(t *testing.T) {
	w := &snapshot{objects: []source.Object{&corev1.Service{ObjectMeta: meta("shop", "web")},
		&corev1.Service{ObjectMeta: meta("default", "api")}, &corev1.Service{ObjectMeta: meta("test", "api")},
		&corev1.Service{ObjectMeta: meta("shop", "db")}, &corev1.Pod{ObjectMeta: meta("test", "db")}}}
	for name, want := range map[string]string{
		"shop/web": "shop/web", "web": "shop/web", "web.shop": "shop/web", "web.shop.svc": "shop/web",
		"web.shop.svc.cluster.local": "shop/web", "api": "default/api", "api.test": "test/api",
		"db": "", "db.shop": "shop/db", "web.test": "", "svc": "", "web.svc": "",
	} {
		got := ""
		if s := w.service(name); s != nil {
			got = s.Namespace + "/" + s.Name
		}
		if got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

func TestUnknownNamesSayWhatThereIs(t *testing.T) {
	w := &snapshot{objects: []source.Object{&corev1.Pod{ObjectMeta: meta("shop", "client")},
		&corev1.Service{ObjectMeta: meta("shop", "web")}}}
	for name, want := range map[string]string{"client": "there is Pod shop/client",
		"shop/client": "there is Pod shop/client",
		"wbe":         `did you mean "web"?`, "shop/nothing": "use an address"} {
		if err := w.unknown(name); !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
}
