package config

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/kube-proxy/config/v1alpha1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// Kinds of traffic detection (KubeProxyConfiguration.detectLocalMode).
const (
	clusterCIDR         = "ClusterCIDR"
	nodeCIDR            = "NodeCIDR"
	bridgeInterface     = "BridgeInterface"
	interfaceNamePrefix = "InterfaceNamePrefix"
)

// The modes of kube-proxy on Linux.
var proxyModes = []string{"iptables", "ipvs", "nftables"}

// checks gathers what is wrong, by the fields' paths in the file.
type checks struct {
	errs     field.ErrorList
	warnings []string // what is wrong and counts for nothing
}

func (k *checks) bad(p *field.Path, value any, why string) {
	k.errs = append(k.errs, field.Invalid(p, value, why))
}

// ours is bad for a field that a flag of ours sets too.
func (k *checks) ours(p *field.Path, flag string, value any, why string) {
	k.bad(p, value, why+" (flag --"+flag+")")
}

func (k *checks) atLeast(p *field.Path, d metav1.Duration, least time.Duration) {
	if d.Duration < least {
		k.bad(p, d.Duration.String(), "must be at least "+least.String())
	}
}

func (k *checks) within(p *field.Path, v *int32, low, high int32) {
	if v != nil && (*v < low || *v > high) {
		k.bad(p, *v, "must be from "+strconv.Itoa(int(low))+" to "+strconv.Itoa(int(high)))
	}
}

func (k *checks) oneOf(p *field.Path, v string, of ...string) {
	if v != "" && !slices.Contains(of, v) {
		k.errs = append(k.errs, field.NotSupported(p, v, of))
	}
}

// address checks "IP:port"; "" is none.
func (k *checks) address(p *field.Path, s string) {
	if s == "" {
		return
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		k.bad(p, s, "must be an IP address and a port, such as 127.0.0.1:10249 or [::1]:10249")
		return
	}
	if _, err := resolve.ParseAddr(host); err != nil {
		k.bad(p, s, "must be an IP address and a port")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		k.bad(p, s, "must end with a port from 1 to 65535")
	}
}

// ranges checks address ranges and returns them. Some words may stand for a range.
func (k *checks) ranges(p *field.Path, list []string, words ...string) (out []netip.Prefix) {
	for i, s := range list {
		if slices.Contains(words, s) {
			continue
		}
		r, err := resolve.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			also := ""
			if len(words) > 0 {
				also = ", or one of " + strings.Join(words, ", ")
			}
			k.bad(p.Index(i), s, "must be a CIDR such as 10.244.0.0/16"+also)
			continue
		}
		out = append(out, r)
	}
	return out
}

// validate states everything that is wrong with a complete configuration.
func (c *Config) validate() error {
	k := &checks{}
	k.proxy(&c.Proxy)
	k.modes(c)
	k.own(&c.Own)
	c.Warnings = append(c.Warnings, k.warnings...)
	return k.errs.ToAggregate()
}

// proxy checks what kube-proxy checks (pkg/proxy/apis/config/validation).
func (k *checks) proxy(c *v1alpha1.KubeProxyConfiguration) {
	at := func(names ...string) *field.Path { return field.NewPath(names[0], names[1:]...) }
	k.oneOf(at("mode"), string(c.Mode), proxyModes...)
	if _, err := resolve.ParseAddr(c.BindAddress); err != nil {
		k.bad(at("bindAddress"), c.BindAddress, "must be an IP address")
	}
	k.address(at("healthzBindAddress"), c.HealthzBindAddress)
	k.address(at("metricsBindAddress"), c.MetricsBindAddress)
	k.within(at("oomScoreAdj"), c.OOMScoreAdj, -1000, 1000)
	const most = 1<<31 - 1
	k.within(at("conntrack", "maxPerCore"), c.Conntrack.MaxPerCore, 0, most)
	k.within(at("conntrack", "min"), c.Conntrack.Min, 0, most)
	k.within(at("clientConnection", "burst"), &c.ClientConnection.Burst, 0, most)
	for name, d := range map[string]metav1.Duration{"tcpEstablishedTimeout": *c.Conntrack.TCPEstablishedTimeout,
		"tcpCloseWaitTimeout": *c.Conntrack.TCPCloseWaitTimeout,
		"udpTimeout":          c.Conntrack.UDPTimeout, "udpStreamTimeout": c.Conntrack.UDPStreamTimeout} {
		k.atLeast(at("conntrack", name), d, 0)
	}
	k.atLeast(at("configSyncPeriod"), c.ConfigSyncPeriod, 1)
	k.ranges(at("nodePortAddresses"), c.NodePortAddresses, "all", "primary", "localhost")
	k.oneOf(at("logging", "format"), c.Logging.Format, "text", "json")
	k.local(c)
}

