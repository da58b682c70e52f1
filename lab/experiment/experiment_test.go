package experiment

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/instructions"
	"fairlead.dev/fairlead/lab/result"
)

// Of what is traced, and of nothing else, an exact design has the parts.
func TestPartsAreOfWhatIsTraced(t *testing.T) {
	d := counted(result.Design{Measures: []result.Measure{{ID: "crr", Unit: "µs", Ratio: true}, {ID: "change", Unit: "µs"},
		{ID: "add", Unit: "ms", Ratio: true, Counted: "processor time"}}})
	if len(d.Pictures) != 1 || d.Pictures[0].ID != "crr-parts" || len(d.Measures) != 3+len(instructions.PartsOf()) {
		t.Errorf("%+v", d)
	}
}

func TestChoose(t *testing.T) {
	exact := func(name string) string { return name + ", exact" }
	for _, tt := range []struct {
		o     Options
		exact func(string) string
		want  string
	}{{Options{}, exact, "full"}, {Options{Quick: true}, exact, "quick"}, {Options{Exact: true}, exact, "full, exact"},
		{Options{Quick: true, Exact: true}, exact, "quick, exact"}, {Options{Exact: true}, nil, "full"}} {
		if got := Choose(tt.o, "quick", "full", tt.exact); got != tt.want {
			t.Errorf("%+v: %q, want %q", tt.o, got, tt.want)
		}
	}
}

func TestRounds(t *testing.T) {
	for _, c := range []struct {
		o             Options
		profile, want int
	}{
		{Options{}, 7, 7},
		{Options{Quick: true}, 51, 51},
		{Options{Exact: true}, 7, 7},
		{Options{Exact: true, Quick: true}, 7, 3},
		{Options{Exact: true, Quick: true}, 1, 1},
		{Options{Exact: true, Quick: true, Rounds: 5}, 7, 5},
	} {
		if n := c.o.RoundsOr(c.profile); n != c.want {
			t.Errorf("%+v of a profile of %d: %d", c.o, c.profile, n)
		}
	}
}

func TestLayoutsAreChosen(t *testing.T) {
	for _, c := range []struct {
		chosen, want []string
	}{
		{nil, []string{"ipt-classic19", "ipt-classic", "nft-classic"}},
		{[]string{"nft-classic", "ipt-classic19"}, []string{"nft-classic", "ipt-classic19"}},
		{[]string{NoLayouts}, nil},
	} {
		o := Options{Layouts: c.chosen}
		if l, err := o.ChosenLayouts(classic.Layouts); err != nil || !slices.Equal(LayoutNames(l), c.want) {
			t.Errorf("of %v: %v, %v", c.chosen, LayoutNames(l), err)
		}
	}
	for _, chosen := range [][]string{{"classic"}, {NoLayouts, "ipt-classic"}, {"nft-classic"},
		{"ipt-classic", "ipt-classic"}, {}} {
		o := Options{Layouts: chosen}
		if _, err := o.ChosenLayouts(classic.Layouts[:2]); err == nil {
			t.Errorf("%v is no error", chosen)
		}
	}
}

func TestPrograms(t *testing.T) {
	dir := t.TempDir()
	binary, text := filepath.Join(dir, "program"), filepath.Join(dir, "text")
	if err := errors.Join(os.WriteFile(binary, nil, 0o755), os.WriteFile(text, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	for value, want := range map[string]string{
		"kube-proxy=" + binary: binary, "kube-proxy=": "", "kube-proxy": "", "cilium=" + binary: "", binary: "",
		"control-plane=" + binary: "",
		"kube-proxy=" + text:      "", "kube-proxy=" + dir: "", "kube-proxy=" + dir + "/none": "",
	} {
		got, err := Options{Subjects: []string{value}}.Programs(KubeProxyProgram)
		if got["kube-proxy"] != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v", value, got, err)
		}
	}
	both, err := Options{Subjects: []string{"kube-proxy=" + binary, "control-plane=" + binary}}.Programs(KubeProxyProgram,
		ControlPlaneProgram)
	if err != nil || len(both) != 2 {
		t.Errorf("%v, %v", both, err)
	}
}
