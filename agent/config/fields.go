package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"k8s.io/kube-proxy/config/v1alpha1"
)

// Field is a field of KubeProxyConfiguration and its effect.
type Field struct {
	Path     string // as in the file, such as conntrack.min; an object's path stands for all its fields
	Honoured bool   // else any value but the default gives a warning
	Text     string // what it does here; where not honoured: what happens instead
}

const (
	windows = "Fairlead runs on Linux only."
	resync  = "A change that waits longer than twice this period makes /healthz and /livez return 503. Rules are not " +
		"resynced: changes by other programs are observed and repaired as they happen."
	soon     = "Changes are written at once; changes that arrive during a write are written together."
	oneBit   = "Mode iptables marks packets with bit 14, other modes don't mark packets."
	onlyIPVS = "Mode ipvs. "
	asRoutes = "Packets from that interface are a pod's, whatever their source address. Mode userspace: source " +
		"addresses that the main routing table routes to such an interface."
	client  = "Passed to the client of the API server."
	timeout = "Sets nf_conntrack_%s in modes with connection tracking; 0 leaves the kernel's value."
)

// allowExternalIPs is the feature gate that decides whether kube-proxy serves external IPs.
const allowExternalIPs = "AllowServiceExternalIPs"

// fields are all fields of KubeProxyConfiguration.
var fields = []Field{
	{"kind", true, "The type of the document."},
	{"apiVersion", true, "The type's version."},
	{"featureGates", false, "Only AllowServiceExternalIPs has an effect: false sets externalIPs to Refuse. The metric " +
		"kubernetes_feature_enabled shows the gates that kube-proxy reads."},
	{"clientConnection.kubeconfig", true, "The kubeconfig of the API server. Empty: the pod's service account. Unused " +
		"with a source."},
	{"clientConnection.acceptContentTypes", true, client},
	{"clientConnection.contentType", true, client},
	{"clientConnection.qps", true, client},
	{"clientConnection.burst", true, client},
	{"logging.format", true, "text or json."},
	{"logging.verbosity", true, "4 and above log each write."},
	{"logging.flushFrequency", false, "Lines are written at once."},
	{"logging.vmodule", false, "All files have the same verbosity: use verbosity."},
	{"logging.options", false, "All lines go to standard error."},
	{"hostnameOverride", true, "The node's name. Empty: the host's name in lower case."},
	{"bindAddress", true, "The node's primary address. Its family decides the defaults of " +
		"healthzBindAddress and metricsBindAddress."},
	{"healthzBindAddress", true, "The address of /healthz and /livez."},
	{"metricsBindAddress", true, "The address of /metrics and the other status pages."},
	{"bindAddressHardFail", true, "true: an address in use ends the start. false: it is logged and retried every 5 s."},
	{"enableProfiling", true, "Serves /debug/pprof at metricsBindAddress."},
	{"showHiddenMetricsForVersion", false, "No metric is hidden."},
	{"mode", true, "iptables, ipvs or nftables. Empty: auto, the first mode that this kernel supports. " +
		"FairleadConfiguration's mode takes precedence."},
	{"iptables.masqueradeBit", false, oneBit},
	{"iptables.masqueradeAll", true, "Masquerades all traffic to ClusterIPs, unless mode is nftables."},
	{"iptables.localhostNodePorts", true, "Serves node ports at 127.0.0.0/8 where mode is iptables or empty, as far as " +
		"nodePortAddresses include them, and pods' host ports at 127.0.0.1 in every mode."},
	{"iptables.syncPeriod", true, resync},
	{"iptables.minSyncPeriod", false, soon},
	{"ipvs.syncPeriod", true, onlyIPVS + resync},
	{"ipvs.minSyncPeriod", false, soon},
	{"ipvs.scheduler", true, onlyIPVS + "The scheduler of Services without an annotation. lblc and lblcr are replaced " +
		"by lc, fo and ovf by wrr, twos by wlc, with a warning."},
	{"ipvs.excludeCIDRs", true, "IPVS services at these addresses are kept when kube-proxy's are removed. IPVS " +
		"services of other programs are never changed."},
	{"ipvs.strictARP", true, onlyIPVS + "Sets arp_ignore to 1 and arp_announce to 2."},
	{"ipvs.tcpTimeout", true, onlyIPVS + "The timeout of idle TCP connections, in whole seconds. 0: 24 h."},
	{"ipvs.tcpFinTimeout", true, onlyIPVS + "The timeout of TCP connections after a FIN. 0 leaves the kernel's value."},
	{"ipvs.udpTimeout", true, onlyIPVS + "The timeout of UDP flows. 0 leaves the kernel's value."},
	{"nftables.masqueradeBit", false, oneBit},
	{"nftables.masqueradeAll", true, "Masquerades all traffic to ClusterIPs, where mode is nftables."},
	{"nftables.syncPeriod", true, "Where mode is nftables. " + resync},
	{"nftables.minSyncPeriod", false, soon},
	{"winkernel", false, windows},
	{"detectLocalMode", true, "ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix: how pods are " +
		"distinguished from other clients. Without it and clusterCIDR, /status shows the problem PodsUnknown."},
	{"detectLocal.bridgeInterface", true, "The interface for BridgeInterface. " + asRoutes},
	{"detectLocal.interfaceNamePrefix", true, "The prefix for InterfaceNamePrefix. " + asRoutes},
	{"clusterCIDR", true, "The pods' source addresses for ClusterCIDR. Empty: no source address is a pod's."},
	{"nodePortAddresses", true, "The node's addresses that serve node ports and healthCheckNodePort: CIDRs, all, " +
		"primary or localhost; all addresses of a family that the list lacks. Empty: primary where mode is nftables, " +
		"else all. Node ports at ::1 are not served."},
	{"oomScoreAdj", true, "The process's OOM score adjustment."},
	{"conntrack.maxPerCore", true, "Raises nf_conntrack_max to this value for each online CPU, and the hash " +
		"table's size to a quarter of that, in modes with connection tracking. Never lowers them."},
	{"conntrack.min", true, "The least value of nf_conntrack_max that maxPerCore sets."},
	{"conntrack.tcpEstablishedTimeout", true, fmt.Sprintf(timeout, "tcp_timeout_established")},
	{"conntrack.tcpCloseWaitTimeout", true, fmt.Sprintf(timeout, "tcp_timeout_close_wait")},
	{"conntrack.tcpBeLiberal", true, "Sets nf_conntrack_tcp_be_liberal in modes with connection tracking; false " +
		"leaves the kernel's value."},
	{"conntrack.udpTimeout", true, fmt.Sprintf(timeout, "udp_timeout")},
	{"conntrack.udpStreamTimeout", true, fmt.Sprintf(timeout, "udp_timeout_stream")},
	{"configSyncPeriod", false, "Objects are watched, not fetched periodically."},
	{"portRange", false, "kube-proxy doesn't use it either."},
	{"windowsRunAsService", false, windows},
}

