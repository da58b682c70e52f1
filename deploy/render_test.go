package deploy

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"maps"
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	kubejson "k8s.io/apimachinery/pkg/runtime/serializer/json"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/mode"
)

var update = flag.Bool("update", false, "write ./manifests anew")

const manifests = "manifests/fairlead.yaml"

// placeholder stands in ./manifests for the API server, which the reader alone knows.
const placeholder = "api-server.invalid"

// rendered is a chart's objects, decoded strictly.
type rendered struct {
	text    string
	agents  appsv1.DaemonSet
	migrate *appsv1.DaemonSet // nil: there is none
	role    rbacv1.ClusterRole
	binding rbacv1.ClusterRoleBinding
	account corev1.ServiceAccount
	config  corev1.ConfigMap
}

// render renders the chart and decodes it: unknown and double fields are errors.
func render(t *testing.T, set ...string) (r rendered) {
	t.Helper()
	var err error
	if r.text, err = Render("chart", Release{Name: "fairlead", Namespace: "kube-system",
		Set: append([]string{"apiServer.host=" + placeholder}, set...)}); err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{appsv1.AddToScheme, corev1.AddToScheme, rbacv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	decoder := kubejson.NewSerializerWithOptions(kubejson.DefaultMetaFactory, scheme, scheme,
		kubejson.SerializerOptions{Yaml: true, Strict: true})
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
			if strings.HasSuffix(o.Name, "-migrate") {
				r.migrate = o
				seen--
			} else {
				r.agents = *o
			}
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
	for _, m := range lint.RunAll("chart", map[string]any{"apiServer": map[string]any{"host": placeholder}},
		"kube-system").Messages {
		if !strings.Contains(m.Err.Error(), "icon is recommended") {
			t.Error(m)
		}
	}
}

// Every mode's chart is what the API takes, and its configuration what the agent takes. Nothing privileged serves, nor
// sees the host's processes.
func TestModes(t *testing.T) {
	for _, mode := range append(mode.Names(), mode.Auto) {
		t.Run(mode, func(t *testing.T) {
			for _, migrateFromKubeProxy := range []config.MigrateFromKubeProxy{config.Leave, config.Remove} {
				r := render(t, "mode="+mode, "migrateFromKubeProxy="+string(migrateFromKubeProxy))
				if c := r.load(t); c.Own.Mode != mode || c.Own.MigrateFromKubeProxy != config.Leave ||
					c.Proxy.HealthzBindAddress != "0.0.0.0:10256" {
					t.Errorf("the agent is told: %+v", c.Own)
				}
				pod := r.agents.Spec.Template.Spec
				if pod.HostPID || !pod.HostNetwork ||
					pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
					t.Errorf("hostPID %v, hostNetwork %v, seccomp %v", pod.HostPID, pod.HostNetwork,
						pod.SecurityContext.SeccompProfile)
				}
				if c := r.agent(); c.Resources.Limits.Memory().String() != "512Mi" {
					t.Errorf("memory's limit is %v", c.Resources.Limits.Memory())
				}
				confined(t, r.agent(), "NET_ADMIN")
				if (r.migrate != nil) != (migrateFromKubeProxy == config.Remove) {
					t.Errorf("migrateFromKubeProxy %s: migrate %v", migrateFromKubeProxy, r.migrate)
				}
			}
		})
	}
}

// confined demands that a container is unprivileged and has the named capabilities among those that it is given.
func confined(t *testing.T, c corev1.Container, named ...corev1.Capability) {
	t.Helper()
	s := c.SecurityContext
	if *s.Privileged || !*s.ReadOnlyRootFilesystem || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		t.Errorf("%s: %+v", c.Name, s)
	}
	for _, n := range named {
		if !slices.Contains(s.Capabilities.Add, n) {
			t.Errorf("%s lacks %s: %v", c.Name, n, s.Capabilities.Add)
		}
	}
	if admin := slices.Contains(s.Capabilities.Add, "SYS_ADMIN"); admin != *s.AllowPrivilegeEscalation {
		t.Errorf("%s: allowPrivilegeEscalation %v beside %v: the API refuses one of both", c.Name,
			*s.AllowPrivilegeEscalation, s.Capabilities.Add)
	}
}

