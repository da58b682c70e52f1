package config

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// Flags are the command line's flags: kube-proxy's, by the same names, and Fairlead's own.
type Flags struct {
	File      string // --config
	WriteTo   string // --write-config-to
	CleanUp   bool   // --cleanup
	Version   Version
	SetUpOnly bool   // --init-only
	Server    string // --master
	Verbose   bool

	set   *pflag.FlagSet
	proxy *v1alpha1.KubeProxyConfiguration
	own   FairleadConfiguration

	former                  []string // warnings about former names of flags
	node                    string
	clusterCIDRs            []string
	masqueradeAll           bool
	healthzPort, statusPort int32
}

// Row is a flag with the field that it sets, if any, and what it does beside that.
type Row struct{ Flag, Field, Text string }

// rows are kube-proxy's flags and our own, by the field that they set.
var rows = []Row{
	{"config", "", "The configuration file: YAML, a KubeProxyConfiguration, a FairleadConfiguration, or both as two " +
		"documents."},
	{"version", "", "Prints the version and exits. raw: all build information."},
	{"write-config-to", "", "Writes the configuration that the flags give to this file and exits."},
	{"cleanup", "", "Removes Fairlead's rules and exits, as `fairlead clean`."},
	{"init-only", "", "Applies the system settings and exits."},
	{"master", "", "The API server's URL, instead of the kubeconfig's."},
	{"kubeconfig", "clientConnection.kubeconfig", ""},
	{"kube-api-content-type", "clientConnection.contentType", ""},
	{"kube-api-burst", "clientConnection.burst", ""},
	{"kube-api-qps", "clientConnection.qps", ""},
	{"feature-gates", "featureGates", ""},
	{"hostname-override", "hostnameOverride", ""},
	{"bind-address", "bindAddress", ""},
	{"healthz-bind-address", "healthzBindAddress", ""},
	{"healthz-port", "", "Deprecated: the port of --healthz-bind-address. 0 disables the server."},
	{"metrics-bind-address", "metricsBindAddress", ""},
	{"metrics-port", "", "Deprecated: the port of --metrics-bind-address. 0 disables the server."},
	{"bind-address-hard-fail", "bindAddressHardFail", ""},
	{"profiling", "enableProfiling", ""},
	{"show-hidden-metrics-for-version", "showHiddenMetricsForVersion", ""},
	{"proxy-mode", "mode", ""},
	{"iptables-masquerade-bit", "iptables.masqueradeBit", ""},
	{"masquerade-all", "", "Sets iptables.masqueradeAll and nftables.masqueradeAll."},
	{"iptables-localhost-nodeports", "iptables.localhostNodePorts", ""},
	{"iptables-sync-period", "iptables.syncPeriod", ""},
	{"iptables-min-sync-period", "iptables.minSyncPeriod", ""},
	{"ipvs-sync-period", "ipvs.syncPeriod", ""},
	{"ipvs-min-sync-period", "ipvs.minSyncPeriod", ""},
	{"ipvs-scheduler", "ipvs.scheduler", ""},
	{"ipvs-exclude-cidrs", "ipvs.excludeCIDRs", ""},
	{"ipvs-strict-arp", "ipvs.strictARP", ""},
	{"ipvs-tcp-timeout", "ipvs.tcpTimeout", ""},
	{"ipvs-tcpfin-timeout", "ipvs.tcpFinTimeout", ""},
	{"ipvs-udp-timeout", "ipvs.udpTimeout", ""},
	{"detect-local-mode", "detectLocalMode", ""},
	{"pod-bridge-interface", "detectLocal.bridgeInterface", ""},
	{"pod-interface-name-prefix", "detectLocal.interfaceNamePrefix", ""},
	{"cluster-cidr", "clusterCIDR", "Default: the Node's spec.podCIDRs, unless --detect-local-mode is ClusterCIDR."},
	{"nodeport-addresses", "nodePortAddresses", ""},
	{"oom-score-adj", "oomScoreAdj", ""},
	{"conntrack-max-per-core", "conntrack.maxPerCore", ""},
	{"conntrack-min", "conntrack.min", ""},
	{"conntrack-tcp-timeout-established", "conntrack.tcpEstablishedTimeout", ""},
	{"conntrack-tcp-timeout-close-wait", "conntrack.tcpCloseWaitTimeout", ""},
	{"conntrack-tcp-be-liberal", "conntrack.tcpBeLiberal", ""},
	{"conntrack-udp-timeout", "conntrack.udpTimeout", ""},
	{"conntrack-udp-timeout-stream", "conntrack.udpStreamTimeout", ""},
	{"config-sync-period", "configSyncPeriod", ""},
	{"v", "logging.verbosity", ""},
	{"vmodule", "logging.vmodule", ""},
	{"logging-format", "logging.format", ""},
	{"log-flush-frequency", "logging.flushFrequency", ""},
	{"log-json-info-buffer-size", "logging.options", ""},
	{"log-json-split-stream", "logging.options", ""},
	{"log-text-info-buffer-size", "logging.options", ""},
	{"log-text-split-stream", "logging.options", ""},
	{"boot-id-file", "", "Has no effect."},
	{"machine-id-file", "", "Has no effect."},

	{"node", "hostnameOverride", "The same as --hostname-override, which takes precedence; also $FAIRLEAD_NODE."},
	{"status-address", "metricsBindAddress", "The same as --metrics-bind-address."},
	{"verbose", "logging.verbosity", "Logs each write, as -v 4."},
	{"source", "", "FairleadConfiguration's source; also $FAIRLEAD_SOURCE."},
	{"mode", "", "FairleadConfiguration's mode."},
	{"scheduler", "", "FairleadConfiguration's scheduler."},
	{"maglev-table-size", "", "FairleadConfiguration's maglevTableSize."},
	{"direct-server-return", "", "FairleadConfiguration's directServerReturn."},
	{"external-ips", "", "FairleadConfiguration's externalIPs."},
	{"ebpf-map-entries", "", "FairleadConfiguration's ebpf.mapEntries."},
	{"ebpf-close-tcp", "", "FairleadConfiguration's ebpf.closeTCP."},
	{"ebpf-fast-path", "", "FairleadConfiguration's ebpf.fastPath."},
	{"ebpf-flows", "", "FairleadConfiguration's ebpf.flows."},
	{"ebpf-reverse-path-check", "", "FairleadConfiguration's ebpf.reversePathCheck."},
	{"network-mode", "", "FairleadConfiguration's network.mode."},
	{"network-overlay", "", "FairleadConfiguration's network.overlay."},
	{"network-device", "", "FairleadConfiguration's network.device."},
	{"network-encapsulation", "", "FairleadConfiguration's network.encapsulation."},
	{"network-cni-folder", "", "FairleadConfiguration's network.cniFolder."},
	{"network-run-folder", "", "FairleadConfiguration's network.runFolder; also $FAIRLEAD_RUN_FOLDER."},
	{"policy-mode", "", "FairleadConfiguration's policy.mode; also $FAIRLEAD_POLICY_MODE."},
	{"policy-engine", "", "FairleadConfiguration's policy.engine."},
	{"policy-unknown-pods", "", "FairleadConfiguration's policy.unknownPods."},
	{"policy-established", "", "FairleadConfiguration's policy.established."},
	{"policy-source-check", "", "FairleadConfiguration's policy.sourceCheck."},
	{"policy-cut-mark", "", "FairleadConfiguration's policy.cutMark."},
	{"service-proxy-name", "", "FairleadConfiguration's serviceProxyName."},
	{"migrate-from-kube-proxy", "", "FairleadConfiguration's migrateFromKubeProxy."},
}

