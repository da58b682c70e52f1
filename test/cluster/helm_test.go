package cluster

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/yaml"

	"fairlead.dev/fairlead/sandbox"
)

// helm is Helm as an operator has it, beside the API server.
type helm struct {
	host       *sandbox.Host
	dir        string // has the program, and its own files
	kubeconfig string
}

func newHelm(t testing.TB) helm {
	t.Helper()
	kubeconfig, err := plane.Kubeconfig("helm", first, "system:masters")
	check(t, err)
	dir := t.TempDir()
	check(t, os.Symlink(built(t, "HELM"), filepath.Join(dir, "helm")))
	return helm{box.External(), dir, kubeconfig}
}

// run runs a command line of a shell in the repository's folder, and returns what it prints.
func (h helm) run(t testing.TB, line string) string {
	t.Helper()
	cmd := exec.Command("sh", "-c", line)
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "PATH="+h.dir+":"+os.Getenv("PATH"), "KUBECONFIG="+h.kubeconfig, "MAKEFLAGS=",
		"HELM_CACHE_HOME="+h.dir, "HELM_CONFIG_HOME="+h.dir, "HELM_DATA_HOME="+h.dir)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := h.host.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%s: %v: %s%s", line, err, &out, &said)
	}
	return out.String()
}

// objects returns the objects of a YAML stream by kind and name.
func objects(t testing.TB, text string) map[string]any {
	t.Helper()
	l := map[string]any{}
	for documents := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text))); ; {
		d, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return l
		}
		var o struct {
			Kind     string
			Metadata struct{ Name string }
		}
		var whole any
		check(t, err, yaml.Unmarshal(d, &o), yaml.Unmarshal(d, &whole))
		l[o.Kind+" "+o.Metadata.Name] = whole
	}
}

// Helm renders what `make manifests` prints, with each set of values, and finds nothing wrong with the chart.
func TestDeployHelmTemplate(t *testing.T) {
	h := newHelm(t)
	for _, set := range []string{"mode=nftables", "mode=ebpf --set migrateFromKubeProxy=Remove --set namePods=true",
		"mode=userspace --set systemSettings=false"} {
		values := "--set apiServer.host=192.0.2.10 --set " + set
		contains(t, h.run(t, "helm lint --strict deploy/chart "+values), "0 chart(s) failed")
		want := objects(t, h.run(t, "make -s manifests ARGS='"+values+"'"))
		got := objects(t, h.run(t, "helm template fairlead deploy/chart -n kube-system "+values))
		if diff := cmp.Diff(want, got); diff != "" || len(got) < 5 {
			t.Errorf("%s: helm template differs from make manifests (-make +helm):\n%s", set, diff)
		}
	}
}

// Every command of Helm's in the guides to install and to migrate does on a real API server what it is there for.
func TestDeployHelmDocumented(t *testing.T) {
	var text []byte
	for _, guide := range []string{"install", "migrate-from-kube-proxy"} {
		b, err := os.ReadFile("../../docs/how-to/" + guide + ".md")
		check(t, err)
		text = append(text, b...)
	}
	h := newHelm(t)
	daemonSets := func() (names []string) {
		var l appsv1.DaemonSetList
		plane.must(t, "GET", folders["DaemonSet"], nil, &l)
		for _, d := range l.Items {
			names = append(names, d.Name)
		}
		return names
	}
	status := func() (s struct{ Info struct{ Status string } }) {
		check(t, json.Unmarshal([]byte(h.run(t, "helm status fairlead -n kube-system -o json")), &s))
		return s
	}
	const uninstall = "helm uninstall fairlead -n kube-system"
	t.Cleanup(func() { h.run(t, uninstall+" --ignore-not-found") })
	tried := map[string]int{}
	for l := range strings.Lines(string(text)) {
		line, command := strings.CutPrefix(strings.TrimSpace(l), "$ ")
		if !command || !strings.HasPrefix(line, "helm ") {
			continue
		}
		verb := strings.Fields(line)[1]
		if verb == "install" && len(daemonSets()) > 0 { // another way to begin
			h.run(t, uninstall)
		}
		t.Log(line)
		h.run(t, line)
		tried[verb]++
		var want []string
		if verb != "uninstall" {
			want = []string{"fairlead"}
			var c corev1.ConfigMap
			plane.must(t, "GET", folders["ConfigMap"]+"/fairlead", nil, &c)
			// a rollback ends it
			if strings.Contains(c.Data["config.yaml"], "mode: ebpf") != strings.Contains(line, "mode=ebpf") {
				t.Errorf("%s: the configuration is %s", line, c.Data["config.yaml"])
			}
			if s := status(); s.Info.Status != "deployed" {
				t.Errorf("%s: the release is %q", line, s.Info.Status)
			}
		}
		if strings.Contains(line, "migrateFromKubeProxy=Remove") {
			want = append(want, "fairlead-migrate")
		}
		if got := daemonSets(); !slices.Equal(got, want) {
			t.Errorf("%s: DaemonSets %v, want %v", line, got, want)
		}
	}
	for _, verb := range []string{"install", "upgrade", "rollback", "uninstall"} {
		if tried[verb] == 0 {
			t.Errorf("the guides have no helm %s", verb)
		}
	}
}