// Migration is a workload of its own: it alone sees the host's processes, on the same nodes as the agents, and its pods
// are none of theirs.
func TestMigrate(t *testing.T) {
	r := render(t, "migrateFromKubeProxy=Remove", "nodeSelector.fairlead\\.dev/proxy=yes")
	pod, agents := r.migrate.Spec.Template.Spec, r.agents.Spec.Template.Spec
	if !pod.HostPID || !pod.HostNetwork || *pod.AutomountServiceAccountToken || !maps.Equal(pod.NodeSelector,
		agents.NodeSelector) {
		t.Errorf("%+v", pod)
	}
	confined(t, pod.InitContainers[0], "NET_ADMIN", "NET_RAW", "SYS_PTRACE")
	confined(t, pod.Containers[0])
	if len(pod.Containers[0].SecurityContext.Capabilities.Add) > 0 || !*pod.Containers[0].SecurityContext.RunAsNonRoot {
		t.Errorf("what remains has rights: %+v", pod.Containers[0].SecurityContext)
	}
	for k, v := range r.migrate.Spec.Selector.MatchLabels {
		if r.migrate.Spec.Template.Labels[k] != v {
			t.Errorf("label %s=%s is not the pods'", k, v)
		}
	}
	if s, err := metav1.LabelSelectorAsSelector(r.agents.Spec.Selector); err != nil ||
		s.Matches(labels.Set(r.migrate.Spec.Template.Labels)) {
		t.Errorf("the agents' selector takes these pods too, %v", err)
	}
}

// privileges is what each mode's agent is given, for the test that runs the program with no more: ../test.
const privileges = "manifests/privileges.json"

// granted is what an agent's container is given.
type granted struct {
	Capabilities []corev1.Capability `json:"capabilities"`
	// mounted where → the host's; " ro" ends what is read-only
	HostPaths map[string]string `json:"hostPaths,omitempty"`
}

// The file holds what the chart grants.
func TestPrivilegesAreCurrent(t *testing.T) {
	all := map[string]granted{}
	for _, mode := range append(mode.Names(), mode.Auto) {
		r := render(t, "mode="+mode)
		g := granted{Capabilities: r.agent().SecurityContext.Capabilities.Add}
		for _, m := range r.agent().VolumeMounts {
			for _, v := range r.agents.Spec.Template.Spec.Volumes {
				if v.Name == m.Name && v.HostPath != nil {
					if g.HostPaths == nil {
						g.HostPaths = map[string]string{}
					}
					g.HostPaths[m.MountPath] = v.HostPath.Path + map[bool]string{true: " ro"}[m.ReadOnly]
				}
			}
		}
		all[mode] = g
	}
	want, err := json.MarshalIndent(all, "", "\t")
	if err != nil {
		t.Fatal(err)
	}
	current(t, privileges, string(want)+"\n")
}

