package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"k8s.io/kube-proxy/config/v1alpha1"
)

// Field is one field of KubeProxyConfiguration and what becomes of it.
type Field struct {
	Path     string // as in the file, such as conntrack.min; a path that others begin with stands for all of those
	Honoured bool   // else a value that is not the default is warned of
	Text     string // what it does here; where not honoured: what happens instead
}

// Fields are all of them.
func Fields() []Field { return fields }

const (
	windows  = "Fairlead is for Linux."
	resync   = "Twice this is how long a change may wait before /healthz and /livez answer 503. Rules need no resync: others' changes are seen as they happen and undone."
	soon     = "Every change is written at once; those that come while one is being written are written together."
	oneBit   = "The data plane iptables marks packets with bit 14, nftables and the others with none."
	onlyIPVS = "In mode ipvs. "
	asRoutes = "What comes in so is a pod's, whatever its address; in mode userspace, what the main routing table has a " +
		"route to by such an interface."
)

// allowExternalIPs is the feature gate that decides whether kube-proxy serves external IPs.
const allowExternalIPs = "AllowServiceExternalIPs"

var fields = []Field{
	{"kind", true, "Says what the document is."},
	{"apiVersion", true, "Says what the document is."},
	{"featureGates", false, "Only AllowServiceExternalIPs changes anything: where it is false, externalIPs is Refuse. " +
		"kubernetes_feature_enabled says what comes of those that kube-proxy reads."},
	{"clientConnection.kubeconfig", true, "How the API server is reached; without it as a pod does. Not used where a folder is the source."},
	{"clientConnection.acceptContentTypes", true, "Handed to the client of the API server."},
	{"clientConnection.contentType", true, "Handed to the client of the API server."},
	{"clientConnection.qps", true, "Handed to the client of the API server."},
	{"clientConnection.burst", true, "Handed to the client of the API server."},
	{"logging.format", true, "text or json."},
	{"logging.verbosity", true, "4 and above log each write."},
	{"logging.flushFrequency", false, "Lines are never held back."},
	{"logging.vmodule", false, "All lines have the same verbosity, whatever file they come from: use verbosity."},
	{"logging.options", false, "Everything is logged to standard error."},
	{"hostnameOverride", true, "The node's name; without it the host's, in lower case."},
	{"bindAddress", true, "The node's primary address of its family, and the family of the other two addresses' defaults."},
	{"healthzBindAddress", true, "Where /healthz and /livez are served."},
	{"metricsBindAddress", true, "Where /metrics and the other pages are served."},
	{"bindAddressHardFail", true, "An address that is taken ends the start; else it is logged and tried again every 5 s."},
	{"enableProfiling", true, "Serves /debug/pprof beside the metrics."},
	{"showHiddenMetricsForVersion", false, "No metric is hidden."},
	{"mode", true, "iptables, ipvs and nftables are the data planes of these names. Empty: auto, the best that this kernel can. FairleadConfiguration's mode goes before it."},
	{"iptables.masqueradeBit", false, oneBit},
	{"iptables.masqueradeAll", true, "Where mode is not nftables."},
	{"iptables.localhostNodePorts", true, "Where mode is iptables or empty: node ports at 127.0.0.0/8, as far as nodePortAddresses hold that."},
	{"iptables.syncPeriod", true, resync},
	{"iptables.minSyncPeriod", false, soon},
	{"ipvs.syncPeriod", true, onlyIPVS + resync},
	{"ipvs.minSyncPeriod", false, soon},
	{"ipvs.scheduler", true, onlyIPVS + "Of Services that don't choose one. In place of lblc and lblcr serves lc, " +
		"of fo and ovf wrr, of twos wlc; a warning says so."},
	{"ipvs.excludeCIDRs", true, "IPVS services at these addresses stay when a kube-proxy's are taken away. Nobody else's are touched anyway."},
	{"ipvs.strictARP", true, onlyIPVS + "Sets arp_ignore to 1 and arp_announce to 2."},
	{"ipvs.tcpTimeout", true, onlyIPVS + "How long a silent TCP connection is remembered, in whole seconds. 0: 24 h, so that none is cut that lives."},
	{"ipvs.tcpFinTimeout", true, onlyIPVS + "The same after a FIN; 0 leaves it."},
	{"ipvs.udpTimeout", true, onlyIPVS + "The same of UDP; 0 leaves it."},
	{"nftables.masqueradeBit", false, oneBit},
	{"nftables.masqueradeAll", true, "Where mode is nftables."},
	{"nftables.syncPeriod", true, "Where mode is nftables. " + resync},
	{"nftables.minSyncPeriod", false, soon},
	{"winkernel", false, windows},
	{"detectLocalMode", true, "Where nothing tells pods from other clients, /status has the problem PodsUnknown."},
	{"detectLocal.bridgeInterface", true, "Where detectLocalMode is BridgeInterface. " + asRoutes},
	{"detectLocal.interfaceNamePrefix", true, "Where detectLocalMode is InterfaceNamePrefix. " + asRoutes},
	{"clusterCIDR", true, "Where detectLocalMode is ClusterCIDR: sources that count as pods. Empty: nothing counts as a pod."},
	{"nodePortAddresses", true, "Ranges, and the words all, primary and localhost; all of a family that none of " +
		"them is of. Empty: primary where mode is nftables, else all. healthCheckNodePort is served at the same " +
		"addresses of the node. Node ports at ::1 are not there."},
	{"oomScoreAdj", true, "Of the process."},
	{"conntrack.maxPerCore", true, "Raises nf_conntrack_max (never lowers it) and hashsize to a quarter of it, where the data plane tracks connections. The node's online processors count."},
	{"conntrack.min", true, "The least that maxPerCore comes to."},
	{"conntrack.tcpEstablishedTimeout", true, "Where the data plane tracks connections; 0 leaves it."},
	{"conntrack.tcpCloseWaitTimeout", true, "Where the data plane tracks connections; 0 leaves it."},
	{"conntrack.tcpBeLiberal", true, "Where the data plane tracks connections; false leaves it."},
	{"conntrack.udpTimeout", true, "Where the data plane tracks connections; 0 leaves it."},
	{"conntrack.udpStreamTimeout", true, "Where the data plane tracks connections; 0 leaves it."},
	{"configSyncPeriod", false, "Nothing is fetched again: a watch tells of every change."},
	{"portRange", false, "kube-proxy doesn't use it either."},
	{"windowsRunAsService", false, windows},
}

