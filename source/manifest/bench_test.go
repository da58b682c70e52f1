package manifest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// serviceYAML is the i-th Service as people write it.
func serviceYAML(i int) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata:
  name: svc-%[1]d
  namespace: ns-%[2]d
  labels:
    app: svc-%[1]d
spec:
  clusterIP: 10.96.%[3]d.%[4]d
  selector:
    app: svc-%[1]d
  ports:
  - name: http
    port: 80
    targetPort: 8080
    protocol: TCP
`, i, i%100, i>>8, i&255)
}

// sliceYAML is the EndpointSlice of the i-th Service, of n endpoints.
func sliceYAML(i, n int) string {
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: svc-%[1]d-abcde
  namespace: ns-%[2]d
  labels:
    kubernetes.io/service-name: svc-%[1]d
addressType: IPv4
ports:
- name: http
  port: 8080
  protocol: TCP
endpoints:
`, i, i%100)
	for e := range n {
		fmt.Fprintf(&b, `- addresses:
  - 10.%d.%d.%d
  conditions:
    ready: true
    serving: true
    terminating: false
  nodeName: node-%d
  zone: zone-%d
`, 1+i>>8, i&255, e+1, (i+e)%500, e%3)
	}
	return b.String()
}

func toJSONText(t testing.TB, doc string) string {
	t.Helper()
	j, err := yaml.YAMLToJSON([]byte(doc))
	must(t, err)
	return string(j)
}

// cluster makes a folder of n Services with an EndpointSlice of ten endpoints each.
func cluster(t testing.TB, n int, layout string) string {
	dir := t.TempDir()
	var all strings.Builder
	items := []string{}
	for i := range n {
		docs := []string{serviceYAML(i), sliceYAML(i, 10)}
		for k, doc := range docs {
			switch layout {
			case "YAML files":
				save(t, filepath.Join(dir, fmt.Sprintf("%d/%d-%d.yaml", i%100, i, k)), doc)
			case "JSON files":
				save(t, filepath.Join(dir, fmt.Sprintf("%d/%d-%d.json", i%100, i, k)), toJSONText(t, doc))
			case "one YAML file":
				all.WriteString("---\n" + doc)
			case "one JSON List":
				items = append(items, toJSONText(t, doc))
			}
		}
	}
	switch layout {
	case "one YAML file":
		save(t, filepath.Join(dir, "all.yaml"), all.String())
	case "one JSON List":
		save(t, filepath.Join(dir, "all.json"), `{"apiVersion":"v1","kind":"List","items":[`+strings.Join(items, ",")+`]}`)
	}
	return dir
}

var layouts = []string{"YAML files", "JSON files", "one YAML file", "one JSON List"}

// BenchmarkLoad reads 10,000 Services with ten endpoints each.
func BenchmarkLoad(b *testing.B) {
	for _, layout := range layouts {
		b.Run(layout, func(b *testing.B) {
			dir := cluster(b, 10000, layout)
			start := cpu()
			for b.Loop() {
				objects, problems, err := Load(dir)
				if len(objects) != 20000 || problems != nil || err != nil {
					b.Fatal(len(objects), problems, err)
				}
			}
			b.ReportMetric(float64((cpu()-start).Milliseconds())/float64(b.N), "cpu-ms/op")
		})
	}
}

// BenchmarkChange saves a file of one object in a folder of 10,000 Services, or one document of a file of 20,000, and
// waits until it is delivered.
func BenchmarkChange(b *testing.B) {
	for _, layout := range layouts {
		b.Run(layout, func(b *testing.B) {
			dir := cluster(b, 10000, layout)
			batches := make(chan source.Batch, 10)
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error)
			go func() { done <- New(dir).Run(ctx, func(batch source.Batch) { batches <- batch }) }()
			<-batches
			name, text := changing(b, dir, layout)
			runtime.GC()
			var worst time.Duration
			port := 1000
			for b.Loop() {
				port++
				next := strings.Replace(text, "8080", fmt.Sprint(port), 1)
				must(b, os.WriteFile(name+".tmp", []byte(next), 0o644))
				start := time.Now()
				must(b, os.Rename(name+".tmp", name))
				if batch := <-batches; len(batch.Changes) != 1 {
					b.Fatalf("%d changes", len(batch.Changes))
				}
				worst = max(worst, time.Since(start))
			}
			b.ReportMetric(float64(worst.Microseconds()), "max-µs")
			cancel()
			must(b, <-done)
		})
	}
}

// changing returns the file to change, and its text.
func changing(b *testing.B, dir, layout string) (name, text string) {
	name = map[string]string{"YAML files": "7/7-0.yaml", "JSON files": "7/7-0.json", "one YAML file": "all.yaml",
		"one JSON List": "all.json"}[layout]
	name = filepath.Join(dir, name)
	t, err := os.ReadFile(name)
	must(b, err)
	return name, string(t)
}

// BenchmarkDecode decodes one document, and for comparison turns it into JSON with the library.
func BenchmarkDecode(b *testing.B) {
	for name, doc := range map[string]string{"Service": serviceYAML(7), "EndpointSlice of 10": sliceYAML(7, 10)} {
		w := strip.New()
		for kind, text := range map[string]string{"YAML": doc, "JSON": toJSONText(b, doc)} {
			b.Run(name+"/"+kind, func(b *testing.B) {
				b.ReportAllocs()
				c := split([]byte(text))[0]
				for b.Loop() {
					if it := decode(c, &cache{}, w); it[0].bad != nil {
						b.Fatal(it[0].bad.problems)
					}
				}
			})
		}
		b.Run(name+"/YAML to JSON alone", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := yaml.YAMLToJSONStrict([]byte(doc)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkMemory reports what a running source keeps of 10,000 Services with ten endpoints each.
func BenchmarkMemory(b *testing.B) {
	for _, layout := range layouts {
		b.Run(layout, func(b *testing.B) {
			dir := cluster(b, 10000, layout)
			for b.Loop() {
				before := heap()
				f := newFollower(dir, nil)
				must(b, f.round())
				batch, _ := f.store.batch()
				if len(batch.Changes) != 20000 {
					b.Fatal(len(batch.Changes))
				}
				objects := heap() - before
				runtime.KeepAlive(batch)
				batch = source.Batch{}
				b.ReportMetric(float64(objects)/1e6, "MB-with-first-batch")
				b.ReportMetric(float64(heap()-before)/1e6, "MB")
				runtime.KeepAlive(f)
			}
		})
	}
}

// cpu returns the processor time that the process has used, which other processes disturb less than the clock.
func cpu() time.Duration {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		panic(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

func heap() int64 {
	for range 3 {
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