// renamed are flags by their former names. They are accepted with a warning.
var renamed = map[string]string{"take-over": "migrate-from-kube-proxy", "ebpf-room": "ebpf-map-entries",
	"ebpf-shortcut": "ebpf-fast-path"}

// rename returns a flag's present name. Former names that are used come to f.former.
func (f *Flags) rename(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	now, old := renamed[name]
	if !old {
		return pflag.NormalizedName(name)
	}
	if text := fmt.Sprintf("--%s is deprecated: use --%s", name, now); !slices.Contains(f.former, text) {
		f.former = append(f.former, text)
	}
	return pflag.NormalizedName(now)
}

// idle are flags of kube-proxy's libraries, which do nothing here.
var idle = []string{"boot-id-file", "machine-id-file", "log-json-info-buffer-size", "log-json-split-stream"}

// AddDecisions adds to a command the flags that decide what a node does: enough to show, plan and explain.
func (f *Flags) AddDecisions(fs *pflag.FlagSet) {
	f.set, f.proxy = fs, defaults()
	fs.SetNormalizeFunc(f.rename)
	f.proxy.HealthzBindAddress, f.proxy.MetricsBindAddress, f.proxy.BindAddress = "", "", ""
	c := f.proxy
	fs.StringVar(&f.File, "config", "", "configuration file: a KubeProxyConfiguration, a FairleadConfiguration, or both "+
		"as two YAML documents")
	fs.StringVar(&f.own.Source, "source", os.Getenv("FAIRLEAD_SOURCE"),
		"folder or file of Kubernetes YAML or JSON, or - for standard input (or $FAIRLEAD_SOURCE)")
	fs.StringVar(&c.ClientConnection.Kubeconfig, "kubeconfig", "",
		"kubeconfig of the Kubernetes API, unless --source is set; in a pod neither is needed")
	fs.StringVar(&f.Server, "master", "", "URL of the API server, instead of the kubeconfig's")
	fs.StringVar(&f.node, "node", os.Getenv("FAIRLEAD_NODE"),
		"name of this node, as in its Node object (or $FAIRLEAD_NODE)")
	fs.StringSliceVar(&f.clusterCIDRs, "cluster-cidr", nil, "pod addresses, CIDRs (default: the Node's spec.podCIDRs)")
	fs.BoolVar(&f.masqueradeAll, "masquerade-all", false, "masquerade all traffic to ClusterIPs")
	fs.StringSliceVar(&c.NodePortAddresses, "nodeport-addresses", nil,
		"node addresses that serve node ports: CIDRs, all, primary or localhost (default all)")
	fs.StringVar(&f.own.ServiceProxyName, "service-proxy-name", "",
		"serve only Services with this label service.kubernetes.io/service-proxy-name")
	fs.StringVar(&f.own.Mode, "mode", mode.Default, "data plane for Services, auto for the first that this kernel "+
		"supports: "+strings.Join(append(mode.Names(), mode.Auto), ", "))
	fs.StringVar(&f.own.Scheduler, "scheduler", model.Random.String(),
		"scheduler of Services without an annotation: "+model.AllSchedulers.String())
	fs.IntVar(&f.own.MaglevTableSize, "maglev-table-size", 0, fmt.Sprintf(
		"entries of each Maglev table, a prime up to %d: with more, fewer clients move (default: by mode)", model.MaxEntries))
	fs.BoolVar(&f.own.DirectServerReturn, "direct-server-return", false,
		"mode ebpf: direct server return: an endpoint's node answers external clients itself; set it on all nodes")
	fs.StringVar((*string)(&f.own.ExternalIPs), "external-ips", string(resolve.SafeExternalIPs),
		"spec.externalIPs that are served: Safe refuses those of pods, other Services' ClusterIPs and the API "+
			"server, Refuse serves none, Any all but the API server's")
	f.addNetwork(fs)
	fs.StringVar((*string)(&f.own.Policy.Mode), "policy-mode", cmp.Or(os.Getenv(EnvPolicyMode),
		string(PoliciesIgnore)), "NetworkPolicies and ClusterNetworkPolicies: Ignore, Audit to report what they would drop, "+
		"or Enforce (or $FAIRLEAD_POLICY_MODE)")
	fs.StringVar(&f.own.Policy.Engine, "policy-engine", mode.Auto, "data plane for policies, auto for the first that "+
		"this kernel supports, but beside mode ebpf first ebpf: "+strings.Join(append(mode.EngineNames(), mode.Auto), ", "))
	fs.StringVar((*string)(&f.own.Policy.UnknownPods), "policy-unknown-pods", string(policy.DenyUnknownPods),
		"rules that deny by selector also match pod addresses at which no pod is known yet: Deny, or Allow")
	fs.StringVar((*string)(&f.own.Policy.Established), "policy-established", string(CutEstablished),
		"open connections that policies no longer allow: Cut, or Keep")
	fs.StringVar((*string)(&f.own.Policy.SourceCheck), "policy-source-check", string(CheckSources),
		"drop packets with a pod's address that come in by another device than the pod's: Always, or Never where routes "+
			"are asymmetric")
	fs.Uint32Var(&f.own.Policy.CutMark, "policy-cut-mark", DefaultCutMark,
		"bit of the connection mark by which connections are cut, which no other program uses")
	fs.Uint32Var(&f.own.EBPF.MapEntries, "ebpf-map-entries", mode.DefaultMapEntries,
		"mode ebpf: entries of the kernel's maps: one for each port of a Service and each endpoint of it")
	fs.BoolVar(&f.own.EBPF.CloseTCP, "ebpf-close-tcp", false,
		"mode ebpf: close TCP connections of clients on the node to an endpoint that is removed, as with UDP")
	fs.StringVar((*string)(&f.own.EBPF.FastPath), "ebpf-fast-path", string(Auto), "mode ebpf: redirect packets to pods, "+
		"bypassing the host stack: Auto while no firewall rule there would see them, or Never")
	fs.Uint32Var(&f.own.EBPF.Flows, "ebpf-flows", mode.DefaultFlows,
		"mode ebpf: entries of each of the two maps of flows of external clients")
	fs.StringVar((*string)(&f.own.EBPF.ReversePathCheck), "ebpf-reverse-path-check", string(Always),
		"mode ebpf: accept a new flow only from the device that routes back to its source: Always, or Never "+
			"where routes are asymmetric")
}