// fieldOf returns the row of a path.
func fieldOf(path string) (Field, bool) {
	i := slices.IndexFunc(fields, func(f Field) bool { return path == f.Path || strings.HasPrefix(path, f.Path+".") })
	if i < 0 {
		return Field{}, false
	}
	return fields[i], true
}

// leaf is a field that holds no others.
type leaf struct {
	path  string
	value reflect.Value
}

// leaves returns the fields of a configuration in the type's order.
func leaves(c *v1alpha1.KubeProxyConfiguration) []leaf {
	return walk("", reflect.ValueOf(c).Elem(), nil)
}

// ours are packages whose structures are walked into; those of others, such as durations, are values.
var ours = []string{"k8s.io/kube-proxy/config/v1alpha1", "k8s.io/component-base/config/v1alpha1",
	"k8s.io/component-base/logs/api/v1"}

func walk(path string, v reflect.Value, to []leaf) []leaf {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		at, inner := strings.TrimPrefix(path+"."+name, "."), v.Field(i)
		switch {
		case name == "-":
		case f.Anonymous && name == "":
			to = walk(path, inner, to)
		case f.Type.Kind() == reflect.Struct && slices.Contains(ours, f.Type.PkgPath()) &&
			f.Type.Name() != "TimeOrMetaDuration":
			to = walk(at, inner, to)
		default:
			to = append(to, leaf{at, inner})
		}
	}
	return to
}

// ignored returns what is done in place of each field that is not honoured and not left at its default.
func ignored(c *v1alpha1.KubeProxyConfiguration) (warnings []string) {
	others, usual := *c, leaves(defaults())
	others.FeatureGates = maps.Clone(c.FeatureGates)
	delete(others.FeatureGates, allowExternalIPs)
	for i, l := range leaves(&others) {
		if f, _ := fieldOf(l.path); !f.Honoured && !reflect.DeepEqual(l.value.Interface(), usual[i].value.Interface()) {
			warnings = append(warnings, fmt.Sprintf("%s: %v is ignored: %s", l.path, show(l.value), f.Text))
		}
	}
	return warnings
}

// show prints a value as it stands in a file.
func show(v reflect.Value) string {
	for v.Kind() == reflect.Pointer && !v.IsNil() {
		v = v.Elem()
	}
	if d, ok := v.Interface().(interface{ MarshalJSON() ([]byte, error) }); ok {
		if b, err := d.MarshalJSON(); err == nil {
			return string(b)
		}
	}
	return fmt.Sprintf("%v", v.Interface())
}
