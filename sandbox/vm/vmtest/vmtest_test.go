package vmtest

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Results are a tree by name, with what was said, also of what never ended.
func TestCollect(t *testing.T) {
	root, err := collect(strings.NewReader(`
{"Action":"start"}
{"Action":"run","Test":"TestA"}
{"Action":"output","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"run","Test":"TestA/x/y"}
{"Action":"output","Test":"TestA/x/y","Output":"hello\n"}
{"Action":"fail","Test":"TestA/x/y","Elapsed":0.5}
{"Action":"fail","Test":"TestA","Elapsed":1}
{"Action":"run","Test":"TestB"}
{"Action":"output","Output":"panic\n"}
{"Action":"fail"}
`), t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	var walk func(*result)
	walk = func(r *result) {
		got = append(got, r.name+":"+r.action+":"+strings.TrimSpace(r.said.String()))
		for _, b := range r.below {
			walk(b)
		}
	}
	walk(root)
	want := []string{":fail:panic", "TestA:fail:", "TestA/x/y:fail:hello", "TestB::"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// The tests of this package's neighbour that need no machine, in a machine.
func TestRun(t *testing.T) {
	Run(t, "fairlead.dev/fairlead/sandbox/vm", "TestTail|TestKernel", "-test.count=1")
}
