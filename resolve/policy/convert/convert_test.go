package convert_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/resolve/policy/convert"
	"fairlead.dev/fairlead/source/manifest"
)

var update = flag.Bool("update", false, "write the golden files in testdata anew")

// TestPolicies converts in.yaml of testdata/policies.txtar: to out.yaml, with the problems as comments before it. What
// is converted is read without a problem, and needs no other conversion.
func TestPolicies(t *testing.T) {
	const name = "testdata/policies.txtar"
	ar, err := txtar.ParseFile(name)
	if err != nil {
		t.Fatal(err)
	}
	objects, problems := convert.Policies(ar.Files[0].Data)
	out, err := convert.YAML(objects)
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, p := range problems {
		fmt.Fprintf(&got, "# line %d: %s\n", p.Line, p)
	}
	got.Write(out)
	if *update {
		ar.Files[1].Data = []byte(got.String())
		if err := os.WriteFile(name, txtar.Format(ar), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want := string(ar.Files[1].Data); got.String() != want {
		t.Errorf("got\n%s\nwant\n%s", got.String(), want)
	}
	file := filepath.Join(t.TempDir(), "out.yaml")
	if err := os.WriteFile(file, out, 0o600); err != nil {
		t.Fatal(err)
	}
	if read, problems, err := manifest.Load(file); len(read) != len(objects) || len(problems) > 0 || err != nil {
		t.Errorf("%d of %d policies are read: %v %v", len(read), len(objects), problems, err)
	}
	if again, problems := convert.Policies(out); len(again)+len(problems) > 0 {
		t.Errorf("%d policies are converted again, %v", len(again), problems)
	}
}

// Rules beyond what a ClusterNetworkPolicy may have are no reason to leave out some of them.
func TestManyRulesAreNamed(t *testing.T) {
	rules := strings.Repeat("{action: Deny, from: [{namespaces: {}}]}, ", 26)
	objects, problems := convert.Policies([]byte("apiVersion: policy.networking.k8s.io/v1alpha1\n" +
		"kind: AdminNetworkPolicy\nmetadata: {name: many}\n" +
		"spec: {priority: 1, subject: {namespaces: {}}, ingress: [" + rules + "]}\n"))
	if len(objects) > 0 || len(problems) != 1 || problems[0].Field != "spec.ingress" ||
		!strings.Contains(problems[0].Message, "at most 25; it is left out") {
		t.Errorf("%d objects, %v", len(objects), problems)
	}
}

// What any text is converted to is read without a problem.
func FuzzPolicies(f *testing.F) {
	ar, err := txtar.ParseFile("testdata/policies.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for doc := range strings.SplitSeq(string(ar.Files[0].Data), "---\n") {
		f.Add([]byte(doc))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		objects, _ := convert.Policies(text)
		out, err := convert.YAML(objects)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "out.yaml")
		if err := os.WriteFile(file, out, 0o600); err != nil {
			t.Fatal(err)
		}
		if read, problems, err := manifest.Load(file); len(read) != len(objects) || len(problems) > 0 || err != nil {
			t.Fatalf("%d of %d policies are read: %v %v\n%s", len(read), len(objects), problems, err, out)
		}
	})
}
