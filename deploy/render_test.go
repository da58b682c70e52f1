package deploy

import (
	"bufio"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/config"
)

var update = flag.Bool("update", false, "write ./manifests anew")

const manifests = "manifests/fairlead.yaml"

// placeholder stands in ./manifests for the API server, which nobody but the reader knows.
const placeholder = "api-server.invalid"

// rendered is a chart's objects, decoded strictly.
type rendered struct {
	text    string
	agents  appsv1.DaemonSet
	role    rbacv1.ClusterRole
	binding rbacv1.ClusterRoleBinding
	account corev1.ServiceAccount
	config  corev1.ConfigMap
}

// render renders the chart and decodes it: unknown and double fields are errors.
func render(t *testing.T, set ...string) (r rendered) {
	t.Helper()
	var err error
	if r.text, err = Render("chart", Release{Name: "fairlead", Namespace: "kube-system", Set: append([]string{"apiServer.host=" + placeholder}, set...)}); err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{appsv1.AddToScheme, corev1.AddToScheme, rbacv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	decoder := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme, json.SerializerOptions{Yaml: true, Strict: true})
	documents := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(r.text)))
	seen := 0
	for ; ; seen++ {
		text, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		o, _, err := decoder.Decode(text, nil, nil)
		if err != nil {
			t.Fatalf("%v, in\n%s", err, text)
		}
		switch o := o.(type) {
		case *appsv1.DaemonSet:
			r.agents = *o
		case *rbacv1.ClusterRole:
			r.role = *o
		case *rbacv1.ClusterRoleBinding:
			r.binding = *o
		case *corev1.ServiceAccount:
			r.account = *o
		case *corev1.ConfigMap:
			r.config = *o
		}
	}
	if seen != 5 {
		t.Errorf("%d objects, not 5:\n%s", seen, r.text)
	}
	return r
}

// load reads the chart's configuration as the agent does.
func (r rendered) load(t *testing.T) *config.Config {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(r.config.Data["config.yaml"]), 0o644); err != nil {
		t.Fatal(err)
	}
	var f config.Flags
	set := pflag.NewFlagSet("run", pflag.ContinueOnError)
	f.Add(set)
	if err := set.Parse([]string{"--config", file, "--node", "a"}); err != nil {
		t.Fatal(err)
	}
	c, err := f.Load()
	if err != nil {
		t.Fatalf("%v, in\n%s", err, r.config.Data["config.yaml"])
	}
	if len(c.Warnings) > 0 {
		t.Errorf("warnings: %q", c.Warnings)
	}
	return c
}

func (r rendered) agent() corev1.Container { return r.agents.Spec.Template.Spec.Containers[0] }

func TestLint(t *testing.T) {
	for _, m := range lint.RunAll("chart", map[string]any{"apiServer": map[string]any{"host": placeholder}}, "kube-system").Messages {
		if !strings.Contains(m.Err.Error(), "icon is recommended") {
			t.Error(m)
		}
	}
}

// Every mode's chart is what the API takes, and its configuration what the agent takes.
func TestModes(t *testing.T) {
	for _, mode := range append(agent.Names(), agent.Auto) {
		t.Run(mode, func(t *testing.T) {
			for _, takeOver := range []config.TakeOver{config.Leave, config.Remove} {
				r := render(t, "mode="+mode, "takeOver="+string(takeOver))
				if c := r.load(t); c.Own.Mode != mode || c.Own.TakeOver != takeOver || c.Proxy.HealthzBindAddress != "0.0.0.0:10256" {
					t.Errorf("the agent is told: %+v", c.Own)
				}
				pod, s := r.agents.Spec.Template.Spec, r.agent().SecurityContext
				if pod.HostPID != (takeOver == config.Remove) || !pod.HostNetwork {
					t.Errorf("hostPID %v, hostNetwork %v", pod.HostPID, pod.HostNetwork)
				}
				if *s.Privileged != (mode == "ipvs" || mode == "userspace" || mode == "ebpf") || !*s.ReadOnlyRootFilesystem {
					t.Errorf("privileged %v", *s.Privileged)
				}
				if *s.Privileged {
					continue
				}
				if !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || !slices.Contains(s.Capabilities.Add, "NET_ADMIN") {
					t.Errorf("capabilities: %+v", s.Capabilities)
				}
				if admin := slices.Contains(s.Capabilities.Add, "SYS_ADMIN"); admin != *s.AllowPrivilegeEscalation {
					t.Errorf("allowPrivilegeEscalation %v beside %v: the API refuses one of both", *s.AllowPrivilegeEscalation, s.Capabilities.Add)
				}
			}
		})
	}
}

