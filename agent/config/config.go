package config

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/node"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// Config is everything that an agent is told: complete and valid.
type Config struct {
	Proxy    v1alpha1.KubeProxyConfiguration
	Own      FairleadConfiguration
	Server   string   // the API server's address, in place of the kubeconfig's
	Warnings []string // what was given and is not honoured
	FromFile bool     // Proxy was read from a file

	text []byte // the file's
}

// Load puts the file, if one is named, and the flags together. The error names everything that is wrong.
func (f *Flags) Load() (*Config, error) {
	c := &Config{Server: f.Server}
	var err error
	if f.File == "" {
		err = c.apply(f, content{})
	} else if text, rerr := os.ReadFile(f.File); rerr != nil {
		err = rerr
	} else if in, rerr := read(text); rerr != nil {
		err = fmt.Errorf("%s: %w", f.File, rerr)
	} else {
		c.text = text
		err = c.apply(f, in)
	}
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	return c, nil
}

// apply puts a file's content and the flags together.
func (c *Config) apply(f *Flags, in content) error {
	c.Warnings = slices.Concat(f.former, in.warnings)
	if in.proxy != nil {
		c.Proxy, c.FromFile = *in.proxy, true
		complete(&c.Proxy)
		c.Warnings = append(c.Warnings, f.useless()...)
		logging(f.set, &c.Proxy.Logging)
	} else if err := f.finish(); err != nil {
		return err
	} else {
		c.Proxy = *f.proxy
	}
	for _, name := range idle {
		if f.explicit(name) {
			c.Warnings = append(c.Warnings, "--"+name+" is ignored: it has no effect")
		}
	}
	c.name(f)
	if f.Verbose {
		c.Proxy.Logging.Verbosity = max(c.Proxy.Logging.Verbosity, 4)
	}
	c.Own = f.own
	if in.own != nil {
		c.Own = f.over(*in.own)
	} else if !f.explicit("mode") {
		c.Own.Mode = ""
	}
	if !f.explicit("scheduler") && (in.own == nil || in.own.Scheduler == "") {
		c.Own.Scheduler = ""
	}
	c.Own.APIVersion, c.Own.Kind = APIVersion, Kind
	c.Own.MigrateFromKubeProxy = cmp.Or(c.Own.MigrateFromKubeProxy, Leave)
	c.externalIPs(in.own != nil && in.own.ExternalIPs != "" || f.explicit("external-ips"))
	c.Own.EBPF.FastPath = cmp.Or(c.Own.EBPF.FastPath, Auto)
	if !f.explicit("ebpf-map-entries") {
		c.Own.EBPF.MapEntries = cmp.Or(c.Own.EBPF.MapEntries, mode.DefaultMapEntries)
	}
	if !f.explicit("ebpf-flows") {
		c.Own.EBPF.Flows = cmp.Or(c.Own.EBPF.Flows, mode.DefaultFlows)
	}
	c.Own.EBPF.ReversePathCheck = cmp.Or(c.Own.EBPF.ReversePathCheck, Always)
	n := &c.Own.Network
	n.Mode, n.Overlay, n.Device = cmp.Or(n.Mode, NetworkNone), cmp.Or(n.Overlay, network.Subnets), cmp.Or(n.Device, "veth")
	n.Encapsulation, n.Masquerade = cmp.Or(n.Encapsulation, VXLAN), cmp.Or(n.Masquerade, MasqueradeCluster)
	n.CNIFolder, n.RunFolder = cmp.Or(n.CNIFolder, DefaultCNIFolder), cmp.Or(n.RunFolder, DefaultRunFolder)
	p := &c.Own.Policy
	p.Mode, p.Engine = cmp.Or(p.Mode, PoliciesIgnore), cmp.Or(p.Engine, mode.Auto)
	p.UnknownPods = cmp.Or(p.UnknownPods, policy.DenyUnknownPods)
	p.Established, p.SourceCheck = cmp.Or(p.Established, CutEstablished), cmp.Or(p.SourceCheck, CheckSources)
	p.defaultResolvers()
	if !f.explicit("policy-cut-mark") {
		p.CutMark = cmp.Or(p.CutMark, DefaultCutMark)
	}
	if err := c.validate(); err != nil {
		return err
	}
	c.mode(f)
	c.Warnings = append(c.Warnings, ignored(&c.Proxy)...)
	return nil
}