// addNetwork adds to a command the flags of the pod network.
func (f *Flags) addNetwork(fs *pflag.FlagSet) {
	fs.StringVar((*string)(&f.own.Network.Mode), "network-mode", string(NetworkNone),
		"who connects pods: None for another CNI plugin, Own for this agent, called by fairlead-cni, Chained for another "+
			"plugin with fairlead-cni behind it")
	fs.StringVar((*string)(&f.own.Network.Overlay), "network-overlay", string(network.Subnets),
		"nodes that are reached through a tunnel: Subnets for those on another link, Always, or Never")
	fs.StringVar(&f.own.Network.Device, "network-device", model.Veth.String(),
		"what connects pods: veth, netkit, ipvlan-l2 or ipvlan-l3; ipvlan needs mode ebpf, no overlay and no policies")
	fs.StringVar((*string)(&f.own.Network.Encapsulation), "network-encapsulation", string(VXLAN),
		"how the overlay encapsulates packets: VXLAN, or IPIP, which carries IPv4 alone")
	fs.StringVar(&f.own.Network.CNIFolder, "network-cni-folder", DefaultCNIFolder,
		"folder in which the container runtime looks for network configurations")
	fs.StringVar(&f.own.Network.RunFolder, "network-run-folder", cmp.Or(os.Getenv(EnvRunFolder), DefaultRunFolder),
		"folder, in memory, of the sockets for fairlead-cni and for commands on the node, and of the records of pods' "+
			"addresses (or $FAIRLEAD_RUN_FOLDER)")
}

