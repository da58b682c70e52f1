package generate

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/source"
)

// Fleet is a cluster of whole objects, as large as those of kubelets and controllers: for what an API server sends.
type Fleet struct {
	Nodes  int
	Pods   int // of each node
	Images int // that each Node lists; a kubelet lists 50 at most by default
}

// Replicas is how many pods a Service of a Fleet has: 150,000 pods and 10,000 Services, Kubernetes' thresholds, are 15.
const Replicas = 15

// Services returns how many there are.
func (f Fleet) Services() int { return f.Nodes * f.Pods / Replicas }

// Spaces returns the namespaces.
func (f Fleet) Spaces() (l []source.Object) {
	for _, name := range Namespaces(f.Services()) {
		l = append(l, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			"team": "team-of-" + name, "pod-security.kubernetes.io/enforce": "baseline"}}})
	}
	return l
}

// Objects returns what lives in the namespaces, and the Nodes.
func (f Fleet) Objects() (l []source.Object) {
	for i := range f.Nodes {
		l = append(l, f.Node(i, time.Unix(0, 0)))
	}
	for i := range f.Services() {
		l = append(l, fleetService(i), f.Slice(i, nil), fleetPolicy(i))
		for k := range Replicas {
			l = append(l, Running(f.Pod(i*Replicas+k, 0), true))
		}
	}
	return l
}

// Quantity returns how many objects there are, but for namespaces.
func (f Fleet) Quantity() int { return f.Nodes + f.Services()*(3+Replicas) }

func fleetNode(i int) string { return fmt.Sprintf("node-%05d.example.internal", i) }

// NodeName returns the name of the i-th Node.
func (f Fleet) NodeName(i int) string { return fleetNode(i) }

func fleetNodeAddress(i int) string {
	return netip.AddrFrom4([4]byte{172, 16 + byte(i>>16), byte(i >> 8), byte(i)}).String()
}

// podAddress returns an address of the i-th pod's node; generations of a pod have one of two.
func (f Fleet) podAddress(i, generation int) string {
	n := i % f.Nodes
	return netip.AddrFrom4([4]byte{10, byte(128 + n>>8), byte(n), byte(2 + i/f.Nodes + generation%2*f.Pods)}).String()
}

// digest returns a text as long as an image's digest.
func digest(of string) string { return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(of))) }

// Node returns the i-th Node as its kubelet reported it at a time.
func (f Fleet) Node(i int, at time.Time) *corev1.Node {
	name, beat := fleetNode(i), metav1.NewTime(at)
	pods := netip.AddrFrom4([4]byte{10, byte(128 + i>>8), byte(i), 0}).String() + "/24"
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		"beta.kubernetes.io/arch": "amd64", "beta.kubernetes.io/os": "linux", corev1.LabelArchStable: "amd64",
		corev1.LabelOSStable: "linux", corev1.LabelHostname: name, corev1.LabelInstanceTypeStable: "general-8x32",
		corev1.LabelTopologyRegion: "region-1", corev1.LabelTopologyZone: fmt.Sprintf("region-1%c", 'a'+i%3)},
		Annotations: map[string]string{"node.alpha.kubernetes.io/ttl": "300",
			"volumes.kubernetes.io/controller-managed-attach-detach": "true",
			"csi.volume.kubernetes.io/nodeid":                        `{"disk.csi.example.com":"` + name + `"}`}}}
	n.Spec = corev1.NodeSpec{PodCIDR: pods, PodCIDRs: []string{pods}, ProviderID: "example:///region-1/" + name}
	capacity := corev1.ResourceList{}
	for k, v := range map[corev1.ResourceName]string{"cpu": "8", "memory": "32614412Ki",
		"ephemeral-storage": "101430960Ki",
		"hugepages-1Gi":     "0", "hugepages-2Mi": "0", "pods": "110"} {
		capacity[k] = resource.MustParse(v)
	}
	n.Status = corev1.NodeStatus{Capacity: capacity, Allocatable: capacity,
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fleetNodeAddress(i)},
			{Type: corev1.NodeHostName, Address: name}},
		DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: 10250}},
		NodeInfo: corev1.NodeSystemInfo{MachineID: digest(name)[7:39], SystemUUID: digest(name)[7:43],
			BootID: digest(name)[9:45], KernelVersion: "6.12.0-1-amd64", OSImage: "Debian GNU/Linux 13 (trixie)",
			ContainerRuntimeVersion: "containerd://2.1.4", KubeletVersion: "v1.37.2", OperatingSystem: "linux",
			Architecture: "amd64"}}
	for _, c := range [][4]string{
		{"MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"},
		{"DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"},
		{"PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"},
		{"Ready", "True", "KubeletReady", "kubelet is posting ready status"}} {
		n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeConditionType(c[0]),
			Status: corev1.ConditionStatus(c[1]), Reason: c[2], Message: c[3], LastHeartbeatTime: beat,
			LastTransitionTime: metav1.Unix(0, 0)})
	}
	for k := range f.Images {
		image := fmt.Sprintf("registry.example.com/team-%02d/component-%03d", k%20, k)
		n.Status.Images = append(n.Status.Images, corev1.ContainerImage{SizeBytes: int64(50_000_000 + k),
			Names: []string{image + "@" + digest(image), image + ":v1.2.3"}})
	}
	return n
}