// externalIPs decides which external IPs are served: none where kube-proxy's feature gate says so, whatever our own
// field does, which was given or not.
func (c *Config) externalIPs(explicit bool) {
	if allowed, set := c.Proxy.FeatureGates[allowExternalIPs]; set && !allowed {
		if explicit && c.Own.ExternalIPs != resolve.RefuseExternalIPs {
			c.Warnings = append(c.Warnings, fmt.Sprintf("externalIPs: %s is ignored: the feature gate %s is false",
				c.Own.ExternalIPs, allowExternalIPs))
		}
		c.Own.ExternalIPs = resolve.RefuseExternalIPs
	}
	c.Own.ExternalIPs = cmp.Or(c.Own.ExternalIPs, resolve.SafeExternalIPs)
}

// name decides the node's name: flag, file, environment.
func (c *Config) name(f *Flags) {
	name := c.Proxy.HostnameOverride
	if f.explicit("hostname-override") {
		name = f.proxy.HostnameOverride
	} else if f.explicit("node") || name == "" {
		name = f.node
	}
	c.Proxy.HostnameOverride = strings.ToLower(strings.TrimSpace(name))
}

// mode decides the data plane's name: ours by flag or file, else kube-proxy's; auto where a file leaves it open.
func (c *Config) mode(f *Flags) {
	usual := mode.Default
	if c.FromFile || f.explicit("proxy-mode") {
		usual = mode.Auto
	}
	c.Own.Mode = cmp.Or(c.Own.Mode, string(c.Proxy.Mode), usual)
}

// over puts our own flags that were given over what the file says.
func (f *Flags) over(file FairleadConfiguration) FairleadConfiguration {
	for _, set := range []struct {
		flag     string
		to, from *string
	}{
		{"source", &file.Source, &f.own.Source},
		{"mode", &file.Mode, &f.own.Mode},
		{"scheduler", &file.Scheduler, &f.own.Scheduler},
		{"service-proxy-name", &file.ServiceProxyName, &f.own.ServiceProxyName},
		{"external-ips", (*string)(&file.ExternalIPs), (*string)(&f.own.ExternalIPs)},
		{"ebpf-fast-path", (*string)(&file.EBPF.FastPath), (*string)(&f.own.EBPF.FastPath)},
		{"ebpf-reverse-path-check", (*string)(&file.EBPF.ReversePathCheck), (*string)(&f.own.EBPF.ReversePathCheck)},
		{"network-mode", (*string)(&file.Network.Mode), (*string)(&f.own.Network.Mode)},
		{"network-overlay", (*string)(&file.Network.Overlay), (*string)(&f.own.Network.Overlay)},
		{"network-device", &file.Network.Device, &f.own.Network.Device},
		{"network-encapsulation", (*string)(&file.Network.Encapsulation), (*string)(&f.own.Network.Encapsulation)},
		{"network-cni-folder", &file.Network.CNIFolder, &f.own.Network.CNIFolder},
		{"network-run-folder", &file.Network.RunFolder, &f.own.Network.RunFolder},
		{"policy-mode", (*string)(&file.Policy.Mode), (*string)(&f.own.Policy.Mode)},
		{"policy-engine", &file.Policy.Engine, &f.own.Policy.Engine},
		{"policy-unknown-pods", (*string)(&file.Policy.UnknownPods), (*string)(&f.own.Policy.UnknownPods)},
		{"policy-established", (*string)(&file.Policy.Established), (*string)(&f.own.Policy.Established)},
		{"policy-source-check", (*string)(&file.Policy.SourceCheck), (*string)(&f.own.Policy.SourceCheck)},
		{"migrate-from-kube-proxy", (*string)(&file.MigrateFromKubeProxy), (*string)(&f.own.MigrateFromKubeProxy)},
	} {
		environment := set.flag == "source" || set.flag == "policy-mode" || set.flag == "network-run-folder"
		if f.explicit(set.flag) || *set.to == "" && environment {
			*set.to = *set.from
		}
	}
	if f.explicit("maglev-table-size") {
		file.MaglevTableSize = f.own.MaglevTableSize
	}
	if f.explicit("direct-server-return") {
		file.DirectServerReturn = f.own.DirectServerReturn
	}
	if f.explicit("ebpf-map-entries") {
		file.EBPF.MapEntries = f.own.EBPF.MapEntries
	}
	if f.explicit("ebpf-flows") {
		file.EBPF.Flows = f.own.EBPF.Flows
	}
	if f.explicit("ebpf-close-tcp") {
		file.EBPF.CloseTCP = f.own.EBPF.CloseTCP
	}
	return file
}