// fieldOf gives the row of a path.
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

// leaves gives the fields of a configuration in the type's order.
func leaves(c *v1alpha1.KubeProxyConfiguration) []leaf {
	return walk("", reflect.ValueOf(c).Elem(), nil)
}

// ours are packages whose structures are walked into; those of others, such as durations, are values.
var ours = []string{"k8s.io/kube-proxy/config/v1alpha1", "k8s.io/component-base/config/v1alpha1", "k8s.io/component-base/logs/api/v1"}

func walk(path string, v reflect.Value, to []leaf) []leaf {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		at, inner := strings.TrimPrefix(path+"."+name, "."), v.Field(i)
		switch {
		case name == "-":
		case f.Anonymous && name == "":
			to = walk(path, inner, to)
		case f.Type.Kind() == reflect.Struct && slices.Contains(ours, f.Type.PkgPath()) && f.Type.Name() != "TimeOrMetaDuration":
			to = walk(at, inner, to)
		default:
			to = append(to, leaf{at, inner})
		}
	}
	return to
}

// ignored says what is done in place of each field that is not honoured and not left at its default.
func ignored(c *v1alpha1.KubeProxyConfiguration) (warnings []string) {
	others, usual := *c, leaves(defaults())
	others.FeatureGates = maps.Clone(c.FeatureGates)
	delete(others.FeatureGates, allowExternalIPs)
	for i, l := range leaves(&others) {
		if f, _ := fieldOf(l.path); !f.Honoured && !reflect.DeepEqual(l.value.Interface(), usual[i].value.Interface()) {
			warnings = append(warnings, fmt.Sprintf("%s: %v is not honoured: %s", l.path, show(l.value), f.Text))
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
