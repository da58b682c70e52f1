package cluster

import (
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// The labels and annotations of what a run makes.
const (
	labelRun    = "fairlead.dev/lab-run"  // its ID
	labelRole   = "fairlead.dev/lab-role" // server, client, host
	ownerHost   = "fairlead.dev/lab-host" // the machine of the process that made it
	ownerID     = "fairlead.dev/lab-owner"
	hostname    = "kubernetes.io/hostname"
	podPort     = 8080
	hostPort    = 18080 // of the server in the node's network
	lifetime    = 3600  // seconds after which the cluster ends a pod that the run couldn't
	roleServer  = "server"
	roleHost    = "host"
	roleClient  = "client"
	serviceName = "fairlead-lab-server"
)

// Placement is where a client's pod runs.
type Placement string

// The placements.
const (
	SameNode  Placement = "same"   // on the server's node
	OtherNode Placement = "across" // on another
	HostNet   Placement = "host"   // on another, both in their node's network
)

// meta returns an object's metadata.
func (r *run) meta(name, role string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: name, Namespace: r.api.Namespace,
		Labels:      map[string]string{labelRun: r.id, labelRole: role},
		Annotations: map[string]string{ownerHost: r.host, ownerID: r.owner}}
}

// pod returns a pod of the image's program with arguments, with no right at all.
func (r *run) pod(name, role string, args ...string) *corev1.Pod {
	no, yes, seconds, grace := false, true, int64(lifetime), int64(1)
	p := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: r.meta(name, role)}
	p.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, ActiveDeadlineSeconds: &seconds,
		TerminationGracePeriodSeconds: &grace, AutomountServiceAccountToken: &no, EnableServiceLinks: &no,
		HostNetwork: role == roleHost,
		SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes,
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
		Containers: []corev1.Container{{Name: "fairlead", Image: r.Image, Args: append([]string{"lab", "endpoint"}, args...),
			ImagePullPolicy: corev1.PullIfNotPresent,
			SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
				Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}}}}
	return p
}

// schedule has a pod run on the server's node, or on another one.
func (r *run) schedule(p *corev1.Pod, same bool) *corev1.Pod {
	if n := r.Nodes; len(n) > 0 {
		i := len(n) - 1
		if same {
			i = 0
		}
		p.Spec.NodeSelector = map[string]string{hostname: n[i]}
		return p
	}
	term := []corev1.PodAffinityTerm{{TopologyKey: hostname, LabelSelector: &metav1.LabelSelector{
		MatchLabels: map[string]string{labelRun: r.id, labelRole: roleServer}}}}
	p.Spec.Affinity = &corev1.Affinity{}
	if same {
		p.Spec.Affinity.PodAffinity = &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: term}
	} else {
		p.Spec.Affinity.PodAntiAffinity = &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: term}
	}
	return p
}

// server returns the server's pod.
func (r *run) server() *corev1.Pod {
	p := r.pod("fairlead-lab-server-"+r.id, roleServer, "serve", "--port", fmt.Sprint(r.port(OtherNode)))
	if len(r.Nodes) > 0 {
		p.Spec.NodeSelector = map[string]string{hostname: r.Nodes[0]}
	}
	return p
}

// hostServer returns the server's pod in the network of the same node.
func (r *run) hostServer() *corev1.Pod {
	return r.schedule(r.pod("fairlead-lab-host-"+r.id, roleHost, "serve", "--port", fmt.Sprint(r.port(HostNet))), true)
}

// client returns a pod that does a job.
func (r *run) client(p Placement, j Job) (*corev1.Pod, error) {
	b, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	role := roleClient
	if p == HostNet {
		role = roleHost
	}
	name := fmt.Sprintf("fairlead-lab-client-%s-%s-%d", p, r.id, j.Round)
	return r.schedule(r.pod(name, role, "measure", string(b)), p == SameNode), nil
}

// service returns the Service of the server's pod.
func (r *run) service() *corev1.Service {
	s := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: r.meta(serviceName+"-"+r.id, roleServer)}
	s.Spec.Selector = map[string]string{labelRun: r.id, labelRole: roleServer}
	for i, name := range []string{"round-trips", "streams"} {
		port := int32(r.port(OtherNode)) + int32(i)
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: name, Protocol: corev1.ProtocolTCP, Port: port,
			TargetPort: intstr.FromInt32(port)})
	}
	return s
}

// RBAC returns what a run needs, as YAML: its namespace, and a ServiceAccount that may make pods and Services there.
// With host network the namespace allows privileged pods, as Kubernetes' Pod Security Standards ask for.
func RBAC(namespace string, host bool) string {
	level := "restricted"
	if host {
		level = "privileged"
	}
	return fmt.Sprintf(`apiVersion: v1
kind: Namespace
metadata:
  name: %[1]s
  labels:
    pod-security.kubernetes.io/enforce: %[2]s
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: fairlead-lab
  namespace: %[1]s
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: fairlead-lab
  namespace: %[1]s
rules:
- apiGroups: [""]
  resources: [pods, services]
  verbs: [create, get, list, delete]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: fairlead-lab
  namespace: %[1]s
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: fairlead-lab
subjects:
- kind: ServiceAccount
  name: fairlead-lab
  namespace: %[1]s
`, namespace, level)
}