// fleetMeta returns the metadata of an object of the i-th Service's workload, which an object of a controller owns.
func fleetMeta(i int, object, kind, owner string) metav1.ObjectMeta {
	yes := true
	return metav1.ObjectMeta{Namespace: Namespace(i), Name: object, GenerateName: owner + "-",
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: owner,
			UID: types.UID(digest(owner)[7:43]), Controller: &yes, BlockOwnerDeletion: &yes}}}
}

// Pod returns the i-th pod as its controller makes it. The next generation replaces one of another name.
func (f Fleet) Pod(i, generation int) *corev1.Pod {
	app := i / Replicas
	set := name(app) + "-" + digest(name(app))[7:16]
	p := &corev1.Pod{ObjectMeta: fleetMeta(app, set+"-"+digest(fmt.Sprint(i, generation))[7:12], "ReplicaSet", set)}
	p.Labels = map[string]string{"app.kubernetes.io/name": name(app), "app.kubernetes.io/part-of": Namespace(app),
		"pod-template-hash": digest(name(app))[7:16]}
	p.Annotations = map[string]string{"prometheus.io/scrape": "true", "prometheus.io/port": "8080"}
	size := corev1.ResourceList{"cpu": resource.MustParse("100m"), "memory": resource.MustParse("256Mi")}
	probe := &corev1.Probe{PeriodSeconds: 10, ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{
		Path: "/healthz", Port: intstr.FromString("http")}}}
	const token = "kube-api-access"
	p.Spec.Containers = []corev1.Container{{Name: "main", Image: image(app),
		Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080, Protocol: corev1.ProtocolTCP}},
		Env: []corev1.EnvVar{{Name: "LOG_LEVEL", Value: "info"},
			{Name: "DATABASE", Value: "db." + Namespace(app) + ".svc"}},
		Resources: corev1.ResourceRequirements{Requests: size, Limits: size}, ReadinessProbe: probe, LivenessProbe: probe,
		VolumeMounts: []corev1.VolumeMount{{Name: token, ReadOnly: true,
			MountPath: "/var/run/secrets/kubernetes.io/serviceaccount"}}}}
	seconds, mode := int64(3607), int32(0o644)
	p.Spec.Volumes = []corev1.Volume{{Name: token, VolumeSource: corev1.VolumeSource{
		Projected: &corev1.ProjectedVolumeSource{DefaultMode: &mode, Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{ExpirationSeconds: &seconds, Path: "token"}},
			{ConfigMap: &corev1.ConfigMapProjection{
				LocalObjectReference: corev1.LocalObjectReference{Name: "kube-root-ca.crt"},
				Items:                []corev1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}}}},
			{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{Path: "namespace",
				FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"}}}}}}}}}}
	p.Spec.NodeName, p.Spec.ServiceAccountName = fleetNode(i%f.Nodes), "default"
	p.Status.PodIP = f.podAddress(i, generation) // which Running reports
	return p
}

func image(app int) string {
	return fmt.Sprintf("registry.example.com/team-%02d/%s:v1.2.3", app%20, name(app))
}

// Waiting returns a pod of which a kubelet creates the containers.
func Waiting(p *corev1.Pod) *corev1.Pod {
	return report(p, corev1.PodPending, false, corev1.ContainerState{
		Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}})
}

// Running returns a pod that runs, and whether it is ready.
func Running(p *corev1.Pod, ready bool) *corev1.Pod {
	r := report(p, corev1.PodRunning, ready, corev1.ContainerState{
		Running: &corev1.ContainerStateRunning{StartedAt: metav1.Unix(0, 0)}})
	r.Status.PodIP, r.Status.PodIPs = p.Status.PodIP, []corev1.PodIP{{IP: p.Status.PodIP}}
	return r
}

// Ended returns a pod of which the containers have ended.
func Ended(p *corev1.Pod) *corev1.Pod {
	r := report(p, corev1.PodSucceeded, false, corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
		Reason: "Completed", StartedAt: metav1.Unix(0, 0), FinishedAt: metav1.Unix(0, 0),
		ContainerID: "containerd://" + digest(p.Name)[7:]}})
	r.Status.PodIP, r.Status.PodIPs = p.Status.PodIP, []corev1.PodIP{{IP: p.Status.PodIP}}
	return r
}