// Add adds all flags to a command.
func (f *Flags) Add(fs *pflag.FlagSet) {
	f.AddDecisions(fs)
	c := f.proxy
	fs.StringVar((*string)(&f.own.MigrateFromKubeProxy), "migrate-from-kube-proxy", string(Leave),
		"a kube-proxy's rules: Leave, or Remove once Fairlead serves and kube-proxy has stopped")
	fs.StringVar(&c.MetricsBindAddress, "status-address", "", "the same as --metrics-bind-address")
	fs.BoolVar(&f.Verbose, "verbose", false, "log each write, as -v 4")
	fs.MarkHidden("status-address")
	f.addKubeProxys(fs)
	f.Version = "false"
	fs.Var(&f.Version, "version", usage("version"))
	fs.Lookup("version").NoOptDefVal = "true"
	for _, name := range idle {
		text(fs, new(string))(name, usage(name))
	}
	logsapi.AddFlags(&c.Logging, fs)
	fs.Lookup("logging-format").Usage = `"text" or "json"`
}

// addKubeProxys adds kube-proxy's flags that have an effect.
func (f *Flags) addKubeProxys(fs *pflag.FlagSet) {
	c, api := f.proxy, &f.proxy.ClientConnection
	for name, add := range map[string]func(name, usage string){
		"write-config-to":                   func(n, u string) { fs.StringVar(&f.WriteTo, n, "", u) },
		"cleanup":                           func(n, u string) { fs.BoolVar(&f.CleanUp, n, false, u) },
		"init-only":                         func(n, u string) { fs.BoolVar(&f.SetUpOnly, n, false, u) },
		"kube-api-content-type":             text(fs, &api.ContentType),
		"kube-api-burst":                    func(n, u string) { fs.Int32Var(&api.Burst, n, api.Burst, u) },
		"kube-api-qps":                      func(n, u string) { fs.Float32Var(&api.QPS, n, api.QPS, u) },
		"feature-gates":                     func(n, u string) { fs.Var(gates(c.FeatureGates), n, u) },
		"hostname-override":                 text(fs, &c.HostnameOverride),
		"bind-address":                      text(fs, &c.BindAddress),
		"healthz-bind-address":              text(fs, &c.HealthzBindAddress),
		"metrics-bind-address":              text(fs, &c.MetricsBindAddress),
		"healthz-port":                      func(n, u string) { fs.Int32Var(&f.healthzPort, n, healthPort, u) },
		"metrics-port":                      func(n, u string) { fs.Int32Var(&f.statusPort, n, metricsPort, u) },
		"bind-address-hard-fail":            yes(fs, &c.BindAddressHardFail),
		"profiling":                         yes(fs, &c.EnableProfiling),
		"show-hidden-metrics-for-version":   text(fs, &c.ShowHiddenMetricsForVersion),
		"proxy-mode":                        text(fs, (*string)(&c.Mode)),
		"iptables-masquerade-bit":           number(fs, c.IPTables.MasqueradeBit),
		"iptables-localhost-nodeports":      yes(fs, c.IPTables.LocalhostNodePorts),
		"iptables-sync-period":              period(fs, &c.IPTables.SyncPeriod.Duration),
		"iptables-min-sync-period":          period(fs, &c.IPTables.MinSyncPeriod.Duration),
		"ipvs-sync-period":                  period(fs, &c.IPVS.SyncPeriod.Duration),
		"ipvs-min-sync-period":              period(fs, &c.IPVS.MinSyncPeriod.Duration),
		"ipvs-scheduler":                    text(fs, &c.IPVS.Scheduler),
		"ipvs-exclude-cidrs":                func(n, u string) { fs.StringSliceVar(&c.IPVS.ExcludeCIDRs, n, nil, u) },
		"ipvs-strict-arp":                   yes(fs, &c.IPVS.StrictARP),
		"ipvs-tcp-timeout":                  period(fs, &c.IPVS.TCPTimeout.Duration),
		"ipvs-tcpfin-timeout":               period(fs, &c.IPVS.TCPFinTimeout.Duration),
		"ipvs-udp-timeout":                  period(fs, &c.IPVS.UDPTimeout.Duration),
		"detect-local-mode":                 text(fs, (*string)(&c.DetectLocalMode)),
		"pod-bridge-interface":              text(fs, &c.DetectLocal.BridgeInterface),
		"pod-interface-name-prefix":         text(fs, &c.DetectLocal.InterfaceNamePrefix),
		"oom-score-adj":                     number(fs, c.OOMScoreAdj),
		"conntrack-max-per-core":            number(fs, c.Conntrack.MaxPerCore),
		"conntrack-min":                     number(fs, c.Conntrack.Min),
		"conntrack-tcp-timeout-established": period(fs, &c.Conntrack.TCPEstablishedTimeout.Duration),
		"conntrack-tcp-timeout-close-wait":  period(fs, &c.Conntrack.TCPCloseWaitTimeout.Duration),
		"conntrack-tcp-be-liberal":          yes(fs, &c.Conntrack.TCPBeLiberal),
		"conntrack-udp-timeout":             period(fs, &c.Conntrack.UDPTimeout.Duration),
		"conntrack-udp-timeout-stream":      period(fs, &c.Conntrack.UDPStreamTimeout.Duration),
		"config-sync-period":                period(fs, &c.ConfigSyncPeriod.Duration),
	} {
		add(name, usage(name))
	}
}

