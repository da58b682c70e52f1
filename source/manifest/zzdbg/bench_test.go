package manifest

import (
	stdjson "encoding/json"
	"fmt"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
	"strings"
	"testing"
)

func sliceYAML(i, n int) string {
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: svc-%d-abcde
  namespace: ns-%d
  labels:
    kubernetes.io/service-name: svc-%d
addressType: IPv4
ports:
- name: http
  port: 8080
  protocol: TCP
endpoints:
`, i, i%100, i)
	for e := range n {
		fmt.Fprintf(&b, `- addresses:
  - 10.%d.%d.%d
  conditions:
    ready: true
    serving: true
    terminating: false
  nodeName: node-%d
  zone: zone-%d
`, i>>8, i&255, e+1, e%50, e%3)
	}
	return b.String()
}

func serviceYAML(i int) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata:
  name: svc-%d
  namespace: ns-%d
  labels:
    app: svc-%d
spec:
  clusterIP: 10.96.%d.%d
  selector:
    app: svc-%d
  ports:
  - name: http
    port: 80
    targetPort: 8080
    protocol: TCP
`, i, i%100, i, i>>8, i&255, i)
}

func BenchmarkLib(b *testing.B) {
	y := []byte(sliceYAML(5, 10))
	j, _ := yaml.YAMLToJSONStrict(y)
	sj, _ := yaml.YAMLToJSONStrict([]byte(serviceYAML(5)))
	b.Logf("%d %d", len(y), len(j))
	b.Run("yamlToJSON", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			yaml.YAMLToJSONStrict(y)
		}
	})
	b.Run("yamlToJSONsvc", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			yaml.YAMLToJSONStrict([]byte(serviceYAML(5)))
		}
	})
	b.Run("kjsonStrict", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var s discoveryv1.EndpointSlice
			kjson.UnmarshalStrict(j, &s)
		}
	})
	b.Run("kjson", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var s discoveryv1.EndpointSlice
			kjson.UnmarshalCaseSensitivePreserveInts(j, &s)
		}
	})
	b.Run("stdjson", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var s discoveryv1.EndpointSlice
			stdjson.Unmarshal(j, &s)
		}
	})
	b.Run("kjsonStrictsvc", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var s corev1.Service
			kjson.UnmarshalStrict(sj, &s)
		}
	})
	b.Run("kjsonsvc", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var s corev1.Service
			kjson.UnmarshalCaseSensitivePreserveInts(sj, &s)
		}
	})
}