// modes checks the sections of modes. As with kube-proxy, a wrong value in the section of a mode that is not in use
// doesn't end the start: it is a warning.
func (k *checks) modes(c *Config) {
	p := &c.Proxy
	for _, section := range []struct {
		mode  string
		check func(*checks, *field.Path)
	}{
		{"iptables", func(k *checks, at *field.Path) {
			k.within(at.Child("masqueradeBit"), p.IPTables.MasqueradeBit, 0, 31)
			k.periods(at, p.IPTables.SyncPeriod, p.IPTables.MinSyncPeriod)
		}},
		{"ipvs", func(k *checks, at *field.Path) { k.ipvs(at, c) }},
		{"nftables", func(k *checks, at *field.Path) {
			k.within(at.Child("masqueradeBit"), p.NFTables.MasqueradeBit, 0, 31)
			k.periods(at, p.NFTables.SyncPeriod, p.NFTables.MinSyncPeriod)
		}},
	} {
		of := &checks{}
		section.check(of, field.NewPath(section.mode))
		if section.mode == c.Own.Mode || section.mode == cmp.Or(string(p.Mode), "iptables") {
			k.errs, k.warnings = append(k.errs, of.errs...), append(k.warnings, of.warnings...)
			continue
		}
		for _, err := range of.errs {
			k.warnings = append(k.warnings, fmt.Sprintf("%v: ignored in this mode", err))
		}
	}
}

// substitutes are schedulers of IPVS that Fairlead doesn't have, and what serves in their place.
var substitutes = map[string]model.Scheduler{
	"lblc": model.LeastConnections, "lblcr": model.LeastConnections, "twos": model.WeightedLeastConnections,
	"fo": model.WeightedRoundRobin, "ovf": model.WeightedRoundRobin,
}

func (k *checks) ipvs(at *field.Path, c *Config) {
	p := &c.Proxy.IPVS
	for name, d := range map[string]metav1.Duration{
		"tcpTimeout": p.TCPTimeout, "tcpFinTimeout": p.TCPFinTimeout, "udpTimeout": p.UDPTimeout} {
		k.atLeast(at.Child(name), d, 0)
	}
	k.periods(at, p.SyncPeriod, p.MinSyncPeriod)
	k.ranges(at.Child("excludeCIDRs"), p.ExcludeCIDRs)
	if other, ok := substitutes[p.Scheduler]; ok {
		k.warnings = append(k.warnings, fmt.Sprintf("ipvs.scheduler: %s is not supported: Services are served by %s "+
			"(%s)",
			p.Scheduler, other, other.IPVS()))
	} else if _, err := model.ParseScheduler(p.Scheduler); err != nil && p.Scheduler != "" {
		k.bad(at.Child("scheduler"), p.Scheduler, err.Error())
	}
}

func (k *checks) periods(p *field.Path, sync, least metav1.Duration) {
	k.atLeast(p.Child("syncPeriod"), sync, 1)
	k.atLeast(p.Child("minSyncPeriod"), least, 0)
	if least.Duration > sync.Duration {
		k.bad(p.Child("minSyncPeriod"), least.Duration.String(), "must not be above syncPeriod, "+sync.Duration.String())
	}
}