// useless names the flags that were given and that a file's KubeProxyConfiguration replaces.
func (f *Flags) useless() (warnings []string) {
	f.set.Visit(func(flag *pflag.Flag) {
		i := slices.IndexFunc(rows, func(r Row) bool { return r.Flag == flag.Name })
		if i < 0 || strings.HasPrefix(rows[i].Field, "logging.") || rows[i].Field == "hostnameOverride" {
			return
		}
		if rows[i].Field != "" || slices.Contains([]string{"masquerade-all", "healthz-port", "metrics-port"}, flag.Name) {
			warnings = append(warnings, fmt.Sprintf("--%s is ignored: the file of --config replaces it", flag.Name))
		}
	})
	return warnings
}

// logging puts the logging flags that were given over what a file says; of vmodule both count.
func logging(from *pflag.FlagSet, to *logsapi.LoggingConfiguration) {
	of := pflag.NewFlagSet("", pflag.ContinueOnError)
	modules := to.VModule
	to.VModule = nil
	logsapi.AddFlags(to, of)
	of.VisitAll(func(flag *pflag.Flag) {
		if explicit := from.Lookup(flag.Name); explicit != nil && explicit.Changed {
			flag.Value.Set(explicit.Value.String())
		}
	})
	to.VModule = append(to.VModule, modules...)
}

// Equal reports whether two come to the same.
func (c *Config) Equal(o *Config) bool {
	return reflect.DeepEqual(c.Proxy, o.Proxy) && reflect.DeepEqual(c.Own, o.Own)
}

// YAML returns both documents.
func (c *Config) YAML() ([]byte, error) {
	own, oerr := yaml.Marshal(c.Own)
	proxy, perr := yaml.Marshal(c.Proxy)
	return slices.Concat(proxy, []byte("---\n"), own), errors.Join(oerr, perr)
}

// Chosen returns c with what an agent chose by it, so that a process elsewhere on its node decides the same: the node's
// name, the mode, and the engine of policies, "" for none. Its paths are absolute, and it has no warnings.
func (c *Config) Chosen(node, plane, engine string) (*Config, error) {
	chosen := *c
	chosen.Warnings = nil
	chosen.Proxy.HostnameOverride = node
	chosen.Own.Scheduler = c.scheduler() // by the mode that was configured
	chosen.Own.Mode = plane
	chosen.Own.Policy.Engine = cmp.Or(engine, c.Own.Policy.Engine)
	n := &chosen.Own.Network
	for _, path := range []*string{&chosen.Own.Source, &chosen.Proxy.ClientConnection.Kubeconfig, &n.CNIFolder,
		&n.RunFolder} {
		if *path == "" || *path == "-" { // standard input
			continue
		}
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return nil, err
		}
		*path = absolute
	}
	return &chosen, nil
}