// usage returns what a flag does, in the words of the table.
func usage(flag string) string {
	i := slices.IndexFunc(rows, func(r Row) bool { return r.Flag == flag })
	if rows[i].Field == "" {
		return strings.ReplaceAll(rows[i].Text, "`", "") // pflag takes what is in them for the value's name
	}
	f, _ := fieldOf(rows[i].Field)
	if !f.Honoured {
		return "no effect: " + f.Text
	}
	return f.Path + ": " + f.Text
}

func text(fs *pflag.FlagSet, p *string) func(string, string) {
	return func(n, u string) { fs.StringVar(p, n, *p, u) }
}

func yes(fs *pflag.FlagSet, p *bool) func(string, string) {
	return func(n, u string) { fs.BoolVar(p, n, *p, u) }
}

func number(fs *pflag.FlagSet, p *int32) func(string, string) {
	return func(n, u string) { fs.Int32Var(p, n, *p, u) }
}

func period(fs *pflag.FlagSet, p *time.Duration) func(string, string) {
	return func(n, u string) { fs.DurationVar(p, n, *p, u) }
}

// gates is --feature-gates: name=true or name=false, comma-separated.
type gates map[string]bool

func (g gates) String() string { return "" }
func (g gates) Type() string   { return "name=bool,…" }

