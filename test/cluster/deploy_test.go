package cluster

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// release is the chart, installed.
type release struct {
	pod    corev1.PodSpec
	moves  corev1.PodSpec // of what migrates from kube-proxy
	role   rbacv1.ClusterRole
	files  map[string]string // of the ConfigMap
	secret map[string]string // what a pod finds of its ServiceAccount
}

// folders are where the API server keeps what the chart has.
var folders = map[string]string{
	"ServiceAccount":     "/api/v1/namespaces/kube-system/serviceaccounts",
	"ConfigMap":          "/api/v1/namespaces/kube-system/configmaps",
	"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
	"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	"DaemonSet":          "/apis/apps/v1/namespaces/kube-system/daemonsets",
}

// install renders the chart and returns its objects to the API server, which answers as a cluster's would. In a
// sandbox's node the number of tracked connections is the machine's and can't be set, so it isn't asked for.
func install(t testing.TB, set ...string) (r release) {
	t.Helper()
	args := "--name chart --set apiServer.host=" + plane.Address.String() + " --set kubeProxy.conntrack.maxPerCore=0"
	for _, s := range set {
		args += " --set " + s
	}
	cmd := exec.Command("make", "-s", "manifests", "ARGS="+args) // as docs/how-to/install.md has it
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "MAKEFLAGS=") // those of the make that runs this test have it print folders
	var said bytes.Buffer
	cmd.Stderr = &said
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("render the chart: %v: %s", err, &said)
	}
	for documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		d, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		check(t, err)
		var o struct {
			metav1.TypeMeta   `json:",inline"`
			metav1.ObjectMeta `json:"metadata"`
		}
		var whole map[string]any
		check(t, err, yaml.Unmarshal(d, &o), yaml.Unmarshal(d, &whole))
		folder := folders[o.Kind]
		plane.must(t, "POST", folder+"?fieldValidation=Strict", whole, nil)
		t.Cleanup(func() { plane.must(t, "DELETE", folder+"/"+o.Name, nil, nil) })
		switch o.Kind {
		case "DaemonSet":
			var s appsv1.DaemonSet
			plane.must(t, "GET", folder+"/"+o.Name, nil, &s) // with the server's defaults
			if strings.HasSuffix(o.Name, "-migrate") {
				r.moves = s.Spec.Template.Spec
			} else {
				r.pod = s.Spec.Template.Spec
			}
		case "ClusterRole":
			check(t, yaml.Unmarshal(d, &r.role))
		case "ConfigMap":
			var m corev1.ConfigMap
			check(t, yaml.Unmarshal(d, &m))
			r.files = m.Data
		}
	}
	var token authv1.TokenRequest
	plane.must(t, "POST", folders["ServiceAccount"]+"/"+r.pod.ServiceAccountName+"/token", &authv1.TokenRequest{}, &token)
	r.secret = map[string]string{"token": token.Status.Token, "ca.crt": string(plane.CA.PEM()), "namespace": "kube-system"}
	return r
}

// The chart's pod, in a real container runtime with exactly its rights and mounts, serves with its ServiceAccount:
// settings first, then packets, probes, Events; nothing is forbidden.
func TestDeployServes(t *testing.T) {
	for _, mode := range []string{"nftables", "ebpf", "userspace", "auto"} {
		t.Run(mode, func(t *testing.T) {
			r := install(t, "mode="+mode, "migrateFromKubeProxy=Remove", "kubeProxy.detectLocalMode=NodeCIDR")
			settings := r.start(t, r.pod.InitContainers[0])
			if err := settings.cmd.Wait(); err != nil {
				t.Fatalf("the init container: %v", err)
			}
			settings.alive = false
			if strings.Contains(settings.log.String(), "read-only") {
				t.Error("the init container can't make its settings")
			}
			a := r.start(t, r.pod.Containers[0])
			a.serving(t)
			to := service(t, "web", web1)
			reaches(t, to, "web-1")
			plane.must(t, "PATCH", sliceList+"/web", patch(web2), nil)
			reaches(t, to, "web-2")
			a.problem(t, "")
			for _, p := range []*corev1.Probe{r.pod.Containers[0].LivenessProbe, r.pod.Containers[0].ReadinessProbe} {
				until(t, "the probe "+p.HTTPGet.Path+" is answered", func() error { return a.checkProbe(p.HTTPGet) })
			}
			awaitEvent(t, a)
			moves := release{pod: r.moves, files: r.files, secret: r.secret}.start(t, r.moves.InitContainers[0])
			if err := moves.cmd.Wait(); err != nil || !strings.Contains(moves.log.String(),
				"nothing of kube-proxy is left") {
				t.Errorf("the node is not migrated: %v: %s", err, moves.log)
			}
			moves.alive = false
			for l := range strings.Lines(a.log.String()) {
				for _, word := range []string{"forbidden", "denied", "not permitted", "read-only"} {
					// a lower one takes CAP_SYS_RESOURCE: not worth it
					if strings.Contains(l, word) && !strings.Contains(l, "OOM score") {
						t.Errorf("the log says %q: %s", word, l)
					}
				}
			}
		})
	}
}