// Node returns the node's name: the host's, where none was told.
func (c *Config) Node() (string, error) {
	if c.Proxy.HostnameOverride != "" {
		return c.Proxy.HostnameOverride, nil
	}
	if c.Own.Source != "" {
		return "", errors.New("--node is missing: set it to the name of the Node object")
	}
	name, err := os.Hostname()
	return strings.ToLower(strings.TrimSpace(name)), err
}

// Resolve returns what the resolver is told, but for what the mode can do.
func (c *Config) Resolve() (r resolve.Config, err error) {
	p := &c.Proxy
	if r.Node, err = c.Node(); err != nil {
		return r, err
	}
	r.Nodeless, r.HostPorts = c.Own.Source != "", c.Attaches()
	r.NoLocalHostPorts = !*p.IPTables.LocalhostNodePorts
	r.ProxyName = c.Own.ServiceProxyName
	r.NodePortAddresses = c.nodePorts()
	r.MasqueradeAll = p.IPTables.MasqueradeAll
	if p.Mode == "nftables" {
		r.MasqueradeAll = p.NFTables.MasqueradeAll
	}
	switch p.DetectLocalMode {
	case bridgeInterface:
		r.PodInterfaces = model.Interfaces{Name: p.DetectLocal.BridgeInterface}
	case interfaceNamePrefix:
		r.PodInterfaces = model.Interfaces{Name: p.DetectLocal.InterfaceNamePrefix, Prefix: true}
	case "", clusterCIDR:
		r.ClusterCIDRs = c.clusterCIDRs()
		r.NoPods = len(r.ClusterCIDRs) == 0
	}
	if r.Scheduler, err = model.ParseScheduler(c.scheduler()); err != nil {
		return r, err
	}
	r.Entries = c.Own.MaglevTableSize
	r.DirectServerReturn = c.Own.DirectServerReturn
	r.ExternalIPs, r.Limits, r.OverlayPort = c.Own.ExternalIPs, c.Own.Limits.limits(), c.overlayPort()
	own, err := node.OpenAddresses()
	if err != nil {
		return r, err
	}
	defer own.Close()
	if r.Addresses, err = own.List(); err != nil {
		return r, err
	}
	if a, err := resolve.ParseAddr(p.BindAddress); err == nil && !a.IsUnspecified() {
		r.Primary = a
	}
	return r, nil
}

// scheduler returns the name of the scheduler of Services that don't choose one.
func (c *Config) scheduler() string {
	usual := model.Random.String()
	if c.Own.Mode == "ipvs" && c.FromFile || c.Proxy.IPVS.Scheduler != "" && c.Own.Mode == "ipvs" {
		usual = cmp.Or(c.Proxy.IPVS.Scheduler, "rr") // as kube-proxy
		if other, ok := substitutes[usual]; ok {
			usual = other.String()
		}
	}
	return cmp.Or(c.Own.Scheduler, usual)
}

var loopback = netip.MustParsePrefix("127.0.0.0/8")

// nodePorts returns the addresses that take node ports. A kube-proxy in mode iptables serves those at 127.0.0.0/8 too,
// unless told not to; one in mode nftables serves primary addresses, unless told otherwise.
func (c *Config) nodePorts() (list []string) {
	p := &c.Proxy
	list = p.NodePortAddresses
	switch iptables := p.Mode == "iptables" || p.Mode == "" && c.FromFile; {
	case p.Mode == "nftables" && len(list) == 0:
		return []string{"primary"}
	case iptables && *p.IPTables.LocalhostNodePorts && len(list) == 0:
		return []string{"all", "localhost"}
	case iptables && !*p.IPTables.LocalhostNodePorts:
		return beyond(list)
	}
	return list
}

// OpenNodePorts reports whether node ports are open at every address since nothing says where they should be.
func (c *Config) OpenNodePorts() bool {
	return len(c.Proxy.NodePortAddresses) == 0 && c.Proxy.Mode != "nftables"
}