// What belongs together by name does.
func TestNames(t *testing.T) {
	for _, set := range [][]string{nil, {"serviceAccount.name=other"}} {
		r := render(t, set...)
		pod := r.agents.Spec.Template.Spec
		if r.binding.RoleRef.Name != r.role.Name || r.binding.Subjects[0].Name != r.account.Name || r.binding.Subjects[0].Namespace != r.account.Namespace || pod.ServiceAccountName != r.account.Name {
			t.Errorf("%+v binds %s to %s", r.binding, r.role.Name, r.account.Name)
		}
		if pod.Volumes[0].ConfigMap.Name != r.config.Name {
			t.Errorf("volume of %s, not %s", pod.Volumes[0].ConfigMap.Name, r.config.Name)
		}
		for k, v := range r.agents.Spec.Selector.MatchLabels {
			if r.agents.Spec.Template.Labels[k] != v {
				t.Errorf("label %s=%s is not the pods'", k, v)
			}
		}
		for _, c := range append(pod.InitContainers, pod.Containers...) {
			for _, m := range c.VolumeMounts {
				if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name }) {
					t.Errorf("%s mounts %s, which is no volume", c.Name, m.Name)
				}
			}
		}
	}
}

// Probes ask where the configuration says that it serves.
func TestProbes(t *testing.T) {
	r := render(t, "health.port=11256", "metrics.port=11249")
	c, a := r.load(t), r.agent()
	if l := a.LivenessProbe.HTTPGet; l.Path != "/livez" || c.Proxy.HealthzBindAddress != "0.0.0.0:"+l.Port.String() {
		t.Errorf("liveness asks %v, served at %s", l, c.Proxy.HealthzBindAddress)
	}
	if l := a.ReadinessProbe.HTTPGet; l.Path != "/readyz" || c.Proxy.MetricsBindAddress != l.Host+":"+l.Port.String() {
		t.Errorf("readiness asks %v, served at %s", l, c.Proxy.MetricsBindAddress)
	}
}

// Both configurations go through; a name of another cluster-wide object is another.
func TestConfiguration(t *testing.T) {
	r := render(t, "kubeProxy.clusterCIDR=10.0.0.0/8", "kubeProxy.detectLocalMode=ClusterCIDR", "fairlead.scheduler=maglev")
	if c := r.load(t); c.Proxy.ClusterCIDR != "10.0.0.0/8" || c.Own.Scheduler != "maglev" {
		t.Errorf("told %+v %+v", c.Proxy, c.Own)
	}
	other, err := Render("chart", Release{Name: "two", Namespace: "net", Set: []string{"apiServer.host=h"}})
	if err != nil || !strings.Contains(other, "name: fairlead-two\n") || strings.Contains(other, "name: fairlead\n  labels:\n    app.kubernetes.io/name: fairlead\n    app.kubernetes.io/instance: two\nrules") {
		t.Errorf("another release: %v\n%s", err, other)
	}
}

// Wrong values are refused by name.
func TestRefusals(t *testing.T) {
	for set, want := range map[string]string{
		"mode=best":                                "/mode",
		"apiServer.host=":                          "/apiServer/host",
		"takeover=Remove":                          "takeover",
		"health.port=0":                            "/health/port",
		"kubeProxy.mode=ipvs":                      "/kubeProxy",
		"fairlead.takeOver=Remove":                 "/fairlead",
		"image.digest=sha256:12":                   "/image/digest",
		"kubeProxy.healthzBindAddress=0.0.0.0:123": "/kubeProxy",
	} {
		_, err := Render("chart", Release{Name: "r", Namespace: "n", Set: []string{"apiServer.host=h", set}})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want one that names %q", set, err, want)
		}
	}
}

// Each value of values.yaml is in the schema, is said something about, and is used.
func TestValuesDocumented(t *testing.T) {
	text, err := os.ReadFile("chart/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	var schema struct{ Properties map[string]any }
	raw, err := os.ReadFile("chart/values.schema.json")
	if err = errors.Join(err, yaml.Unmarshal(text, &values), yaml.Unmarshal(raw, &schema)); err != nil {
		t.Fatal(err)
	}
	delete(schema.Properties, "global") // Helm's own
	for name := range schema.Properties {
		if _, ok := values[name]; !ok {
			t.Errorf("the schema's %s is not in values.yaml", name)
		}
	}
	var used []byte
	files, _ := filepath.Glob("chart/templates/*")
	for _, f := range files {
		b, _ := os.ReadFile(f)
		used = append(used, b...)
	}
	for name := range values {
		if !regexp.MustCompile(`(Values|\s)\.` + name + `\b`).Match(used) {
			t.Errorf("no template uses %s", name)
		}
	}
}

// The manifests for those without Helm are the chart's.
func TestManifestsAreCurrent(t *testing.T) {
	head := "# The chart with its values as they are, for kubectl: made by `go test ./... -run Manifests -update` in deploy/.\n" +
		"# Say where your API server is first: sed -i 's/" + placeholder + "/192.0.2.10/' fairlead.yaml\n"
	want := head + render(t).text
	if *update {
		if err := os.WriteFile(manifests, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	is, err := os.ReadFile(manifests)
	if err != nil || string(is) != want {
		t.Errorf("%s is not what the chart renders (%v): run go test -run Manifests -update", manifests, err)
	}
}