// checkProbe queries what a probe asks, as the kubelet does: from the node.
func (a *running) checkProbe(p *corev1.HTTPGetAction) error {
	host := p.Host
	if host == "" {
		host = "172.18.0.11" // the pod's address is the node's
	}
	r, err := a.web.Get(fmt.Sprintf("http://%s:%s%s", host, p.Port.String(), p.Path))
	if err != nil {
		return err
	}
	r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return errors.New(r.Status)
	}
	return nil
}

// odd makes a Service that can't be served as it asks.
func odd(t testing.TB) {
	t.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "odd",
		Annotations: map[string]string{"fairlead.dev/scheduler": "dice"}},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}}}
	plane.must(t, "POST", "/api/v1/namespaces/default/services", s, nil)
	t.Cleanup(func() { plane.must(t, "DELETE", "/api/v1/namespaces/default/services/odd", nil, nil) })
}

// awaitEvent waits for an Event about a Service that can't be served as it asks.
func awaitEvent(t testing.TB, a *running) {
	t.Helper()
	odd(t)
	until(t, "an Event names the Service", func() error {
		var l eventsv1.EventList
		if err := plane.api(first, "GET", "/apis/events.k8s.io/v1/namespaces/default/events", nil, &l); err != nil {
			return err
		}
		for _, e := range l.Items {
			if e.Regarding.Name == "odd" && strings.Contains(e.Note, "dice") {
				return plane.api(first, "DELETE", "/apis/events.k8s.io/v1/namespaces/default/events/"+e.Name, nil, nil)
			}
		}
		return fmt.Errorf("%d others", len(l.Items))
	})
}

// A first install by docs/how-to/install.md: its manifests, and every command that it runs in the agent's container.
func TestDeployDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/how-to/install.md")
	check(t, err)
	contains(t, string(text), "make -s manifests ARGS='--set apiServer.host=", "| kubectl apply -f -")
	r := install(t)
	a := r.start(t, r.pod.Containers[0])
	a.serving(t)
	to := service(t, "web", web1)
	reaches(t, to, "web-1")
	checkProbe := map[string]string{"show": "default/web", "explain": "frontend: ClusterIP of Service default/web"}
	for l := range strings.Lines(string(text)) {
		command, ours := strings.CutPrefix(strings.TrimSpace(l),
			"$ kubectl -n kube-system exec daemonset/fairlead -c agent -- ")
		if !ours {
			continue
		}
		words := strings.Fields(command)
		cmd := a.exec(words...)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		check(t, a.host.Do(cmd.Start))
		if err := cmd.Wait(); err != nil {
			t.Errorf("%s: %v: %s", command, err, &out)
		}
		contains(t, out.String(), checkProbe[words[1]], "in sync")
		delete(checkProbe, words[1])
	}
	if len(checkProbe) > 0 {
		t.Errorf("docs/how-to/install.md has no command for %v", checkProbe)
	}
}

// Each verb that the chart's role grants is needed: without it something is said that names it.
func TestDeployVerbs(t *testing.T) {
	r := install(t)
	for i, rule := range r.role.Rules {
		for _, resource := range rule.Resources {
			for _, verb := range rule.Verbs {
				t.Run(verb+" "+resource, func(t *testing.T) {
					plane.must(t, "PATCH", folders["ClusterRole"]+"/"+r.role.Name,
						map[string]any{"rules": without(r.role.Rules, i, resource, verb)}, nil)
					c := *r.pod.Containers[0].DeepCopy()
					// the agent asks for streamed lists, which are watches, where the server has them; the commands always list
					if verb == "list" {
						c.Args[0] = "show"
					}
					a := r.start(t, c)
					if resource == "events" {
						a.serving(t)
						odd(t)
					}
					until(t, "the agent names what it may not", func() error {
						for l := range strings.Lines(a.log.String()) {
							if strings.Contains(l, "forbidden") && strings.Contains(l, resource) && strings.Contains(l, verb) {
								return nil
							}
						}
						return errors.New("its log does not")
					})
				})
			}
		}
	}
}

// without returns rules that lack a verb on a resource.
func without(rules []rbacv1.PolicyRule, at int, resource, verb string) (l []rbacv1.PolicyRule) {
	for i, r := range rules {
		for _, res := range r.Resources {
			verbs := r.Verbs
			if i == at && res == resource {
				verbs = slices.DeleteFunc(slices.Clone(verbs), func(v string) bool { return v == verb })
			}
			if len(verbs) > 0 {
				l = append(l, rbacv1.PolicyRule{APIGroups: r.APIGroups, Resources: []string{res}, Verbs: verbs})
			}
		}
	}
	return l
}