// What belongs together by name does.
func TestNames(t *testing.T) {
	for _, set := range [][]string{nil, {"serviceAccount.name=other"}} {
		r := render(t, set...)
		pod := r.agents.Spec.Template.Spec
		if r.binding.RoleRef.Name != r.role.Name || r.binding.Subjects[0].Name != r.account.Name ||
			r.binding.Subjects[0].Namespace != r.account.Namespace || pod.ServiceAccountName != r.account.Name {
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

// Commands in the agent's container find its socket, wherever the run folder is.
func TestRunFolder(t *testing.T) {
	for _, set := range [][]string{nil, {"network.mode=Chained"}, {"network.runFolder=/run/net"},
		{"network.mode=Own", "network.runFolder=/run/net"}} {
		r := render(t, set...)
		want := r.load(t).Own.Network.RunFolder
		if !slices.ContainsFunc(r.agent().VolumeMounts, func(m corev1.VolumeMount) bool {
			return m.MountPath == want && !m.ReadOnly
		}) {
			t.Errorf("%v: no volume is mounted at %s", set, want)
		}
		if want != config.DefaultRunFolder && !slices.Contains(r.agent().Env,
			corev1.EnvVar{Name: config.EnvRunFolder, Value: want}) {
			t.Errorf("%v: %s is not %s", set, config.EnvRunFolder, want)
		}
	}
}

// Both configurations go through; a name of another cluster-wide object is another.
func TestConfiguration(t *testing.T) {
	r := render(t, "kubeProxy.clusterCIDR=10.0.0.0/8", "kubeProxy.detectLocalMode=ClusterCIDR",
		"fairlead.scheduler=maglev")
	if c := r.load(t); c.Proxy.ClusterCIDR != "10.0.0.0/8" || c.Own.Scheduler != "maglev" {
		t.Errorf("told %+v %+v", c.Proxy, c.Own)
	}
	other, err := Render("chart", Release{Name: "two", Namespace: "net", Set: []string{"apiServer.host=h"}})
	if err != nil || !strings.Contains(other, "name: fairlead-two\n") || strings.Contains(other,
		"name: fairlead\n  labels:\n    app.kubernetes.io/name: fairlead\n    app.kubernetes.io/instance: two\nrules") {
		t.Errorf("another release: %v\n%s", err, other)
	}
}

// Each engine may be chosen beside a mode that has what it needs.
func TestPolicyEngines(t *testing.T) {
	for engine, mode := range map[string]string{"auto": "auto", "nftables": "ipvs", "iptables": "auto", "ebpf": "ebpf"} {
		r := render(t, "policy.mode=Enforce", "policy.engine="+engine, "mode="+mode)
		if c := r.load(t); c.Own.Policy.Engine != engine {
			t.Errorf("%s: told %+v", engine, c.Own.Policy)
		}
	}
}

// Agents may read policies, Pods and Namespaces where policies count, and only there.
func TestPolicies(t *testing.T) {
	all := []string{"clusternetworkpolicies", "customresourcedefinitions", "namespaces", "networkpolicies", "pods"}
	for mode, want := range map[string][]string{"Ignore": nil, "Audit": all, "Enforce": all} {
		r := render(t, "policy.mode="+mode, "policy.unknownPods=Allow")
		if c := r.load(t); string(c.Own.Policy.Mode) != mode || c.Own.Policy.UnknownPods != "Allow" ||
			c.Own.Policy.Engine != "auto" || c.Policies() != (want != nil) {
			t.Errorf("%s: told %+v", mode, c.Own.Policy)
		}
		var got, counted []string
		for _, rule := range r.role.Rules {
			for _, resource := range rule.Resources {
				if slices.Contains(all, resource) && slices.Equal(rule.Verbs, []string{"list", "watch"}) {
					got = append(got, resource)
				}
				if strings.HasSuffix(resource, "adminnetworkpolicies") && slices.Equal(rule.Verbs, []string{"list"}) {
					counted = append(counted, resource)
				}
			}
		}
		if want == nil && counted != nil || want != nil && len(counted) != 2 {
			t.Errorf("%s: agents may count %v", mode, counted)
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("%s: agents may read %v, want %v", mode, got, want)
		}
	}
}

// Agents connect pods, and have the rights for that, only where they are to. What installs the plugin has none
// but on its folder.
func TestNetwork(t *testing.T) {
	if r := render(t); r.load(t).Network() || len(r.agents.Spec.Template.Spec.InitContainers) != 1 ||
		slices.Contains(r.agent().SecurityContext.Capabilities.Add, "SYS_ADMIN") {
		t.Errorf("without: %+v", r.agents.Spec.Template.Spec)
	}
	namespaces := func(m corev1.VolumeMount) bool { return m.MountPath == "/var/run/netns" }
	if r := render(t, "network.mode=Chained"); r.load(t).Own.Network.Mode != config.NetworkChained ||
		len(r.agents.Spec.Template.Spec.InitContainers) != 2 || slices.ContainsFunc(r.agent().VolumeMounts, namespaces) ||
		slices.Contains(r.agent().SecurityContext.Capabilities.Add, "SYS_ADMIN") {
		t.Errorf("chained: %+v", r.agents.Spec.Template.Spec)
	}
	for _, mode := range append(mode.Names(), mode.Auto) {
		r := render(t, "mode="+mode, "network.mode=Own", "network.overlay=Always", "network.cniFolder=/etc/net.d",
			"cniPlugins=/usr/lib/cni", "systemSettings=false")
		if c := r.load(t).Own.Network; c.Mode != config.NetworkOwn || c.Overlay != "Always" || c.CNIFolder != "/etc/net.d" {
			t.Errorf("told %+v", c)
		}
		pod := r.agents.Spec.Template.Spec
		confined(t, r.agent(), "NET_ADMIN", "SYS_ADMIN")
		confined(t, pod.InitContainers[0])
		if c := pod.InitContainers[0]; len(pod.InitContainers) != 1 || len(c.SecurityContext.Capabilities.Add) > 0 ||
			len(c.VolumeMounts) != 1 || !slices.Equal(c.Command[1:], []string{"install", c.VolumeMounts[0].MountPath}) {
			t.Errorf("installed by %+v", c)
		}
		if i := slices.IndexFunc(r.agent().VolumeMounts, namespaces); i < 0 || !r.agent().VolumeMounts[i].ReadOnly ||
			*r.agent().VolumeMounts[i].MountPropagation != corev1.MountPropagationHostToContainer {
			t.Errorf("pods' network namespaces: %+v", r.agent().VolumeMounts)
		}
		var folders []string
		for _, v := range pod.Volumes {
			if v.HostPath != nil {
				folders = append(folders, v.HostPath.Path)
			}
		}
		for _, want := range []string{"/usr/lib/cni", "/etc/net.d", "/run/fairlead", "/var/run/netns"} {
			if !slices.Contains(folders, want) {
				t.Errorf("mode %s: %v lack %s", mode, folders, want)
			}
		}
	}
}

// Wrong values are refused by name.
func TestRejections(t *testing.T) {
	for set, want := range map[string]string{
		"mode=best":                                "/mode",
		"apiServer.host=":                          "/apiServer/host",
		"policy.mode=On":                           "/policy/mode",
		"policy.engine=tc":                         "/policy/engine",
		"policy.engine=ebpf":                       "/mode",
		"fairlead.policy.mode=Enforce":             "/fairlead",
		"fairlead.network.mode=Own":                "/fairlead",
		"network.mode=Chain":                       "/network/mode",
		"cniPlugins=bin":                           "/cniPlugins",
		"takeOver=Remove":                          "takeOver",
		"fairlead.takeOver=Remove":                 "/fairlead",
		"health.port=0":                            "/health/port",
		"kubeProxy.mode=ipvs":                      "/kubeProxy",
		"fairlead.migrateFromKubeProxy=Remove":     "/fairlead",
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
	head := "# The chart with its values as they are, for kubectl: made by `go test ./... -run Current -update` in " +
		"deploy/.\n" +
		"# Say where your API server is first: sed -i 's/" + placeholder + "/192.0.2.10/' fairlead.yaml\n"
	current(t, manifests, head+render(t).text)
}

// current demands that a file is as it should be, or makes it so.
func current(t *testing.T, file, want string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	is, err := os.ReadFile(file)
	if err != nil || string(is) != want {
		t.Errorf("%s is not what the chart renders (%v): run go test -run Current -update", file, err)
	}
}