// report returns a pod with a status as of a kubelet, without its addresses.
func report(p *corev1.Pod, phase corev1.PodPhase, ready bool, state corev1.ContainerState) *corev1.Pod {
	r := p.DeepCopy()
	var node int
	fmt.Sscanf(p.Spec.NodeName, "node-%d", &node)
	r.Status = corev1.PodStatus{Phase: phase, HostIP: fleetNodeAddress(node),
		HostIPs: []corev1.HostIP{{IP: fleetNodeAddress(node)}}, StartTime: &metav1.Time{Time: time.Unix(0, 0)},
		QOSClass: corev1.PodQOSGuaranteed}
	for _, c := range []corev1.PodConditionType{"PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady",
		"PodScheduled"} {
		status := corev1.ConditionTrue
		if !ready && (c == "Ready" || c == "ContainersReady") {
			status = corev1.ConditionFalse
		}
		r.Status.Conditions = append(r.Status.Conditions, corev1.PodCondition{Type: c, Status: status,
			LastTransitionTime: metav1.Unix(0, 0)})
	}
	main := p.Spec.Containers[0]
	r.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: main.Name, Image: main.Image, Ready: ready,
		Started: &ready, State: state, ImageID: "registry.example.com/image@" + digest(main.Image),
		ContainerID: "containerd://" + digest(p.Name)[7:]}}
	return r
}

// fleetService returns the i-th Service. The first ClusterIP is default/kubernetes'.
func fleetService(i int) *corev1.Service {
	s := service(i)
	s.Spec.ClusterIP = ServiceAddress(i + 1).String()
	s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	s.Spec.Selector = map[string]string{"app.kubernetes.io/name": name(i)}
	s.Labels = map[string]string{"app.kubernetes.io/name": name(i), "app.kubernetes.io/part-of": Namespace(i)}
	return s
}

// Slice returns the EndpointSlice of the i-th Service, of which a change is made in its endpoints; nil: none.
func (f Fleet) Slice(i int, change func([]discoveryv1.Endpoint) []discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	port, portName, tcp := int32(8080), "http", corev1.ProtocolTCP
	s := &discoveryv1.EndpointSlice{ObjectMeta: fleetMeta(i, name(i)+"-"+digest(name(i))[7:12], "Service", name(i)),
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &portName, Protocol: &tcp, Port: &port}}}
	s.OwnerReferences[0].APIVersion = "v1"
	s.Labels = map[string]string{discoveryv1.LabelServiceName: name(i),
		discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"}
	s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-01-01T00:00:00Z"}
	for k := range Replicas {
		s.Endpoints = append(s.Endpoints, Endpoint(f.Pod(i*Replicas+k, 0), true, false))
	}
	if change != nil {
		s.Endpoints = change(s.Endpoints)
	}
	return s
}

// Endpoint returns the endpoint that a pod is.
func Endpoint(p *corev1.Pod, ready, terminating bool) discoveryv1.Endpoint {
	serving, zone := ready, "region-1a"
	ready = ready && !terminating
	return discoveryv1.Endpoint{Addresses: []string{p.Status.PodIP}, NodeName: &p.Spec.NodeName, Zone: &zone,
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
		TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: p.Namespace, Name: p.Name,
			UID: types.UID(digest(p.Name)[7:43])}}
}

// fleetPolicy returns the NetworkPolicy of the i-th Service's pods.
func fleetPolicy(i int) *networkingv1.NetworkPolicy {
	port := intstr.FromString("http")
	pods := func(app int) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{"app.kubernetes.io/name": name(app)}}
	}
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace(i), Name: name(i)}}
	p.Spec = networkingv1.NetworkPolicySpec{PodSelector: *pods(i), PolicyTypes: []networkingv1.PolicyType{"Ingress"},
		Ingress: []networkingv1.NetworkPolicyIngressRule{{Ports: []networkingv1.NetworkPolicyPort{{Port: &port}},
			From: []networkingv1.NetworkPolicyPeer{{PodSelector: pods(i / PerNamespace * PerNamespace)},
				{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "ingress"}}}}}}}
	return p
}