// local checks how pods are told from others.
func (k *checks) local(c *v1alpha1.KubeProxyConfiguration) {
	k.oneOf(field.NewPath("detectLocalMode"), string(c.DetectLocalMode), clusterCIDR, nodeCIDR, bridgeInterface,
		interfaceNamePrefix)
	switch {
	case c.DetectLocalMode == bridgeInterface && c.DetectLocal.BridgeInterface == "":
		k.errs = append(k.errs, field.Required(field.NewPath("detectLocal", "bridgeInterface"),
			"detectLocalMode is BridgeInterface"))
	case c.DetectLocalMode == interfaceNamePrefix && c.DetectLocal.InterfaceNamePrefix == "":
		k.errs = append(k.errs, field.Required(field.NewPath("detectLocal", "interfaceNamePrefix"),
			"detectLocalMode is InterfaceNamePrefix"))
	case c.ClusterCIDR != "" && (c.DetectLocalMode == "" || c.DetectLocalMode == clusterCIDR):
		k.ranges(field.NewPath("clusterCIDR"), strings.Split(c.ClusterCIDR, ","))
	}
}

func (k *checks) own(c *FairleadConfiguration) {
	if c.Mode != mode.Auto {
		if _, err := mode.Of(c.Mode); err != nil {
			k.ours(field.NewPath("mode"), "mode", c.Mode, err.Error())
		}
	}
	if _, err := model.ParseScheduler(c.Scheduler); c.Scheduler != "" && err != nil {
		k.ours(field.NewPath("scheduler"), "scheduler", c.Scheduler, err.Error())
	}
	if err := model.CheckEntries(c.MaglevTableSize); err != nil {
		k.ours(field.NewPath("maglevTableSize"), "maglev-table-size", c.MaglevTableSize, err.Error())
	}
	if r := c.EBPF.MapEntries; r < minMapEntries || r > maxMapEntries {
		k.ours(field.NewPath("ebpf", "mapEntries"), "ebpf-map-entries", r,
			fmt.Sprintf("must be from %d to %d", minMapEntries, maxMapEntries))
	}
	k.policy(&c.Policy)
	k.network(&c.Network)
	k.oneOf(field.NewPath("externalIPs"), string(c.ExternalIPs), string(resolve.SafeExternalIPs),
		string(resolve.RefuseExternalIPs), string(resolve.AnyExternalIPs))
	l, limits := c.Limits, field.NewPath("limits")
	for name, n := range map[string]int{"serviceFrontends": l.ServiceFrontends, "serviceSlots": l.ServiceSlots,
		"serviceTableEntries": l.ServiceTableEntries, "frontends": l.Frontends, "slots": l.Slots} {
		if n < 0 {
			k.errs = append(k.errs, field.Invalid(limits.Child(name), n, "must be above 0, or unset"))
		}
	}
	if p := l.NamespacePercent; p < 0 || p > 100 {
		k.errs = append(k.errs, field.Invalid(limits.Child("namespacePercent"), p, "must be from 1 to 100"))
	}
	for name, n := range map[string]int{"namespaceBytes": l.NamespaceBytes, "bytes": l.Bytes} {
		if n != 0 && n < leastBytes {
			k.errs = append(k.errs, field.Invalid(limits.Child(name), n,
				fmt.Sprintf("must be at least %d, or unset", leastBytes)))
		}
	}
	k.oneOf(field.NewPath("ebpf", "fastPath"), string(c.EBPF.FastPath), string(Auto), string(Never))
	if n := c.EBPF.Flows; n < minFlows || n > maxFlows {
		k.ours(field.NewPath("ebpf", "flows"), "ebpf-flows", n, fmt.Sprintf("must be from %d to %d", minFlows,
			maxFlows))
	}
	k.oneOf(field.NewPath("ebpf", "reversePathCheck"), string(c.EBPF.ReversePathCheck), string(Always), string(Never))
	k.oneOf(field.NewPath("migrateFromKubeProxy"), string(c.MigrateFromKubeProxy), string(Leave), string(Remove))
}

// What ebpf.mapEntries may be: a slot is 24 bytes of the kernel's memory.
const (
	minMapEntries = 512
	maxMapEntries = 1 << 26
)

// The bounds of ebpf.flows: two entries take some 320 bytes of the kernel's memory.
const (
	minFlows = 1 << 10
	maxFlows = 1 << 24
)

// leastBytes is what one object can weigh.
const leastBytes = 16 << 20