// Ranges of addresses that no node has: a family that the list doesn't name would be open.
const nobody4, nobody6 = "127.255.255.255/32", "ff00::/128"

// beyond returns a list without loopback addresses.
func beyond(list []string) (out []string) {
	for _, s := range list {
		p, err := resolve.ParsePrefix(s)
		switch rest := without(p); {
		case s == "localhost":
			out = append(out, nobody4, nobody6)
		case err != nil:
			out = append(out, s)
		case len(rest) == 0:
			out = append(out, nobody4)
		default:
			out = append(out, rest...)
		}
	}
	return out
}

// without returns the ranges that make up p but for loopback.
func without(p netip.Prefix) []string {
	switch {
	case !p.IsValid():
		return nil
	case !p.Overlaps(loopback):
		return []string{p.String()}
	case p.Bits() >= loopback.Bits():
		return nil
	}
	a := p.Masked().Addr().As4()
	low := netip.PrefixFrom(netip.AddrFrom4(a), p.Bits()+1)
	a[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	return append(without(low), without(netip.PrefixFrom(netip.AddrFrom4(a), p.Bits()+1))...)
}

// System returns the settings that the node's system is to have, for a mode that tracks connections, or not.
func (c *Config) System(m mode.Mode) node.Settings {
	t := &c.Proxy.Conntrack
	s := node.Settings{OOMScore: *c.Proxy.OOMScoreAdj, StrictARP: m.Name == "ipvs" && c.Proxy.IPVS.StrictARP}
	if m.Tracked {
		s.Conntrack = &node.Conntrack{
			MaxPerCore: int(*t.MaxPerCore), Min: int(*t.Min), Liberal: t.TCPBeLiberal,
			Established: t.TCPEstablishedTimeout.Duration, CloseWait: t.TCPCloseWaitTimeout.Duration,
			UDP: t.UDPTimeout.Duration, UDPStream: t.UDPStreamTimeout.Duration,
		}
	}
	return s
}

// Servers is where an agent serves what it serves beside packets.
type Servers struct {
	Health, Metrics string // addresses; empty: none
	HardFail        bool   // an address that can't be bound ends the agent; else it is tried again
	Profiling       bool
	Late            time.Duration  // how long a change may wait for the kernel before the node counts as unhealthy
	Config          map[string]any // what /configz shows, by API group
}

// Servers returns what the agent serves and where.
func (c *Config) Servers() Servers {
	p := &c.Proxy
	sync := p.IPTables.SyncPeriod
	switch p.Mode {
	case "ipvs":
		sync = p.IPVS.SyncPeriod
	case "nftables":
		sync = p.NFTables.SyncPeriod
	}
	return Servers{Health: p.HealthzBindAddress, Metrics: p.MetricsBindAddress, HardFail: p.BindAddressHardFail,
		Profiling: p.EnableProfiling,
		Late:      2 * sync.Duration, Config: map[string]any{"kubeproxy.config.k8s.io": p, "fairlead.dev": c.Own}}
}

// Options returns the settings of modes' planes.
func (c *Config) Options() mode.Options {
	e, p := &c.Own.EBPF, &c.Proxy.IPVS
	return mode.Options{MapEntries: e.MapEntries, Flows: e.Flows, CloseTCP: e.CloseTCP, NoFastPath: e.FastPath == Never,
		NoReversePathCheck: string(e.ReversePathCheck) == string(Never), Policies: c.Policies(), PodNetwork: c.Network(),
		TCP: p.TCPTimeout.Duration, FIN: p.TCPFinTimeout.Duration, UDP: p.UDPTimeout.Duration}
}

// ExcludedCIDRs returns the addresses of IPVS services that are to stay when a kube-proxy's are removed.
func (c *Config) ExcludedCIDRs() (list []netip.Prefix) {
	for _, s := range c.Proxy.IPVS.ExcludeCIDRs {
		if p, err := resolve.ParsePrefix(s); err == nil {
			list = append(list, p)
		}
	}
	return list
}