// Set implements pflag.Value.
func (g gates) Set(s string) error {
	for pair := range strings.SplitSeq(s, ",") {
		name, v, ok := strings.Cut(pair, "=")
		if !ok || v != "true" && v != "false" {
			return fmt.Errorf("%q: use name=true or name=false", pair)
		}
		g[name] = v == "true"
	}
	return nil
}

// Version is --version: false, true or raw.
type Version string

// RawVersion requests everything that is known of the build.
const RawVersion Version = "raw"

func (v *Version) String() string { return string(*v) }
func (v *Version) Type() string   { return "true|raw" }

// Set implements pflag.Value.
func (v *Version) Set(s string) error {
	requested, err := strconv.ParseBool(s)
	if s == string(RawVersion) {
		*v = RawVersion
		return nil
	}
	*v = Version(strconv.FormatBool(requested))
	if err != nil {
		return errors.New("use true, false or raw: a version can't be set")
	}
	return nil
}

// Requested reports whether the version is to be printed.
func (v Version) Requested() bool { return v != "" && v != "false" }

// Decide reports whether a flag was set that decides what a node does: any of AddDecisions' but --network-run-folder,
// which also says where the agent is.
func (f *Flags) Decide() (decide bool) {
	decisions := pflag.NewFlagSet("", pflag.ContinueOnError)
	new(Flags).AddDecisions(decisions)
	decisions.VisitAll(func(flag *pflag.Flag) {
		decide = decide || flag.Name != "network-run-folder" && f.explicit(flag.Name)
	})
	return decide
}

// explicit reports whether a flag was set.
func (f *Flags) explicit(name string) bool {
	flag := f.set.Lookup(name)
	return flag != nil && flag.Changed
}

// finish puts together what several flags say of one field.
func (f *Flags) finish() error {
	c := f.proxy
	c.ClusterCIDR = strings.Join(f.clusterCIDRs, ",")
	if c.DetectLocalMode == "" && c.ClusterCIDR == "" {
		c.DetectLocalMode = nodeCIDR
	}
	c.IPTables.MasqueradeAll, c.NFTables.MasqueradeAll = f.masqueradeAll, f.masqueradeAll
	c.NFTables.SyncPeriod, c.NFTables.MinSyncPeriod = c.IPTables.SyncPeriod, c.IPTables.MinSyncPeriod
	if f.explicit("status-address") && f.explicit("metrics-bind-address") {
		return fmt.Errorf("--status-address and --metrics-bind-address are the same: use one")
	}
	health, metrics := f.explicit("healthz-bind-address") && c.HealthzBindAddress == "",
		(f.explicit("metrics-bind-address") || f.explicit("status-address")) && c.MetricsBindAddress == ""
	c.HealthzBindAddress = atPort(c.HealthzBindAddress, "0.0.0.0", f.explicit("healthz-port"), f.healthzPort)
	c.MetricsBindAddress = atPort(c.MetricsBindAddress, "127.0.0.1", f.explicit("metrics-port"), f.statusPort)
	complete(c)
	if health || f.explicit("healthz-port") && f.healthzPort == 0 {
		c.HealthzBindAddress = ""
	}
	if metrics || f.explicit("metrics-port") && f.statusPort == 0 {
		c.MetricsBindAddress = ""
	}
	return nil
}

// atPort returns an address without a port the deprecated flag's port.
func atPort(address, usual string, explicit bool, port int32) string {
	if a, err := resolve.ParseAddr(cmp.Or(address, usual)); explicit && err == nil {
		return withPort(a.String(), int(port))
	}
	return address
}
