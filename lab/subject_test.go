package lab

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/result"
)

func TestBrokenSubject(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kube-proxy")
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho a word before the end\nexit 3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	tinyTigera := func(ctx context.Context, r *run) (work, error) {
		r.Modes = []string{armNFT}
		return newTigera(ctx, r, tigeraProfile{Name: "tiny", Services: []int{1}})
	}
	for _, c := range []struct {
		subjects []string
		want     string
	}{
		{[]string{"kube-proxy=" + path}, "a word before the end"},
		{[]string{"kube-proxy=" + path, "kube-proxy=" + path}, "given already"},
		{[]string{"kube-proxy=/nonexistent"}, "make -C test/kubeproxy build"},
		{[]string{"cilium=" + path}, "want kube-proxy=PATH"},
	} {
		for name, begin := range map[string]func(context.Context, *run) (work, error){"services": tinyServices, "tigera": tinyTigera, "control": tinyControl} {
			o := options(t, io.Discard)
			o.Subjects = c.subjects
			if _, err := perform(t.Context(), o, begin); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s with %v: error %v, want %q in it", name, c.subjects, err, c.want)
			}
			nothingLeft(t)
		}
	}
}

// tinyControl begins the experiment control with the tiny profile.
func tinyControl(ctx context.Context, r *run) (work, error) {
	r.Modes = []string{armNFT}
	return newControlSide(ctx, r, controlTiny)
}

func TestBrokenControlPlane(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control-plane")
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho $1 has a word before the end\nexit 3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	o := options(t, io.Discard)
	o.Subjects = []string{"control-plane=" + path}
	if _, err := perform(t.Context(), o, tinyControl); err == nil || !strings.Contains(err.Error(), "kube-apiserver has a word before the end") {
		t.Errorf("error %v", err)
	}
	nothingLeft(t)
}

func TestPrograms(t *testing.T) {
	dir := t.TempDir()
	binary, text := filepath.Join(dir, "program"), filepath.Join(dir, "text")
	if err := errors.Join(os.WriteFile(binary, nil, 0o755), os.WriteFile(text, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	for value, want := range map[string]string{
		"kube-proxy=" + binary: binary, "kube-proxy=": "", "kube-proxy": "", "cilium=" + binary: "", binary: "", "control-plane=" + binary: "",
		"kube-proxy=" + text: "", "kube-proxy=" + dir: "", "kube-proxy=" + dir + "/none": "",
	} {
		got, err := Options{Subjects: []string{value}}.programs(kubeProxyProgram)
		if got["kube-proxy"] != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v", value, got, err)
		}
	}
	both, err := Options{Subjects: []string{"kube-proxy=" + binary, "control-plane=" + binary}}.programs(kubeProxyProgram, controlPlaneProgram)
	if err != nil || len(both) != 2 {
		t.Errorf("%v, %v", both, err)
	}
}

// A kube-proxy adds rows, the aim that compares with it, and nothing else; without one the design says so.
func TestSubjectDesign(t *testing.T) {
	without := (&services{run: &run{}, Profile: Quick()}).design()
	with := (&services{run: &run{}, Profile: Quick(), kubeProxy: "/kube-proxy"}).design()
	if !slices.Contains(without.Missing, noSubject) || slices.Contains(with.Missing, noSubject) {
		t.Error("what is missing does not follow what is given")
	}
	isG5 := func(a result.Aim) bool { return a.ID == "G5" }
	if slices.ContainsFunc(without.Aims, isG5) || !slices.ContainsFunc(with.Aims, isG5) {
		t.Error("the aim G5 is to be there with a kube-proxy alone")
	}
	if len(with.Arms) != len(without.Arms)+len(proxyArms) {
		t.Errorf("%d arms with a kube-proxy, %d without", len(with.Arms), len(without.Arms))
	}
}

// The list of kube-proxy's iptables mode is in no order that lasts: its arm connects to Services spread over all.
func TestTargetsOfKubeProxy(t *testing.T) {
	r := &tigera{stage: &stage{run: &run{}, counts: fullTigera.Services}, Profile: fullTigera}
	all := func(*pair) bool { return true }
	for _, c := range []struct {
		arm, position string
		want          int
	}{{armProxyIPT, middle, fewTargets}, {armProxyNFT, middle, 1}, {armProxyIPT, last, 0}, {armProxyNFT, first, 0}, {armProxyIPT, none, fewTargets}} {
		to := r.to(c.position, all)(&pair{arm: c.arm, services: 100, proxy: &kubeproxy.Node{}})
		if len(to) != c.want {
			t.Errorf("%s, %s: connects to %v", c.arm, c.position, to)
		}
		if c.position == middle && !slices.Contains(to, entry(50)) {
			t.Errorf("%s, %s: the middle is not among %v", c.arm, c.position, to)
		}
	}
	connected := newCluster(100, append(spread(100, fewTargets), service(middle, 100))...)
	for _, i := range spread(100, fewTargets) {
		if a := connected.slice(i).Endpoints[0].Addresses[0]; netip.MustParseAddr(a) != serverAddr(0) {
			t.Errorf("Service %d has its first endpoint at %s", i, a)
		}
	}
}

func TestSaveReplaces(t *testing.T) {
	f, err := newCluster(1).write(t.TempDir(), 1)
	if err != nil {
		t.Fatal(err)
	}
	a, err := f.save(f.slice(0))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := f.save(f.with(0, 1, spare(0, 1))); err != nil || b != a {
		t.Errorf("an object's next file is %s, %v; the one before was %s", b, err, a)
	}
	text, err := os.ReadFile(a)
	if err != nil || !strings.Contains(string(text), spare(0, 1).String()) {
		t.Errorf("the file says %s, %v", text, err)
	}
}
