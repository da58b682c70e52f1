package config

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/kube-proxy/config/v1alpha1"

	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// load loads a file's text with flags.
func load(t *testing.T, text string, args ...string) (*Config, error) {
	t.Helper()
	f, fs := &Flags{}, pflag.NewFlagSet("", pflag.ContinueOnError)
	f.Add(fs)
	if text != "" {
		file := filepath.Join(t.TempDir(), "config.conf")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", file)
	}
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	return f.Load()
}

func must(t *testing.T, text string, args ...string) *Config {
	t.Helper()
	c, err := load(t, text, args...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

const head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// kubeadm is what kubeadm writes into the ConfigMap kube-proxy.
const kubeadm = head + `bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
`

func TestEveryFieldHasOneRow(t *testing.T) {
	used := map[string]bool{}
	for _, l := range leaves(&v1alpha1.KubeProxyConfiguration{}) {
		f, ok := fieldOf(l.path)
		if !ok {
			t.Errorf("field %s of KubeProxyConfiguration has no row: say what becomes of it", l.path)
		}
		used[f.Path] = true
	}
	for _, f := range fields {
		if !used[f.Path] {
			t.Errorf("row %s is of no field", f.Path)
		}
		if f.Text == "" {
			t.Errorf("row %s says nothing", f.Path)
		}
	}
}

// TestEveryFieldThatIsNotHonouredWarns changes each such field alone and looks for its name in the warnings.
func TestEveryFieldThatIsNotHonouredWarns(t *testing.T) {
	for i, l := range leaves(defaults()) {
		f, _ := fieldOf(l.path)
		c := defaults()
		change(t, l.path, leaves(c)[i].value)
		warned := strings.Contains(strings.Join(ignored(c), "\n"), l.path+": ")
		if warned == f.Honoured {
			t.Errorf("%s: honoured is %t, warned of is %t", l.path, f.Honoured, warned)
		}
	}
}

// change returns a field another value.
func change(t *testing.T, path string, v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString("other")
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Int32, reflect.Int64:
		v.SetInt(v.Int() + 1)
	case reflect.Uint32:
		v.SetUint(v.Uint() + 1)
	case reflect.Float32:
		v.SetFloat(v.Float() + 1)
	case reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		change(t, path, v.Elem())
	case reflect.Struct:
		if q, ok := v.Addr().Interface().(*resource.QuantityValue); ok {
			q.Quantity = resource.MustParse("7Mi")
			return
		}
		change(t, path, v.Field(0))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	case reflect.Map:
		m := reflect.MakeMap(v.Type())
		m.SetMapIndex(reflect.ValueOf("Gate"), reflect.ValueOf(true))
		v.Set(m)
	default:
		t.Fatalf("%s: a field of kind %s: teach the test", path, v.Kind())
	}
}

func TestEveryFlagHasOneRow(t *testing.T) {
	f, fs := &Flags{}, pflag.NewFlagSet("", pflag.ContinueOnError)
	f.Add(fs)
	seen := map[string]bool{}
	for _, r := range rows {
		if seen[r.Flag] {
			t.Errorf("--%s has two rows", r.Flag)
		}
		seen[r.Flag] = true
		if fs.Lookup(r.Flag) == nil {
			t.Errorf("row --%s is of no flag", r.Flag)
		}
		if _, ok := fieldOf(r.Field); r.Field != "" && !ok {
			t.Errorf("--%s sets %s, which has no row", r.Flag, r.Field)
		}
	}
	fs.VisitAll(func(f *pflag.Flag) {
		if !seen[f.Name] {
			t.Errorf("--%s has no row", f.Name)
		}
	})
}

// TestKubeadmsFile: the file that most clusters have is taken whole, without a warning, as kube-proxy takes it.
func TestKubeadmsFile(t *testing.T) {
	c := must(t, kubeadm, "--hostname-override", "Worker-1")
	if len(c.Warnings) != 0 {
		t.Errorf("warnings: %q", c.Warnings)
	}
	r, err := c.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	if c.Own.Mode != "auto" || r.Node != "worker-1" || len(r.ClusterCIDRs) != 1 || r.NoPods ||
		strings.Join(r.NodePortAddresses, ",") != "all,localhost" {
		t.Errorf("mode %s, %+v", c.Own.Mode, r)
	}
	if s := c.Servers(); s.Health != "0.0.0.0:10256" || s.Metrics != "127.0.0.1:10249" || s.Late.String() != "1m0s" ||
		s.HardFail || s.Profiling {
		t.Errorf("servers: %+v", s)
	}
	if c.Proxy.ClientConnection.Kubeconfig != "/var/lib/kube-proxy/kubeconfig.conf" || c.Proxy.ClientConnection.QPS != 5 ||
		c.Proxy.ClientConnection.Burst != 10 {
		t.Errorf("connection: %+v", c.Proxy.ClientConnection)
	}
}

func TestMeaning(t *testing.T) {
	type outcome struct {
		mode, ports, scheduler string
		all, noPods, dsr       bool
		health, metrics, leave string
	}
	usual := outcome{mode: "auto", ports: "all,localhost", scheduler: "random", noPods: true, health: "0.0.0.0:10256",
		metrics: "127.0.0.1:10249", leave: "Leave"}
	with := func(f func(*outcome)) outcome { o := usual; f(&o); return o }
	flags := with(func(o *outcome) { o.mode, o.ports, o.noPods = "nftables", "", false })
	for _, c := range []struct {
		name, text, args string
		want             outcome
	}{
		{"an empty file", head, "", usual},
		{"mode nftables", head + "mode: nftables\niptables: {masqueradeAll: true}", "",
			with(func(o *outcome) { o.mode, o.ports = "nftables", "primary" })},
		{"its masqueradeAll", head + "mode: nftables\nnftables: {masqueradeAll: true}", "",
			with(func(o *outcome) { o.mode, o.ports, o.all = "nftables", "primary", true })},
		{"mode ipvs", head + "mode: ipvs\niptables: {masqueradeAll: true}", "",
			with(func(o *outcome) { o.mode, o.ports, o.all, o.scheduler = "ipvs", "", true, "round-robin" })},
		{"ipvs with a scheduler", head + "mode: ipvs\nipvs: {scheduler: mh}", "",
			with(func(o *outcome) { o.mode, o.ports, o.scheduler = "ipvs", "", "maglev" })},
		{"ipvs with a scheduler that isn't here", head + "mode: ipvs\nipvs: {scheduler: lblcr}", "",
			with(func(o *outcome) { o.mode, o.ports, o.scheduler = "ipvs", "", "least-connections" })},
		{"no localhost", head + "iptables: {localhostNodePorts: false}\nnodePortAddresses: [0.0.0.0/4, 96.0.0.0/3, " +
			"127.1.0.0/16, 'fd00::/8']", "",
			with(func(o *outcome) {
				o.ports = "0.0.0.0/4,96.0.0.0/4,112.0.0.0/5,120.0.0.0/6,124.0.0.0/7,126.0.0.0/8,127.255.255.255/32,fd00::/8"
			})},
		{"only localhost, and not that", head + "iptables: {localhostNodePorts: false}\nnodePortAddresses: [localhost]",
			"", with(func(o *outcome) { o.ports = "127.255.255.255/32,ff00::/128" })},
		{"localhost beside others, and not that", head + "iptables: {localhostNodePorts: " +
			"false}\nnodePortAddresses: [127.0.0.0/8, 'fd00::/8', " +
			"primary]", "", with(func(o *outcome) { o.ports = "127.255.255.255/32,fd00::/8,primary" })},
		{"IPv6", head + "bindAddress: '::'", "",
			with(func(o *outcome) { o.health, o.metrics = "[::]:10256", "[::1]:10249" })},
		{"ports of their own", head + "healthzBindAddress: fd00::1\nmetricsBindAddress: 10.0.0.1:99", "",
			with(func(o *outcome) { o.health, o.metrics = "[fd00::1]:10256", "10.0.0.1:99" })},
		{"NodeCIDR", head + "detectLocalMode: NodeCIDR", "", with(func(o *outcome) { o.noPods = false })},
		{"ours beside it", head + "mode: iptables\n---\napiVersion: fairlead.dev/v1alpha1\nkind: " +
			"FairleadConfiguration\nmode: ebpf\nscheduler: maglev\nmigrateFromKubeProxy: Remove", "",
			with(func(o *outcome) { o.mode, o.scheduler, o.leave = "ebpf", "maglev", "Remove" })},
		{"direct server return", "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\ndirectServerReturn: true",
			"", with(func(o *outcome) { *o = flags; o.dsr = true })},
		{"direct server return by flag", "", "--direct-server-return", with(func(o *outcome) { *o = flags; o.dsr = true })},
		{"direct server return, but not by flag", "apiVersion: fairlead.dev/v1alpha1\nkind: " +
			"FairleadConfiguration\ndirectServerReturn: true", "--direct-server-return=false", flags},
		{"our flags win over our document", "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\nmode: " +
			"ebpf\nscheduler: maglev", "--mode userspace", with(func(o *outcome) {
			*o = flags
			o.mode, o.scheduler = "userspace", "maglev"
		})},
		{"a file wins over kube-proxy's flags", head, "--proxy-mode ipvs --metrics-bind-address 1.2.3.4 --masquerade-all",
			usual},
		{"no file, no flag", "", "", flags},
		{"kube-proxy's flags", "", "--proxy-mode iptables --masquerade-all --nodeport-addresses primary " +
			"--metrics-bind-address 0.0.0.0 --healthz-bind-address 127.0.0.1:1",
			with(func(o *outcome) {
				*o = flags
				o.mode, o.all, o.ports, o.metrics, o.health = "iptables", true, "primary", "0.0.0.0:10249", "127.0.0.1:1"
			})},
		{"old ports", "", "--healthz-port 7 --metrics-port 0",
			with(func(o *outcome) { *o = flags; o.health, o.metrics = "0.0.0.0:7", "" })},
		{"no servers", "", "--status-address= --healthz-bind-address=",
			with(func(o *outcome) { *o = flags; o.health, o.metrics = "", "" })},
		{"flags for pods", "", "--detect-local-mode ClusterCIDR", with(func(o *outcome) { *o = flags; o.noPods = true })},
		{"an empty --proxy-mode", "", "--proxy-mode=", with(func(o *outcome) { *o = flags; o.mode = "auto" })},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := load(t, c.text, append(strings.Fields(c.args), "--hostname-override", "a")...)
			if err != nil {
				t.Fatal(err)
			}
			r, err := l.Resolve()
			if err != nil {
				t.Fatal(err)
			}
			s := l.Servers()
			is := outcome{l.Own.Mode, strings.Join(r.NodePortAddresses, ","), r.Scheduler.String(), r.MasqueradeAll, r.NoPods,
				r.DirectServerReturn, s.Health, s.Metrics, string(l.Own.MigrateFromKubeProxy)}
			if is != c.want {
				t.Errorf("is   %+v\nwant %+v", is, c.want)
			}
		})
	}
}

func TestWarnings(t *testing.T) {
	c := must(t, head+"mode: iptables\nmode: nftables\nnoSuchField: 1\niptables: {masqueradeBit: 3}\n", "--proxy-mode",
		"ipvs", "-v", "6", "--hostname-override", "b")
	all := strings.Join(c.Warnings, "\n")
	for _, want := range []string{"noSuchField", "already set", "iptables.masqueradeBit: 3", "--proxy-mode"} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is missing in:\n%s", want, all)
		}
	}
	if len(c.Warnings) != 4 || c.Proxy.Logging.Verbosity != 6 || c.Proxy.HostnameOverride != "b" {
		t.Errorf("%d warnings, verbosity %d, node %q:\n%s", len(c.Warnings), c.Proxy.Logging.Verbosity,
			c.Proxy.HostnameOverride, all)
	}
}

// What kube-proxy begins with doesn't end the start.
func TestStartsAsKubeProxy(t *testing.T) {
	for _, c := range []struct{ text, warning string }{
		{"mode: iptables\nipvs: {minSyncPeriod: 60s}", "ipvs.minSyncPeriod"},
		{"mode: iptables\nipvs: {excludeCIDRs: [10.0.0.1]}", "ipvs.excludeCIDRs[0]"},
		{"mode: iptables\nipvs: {scheduler: best}", "ipvs.scheduler"},
		{"nftables: {masqueradeBit: 40}", "nftables.masqueradeBit"},
		{"mode: ipvs\niptables: {syncPeriod: 1s, minSyncPeriod: 2s}", "iptables.minSyncPeriod"},
		{"mode: ipvs\nipvs: {scheduler: lblc}", "ipvs.scheduler: lblc is not supported: Services are served by " +
			"least-connections (lc)"},
		{"mode: ipvs\nipvs: {scheduler: fo}", "weighted-round-robin (wrr)"},
		{"mode: ipvs\nipvs: {scheduler: ovf}", "weighted-round-robin (wrr)"},
		{"mode: ipvs\nipvs: {scheduler: twos}", "weighted-least-connections (wlc)"},
		{"mode: ipvs\nipvs: {scheduler: dh}", ""},
		{"nodePortAddresses: ['::1/128']", ""},
		{"clusterCIDR: 010.244.000.000/16\nbindAddress: 010.0.0.1\nnodePortAddresses: " +
			"[172.030.0.0/16]\nmetricsBindAddress: 127.0.0.01", ""},
	} {
		l, err := load(t, head+c.text, "--hostname-override", "a")
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		if all := strings.Join(l.Warnings, "\n"); !strings.Contains(all, c.warning) {
			t.Errorf("%s: no warning of %s in %q", c.text, c.warning, all)
		}
		r, err := l.Resolve()
		if err == nil {
			err = r.Validate()
		}
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
		}
	}
	l := must(t, head+"clusterCIDR: 010.244.000.000/16\nmetricsBindAddress: 127.0.0.01:99", "--hostname-override", "a")
	if r, err := l.Resolve(); err != nil || len(r.ClusterCIDRs) != 1 || r.ClusterCIDRs[0].String() != "10.244.0.0/16" ||
		l.Servers().Metrics != "127.0.0.1:99" {
		t.Errorf("%v, %v, %v", r.ClusterCIDRs, l.Servers().Metrics, err)
	}
}

// TestErrorsNameEverything: each wrong value is named by its path, all at once.
func TestErrorsNameEverything(t *testing.T) {
	_, err := load(t, head+`mode: ipvs
bindAddress: here
metricsBindAddress: "1.2.3.4:99999"
oomScoreAdj: 2000
clusterCIDR: 10.0.0.0
detectLocalMode: ClusterCIDR
nodePortAddresses: [primry]
conntrack: {min: -1}
ipvs: {excludeCIDRs: [x], scheduler: best, syncPeriod: 1s, minSyncPeriod: 2s}
---
apiVersion: fairlead.dev/v1alpha1
kind: FairleadConfiguration
mode: magic
scheduler: best
migrateFromKubeProxy: Maybe
externalIPs: Some
limits: {namespaceBytes: 1000, bytes: -1, serviceFrontends: -2, namespacePercent: 101}
`)
	if err == nil {
		t.Fatal("no error")
	}
	for _, path := range []string{"mode", "bindAddress", "metricsBindAddress", "oomScoreAdj", "clusterCIDR[0]",
		"nodePortAddresses[0]", "conntrack.min", "ipvs.minSyncPeriod",
		"ipvs.excludeCIDRs[0]", "ipvs.scheduler", "scheduler", "migrateFromKubeProxy", "limits.namespaceBytes",
		"limits.bytes",
		"limits.serviceFrontends", "limits.namespacePercent", "externalIPs", `"magic"`} {
		if !strings.Contains(err.Error(), path) {
			t.Errorf("%s is missing in: %v", path, err)
		}
	}
	for text, want := range map[string]string{
		"":                          "",
		"a: [":                      "YAML",
		"# nothing":                 "no configuration",
		"kind: Pod\napiVersion: v1": "Pod",
		head + "---\n" + head:       "duplicate",
		"apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\nmood: x": "mood",
		head + "oomScoreAdj: many": "oomScoreAdj",
		head + "mode: userspace":   `"userspace"`,
	} {
		if text == "" {
			continue
		}
		if _, err := load(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// TestErrorsNameWrongFlags: whoever gave a flag hears its name, what was wrong with it, and what would do.
func TestErrorsNameWrongFlags(t *testing.T) {
	for args, want := range map[string][]string{
		"--mode=foo":                    {`"foo"`, "--mode", "nftables, iptables", "ebpf"},
		"--scheduler=best":              {`"best"`, "--scheduler", "random"},
		"--maglev-table-size=10":        {"10", "--maglev-table-size"},
		"--ebpf-map-entries=-1":         {`"-1"`, "--ebpf-map-entries"},
		"--ebpf-map-entries=many":       {`"many"`, "--ebpf-map-entries"},
		"--ebpf-map-entries=0":          {"0", "--ebpf-map-entries", "from 512 to 67108864"},
		"--ebpf-map-entries=511":        {"511", "--ebpf-map-entries", "from 512 to 67108864"},
		"--ebpf-map-entries=67108865":   {"67108865", "--ebpf-map-entries", "from 512 to 67108864"},
		"--ebpf-map-entries=5000000000": {"5000000000", "--ebpf-map-entries"},
		"--ebpf-close-tcp=always":       {`"always"`, "--ebpf-close-tcp"},
		"--external-ips=Some":           {`"Some"`, "externalIPs", "Safe", "Refuse", "Any"},
		"--ebpf-fast-path=Often":        {`"Often"`, "ebpf.fastPath", "Auto", "Never"},
		"--ebpf-flows=1023":             {"1023", "--ebpf-flows", "from 1024 to 16777216"},
		"--ebpf-flows=16777217":         {"16777217", "--ebpf-flows", "from 1024 to 16777216"},

		"--ebpf-reverse-path-check=Loose": {`"Loose"`, "ebpf.reversePathCheck", "Always", "Never"},
	} {
		_, err := load(t, "", args)
		if err == nil {
			t.Errorf("%s: no error", args)
			continue
		}
		for _, word := range want {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%s: %q is missing in: %v", args, word, err)
			}
		}
	}
}

func TestWrittenConfigurationIsTheSame(t *testing.T) {
	c := must(t, "", "--proxy-mode", "ipvs", "--cluster-cidr", "10.244.0.0/16", "--conntrack-min", "7", "--scheduler",
		"maglev", "--node", "a")
	text, err := c.YAML()
	if err != nil {
		t.Fatal(err)
	}
	if again := must(t, string(text)); !again.Equal(c) || len(again.Warnings) > 0 {
		t.Errorf("%q\n%+v\n%+v", again.Warnings, again, c)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(kubeadm))
	f.Add([]byte(head + "---\napiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\nmode: ebpf"))
	f.Fuzz(func(t *testing.T, text []byte) {
		in, err := read(text)
		if err != nil || in.proxy == nil {
			return
		}
		c := Config{Proxy: *in.proxy}
		complete(&c.Proxy)
		if c.validate() == nil {
			ignored(&c.Proxy)
			c.nodePorts()
		}
	})
}

func TestLimits(t *testing.T) {
	l := must(t, `apiVersion: fairlead.dev/v1alpha1
kind: FairleadConfiguration
externalIPs: Refuse
limits: {serviceFrontends: 1, serviceSlots: 2, serviceTableEntries: 3, frontends: 4, slots: 5, namespacePercent: 6}
`, "--hostname-override", "a")
	want := resolve.Limits{Service: resolve.Bounds{Frontends: 1, Slots: 2, TableEntries: 3},
		Total: resolve.Bounds{Frontends: 4, Slots: 5}, NamespacePercent: 6}
	if r, err := l.Resolve(); err != nil || r.ExternalIPs != resolve.RefuseExternalIPs || r.Limits != want {
		t.Errorf("%v, %+v, %v", r.ExternalIPs, r.Limits, err)
	}
}

// Open connections are cut by the configured bit of their mark, or not at all.
func TestCutMark(t *testing.T) {
	const own = "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\npolicy: "
	for text, want := range map[string]uint32{
		own + "{mode: Enforce}":                                 1 << 31,
		own + "{mode: Enforce, cutMark: 64}":                    64,
		own + "{mode: Enforce, cutMark: 64, established: Cut}":  64,
		own + "{mode: Enforce, cutMark: 64, established: Keep}": 0,
		own + "{mode: Audit, established: Keep}":                0,
	} {
		if got := must(t, text, "--hostname-override", "a").ResolvePolicies(resolve.Config{}).CutMark; got != want {
			t.Errorf("%s: bit %#x, want %#x", text, got, want)
		}
	}
}

func TestSourceCheck(t *testing.T) {
	const own = "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\npolicy: {mode: Enforce, sourceCheck: "
	for value, want := range map[string]bool{`""`: true, "Always": true, "Never": false} {
		if got := must(t, own+value+"}\n", "--hostname-override", "a").ChecksSources(); got != want {
			t.Errorf("%s: sources are checked: %t, want %t", value, got, want)
		}
	}
	if must(t, own+"Always}\n", "--hostname-override", "a", "--policy-source-check", "Never").ChecksSources() {
		t.Error("the flag counts for nothing")
	}
	if _, err := load(t, own+"never}\n"); err == nil || !strings.Contains(err.Error(), "policy.sourceCheck") {
		t.Errorf("a wrong value: %v", err)
	}
}

func TestFormerNamesAreAccepted(t *testing.T) {
	const own = "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\n"
	c := must(t, own+"takeOver: Remove\nebpf: {room: 4096, shortcut: Never}\n", "--hostname-override", "a")
	if c.Own.MigrateFromKubeProxy != Remove || c.Own.EBPF.MapEntries != 4096 || c.Own.EBPF.FastPath != Never {
		t.Errorf("the fields come to %+v", c.Own)
	}
	byFlag := must(t, "", "--hostname-override", "a", "--take-over", "Remove", "--ebpf-room=4096", "--ebpf-shortcut",
		"Never")
	if byFlag.Own.MigrateFromKubeProxy != Remove || byFlag.Own.EBPF.MapEntries != 4096 ||
		byFlag.Own.EBPF.FastPath != Never {
		t.Errorf("the flags come to %+v", byFlag.Own)
	}
	for _, l := range [][]string{c.Warnings, byFlag.Warnings} {
		if n := strings.Count(strings.Join(l, "\n"), "is deprecated: use "); n != 3 {
			t.Errorf("%d of 3 are warned of: %q", n, l)
		}
	}
	if _, err := load(t, own+"takeOver: Remove\nmigrateFromKubeProxy: Leave\n"); err == nil ||
		!strings.Contains(err.Error(), "takeOver is the former name of migrateFromKubeProxy") {
		t.Errorf("both names at once: %v", err)
	}
}

func TestPodInterfaces(t *testing.T) {
	const kubeProxy = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
	for _, c := range []struct{ text, args, want string }{
		{kubeProxy + "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}", "", "cni0"},
		{kubeProxy + "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: cali}", "", "cali*"},
		{kubeProxy + "detectLocalMode: NodeCIDR\ndetectLocal: {interfaceNamePrefix: cali}", "", ""},
		{"", "--detect-local-mode BridgeInterface --pod-bridge-interface cni0 --cluster-cidr 10.0.0.0/8", "cni0"},
		{"", "--detect-local-mode InterfaceNamePrefix --pod-interface-name-prefix cali", "cali*"},
	} {
		l, err := load(t, c.text, append(strings.Fields(c.args), "--hostname-override", "a")...)
		if err != nil {
			t.Fatal(err)
		}
		if len(l.Warnings) > 0 {
			t.Errorf("%q %s: warnings %q", c.text, c.args, l.Warnings)
		}
		r, err := l.Resolve()
		if err != nil || r.PodInterfaces.String() != c.want || len(r.ClusterCIDRs) > 0 || r.NoPods {
			t.Errorf("%q %s: pods' interfaces %q, ranges %v, none %t, %v; want %q", c.text, c.args, r.PodInterfaces,
				r.ClusterCIDRs, r.NoPods, err, c.want)
		}
	}
}

// The gates that kube-proxy reads come to what is served: configuration decides of one.
func TestFeatures(t *testing.T) {
	for flag, served := range map[string]bool{"Any": true, "Safe": true, "Refuse": false} {
		is := map[string]Feature{}
		for _, f := range must(t, head, "--external-ips", flag).Features() {
			is[f.Name] = f
		}
		if is["AllowServiceExternalIPs"].Enabled != served || !is["NFTablesNetlink"].Enabled ||
			is["NFTablesNetlink"].Stage != "BETA" {
			t.Errorf("--external-ips %s: %+v", flag, is)
		}
	}
}

// kube-proxy's gate of external IPs refuses them all, in its file and as a flag, whatever our own field says.
func TestExternalIPsGate(t *testing.T) {
	const proxy = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
	const off = proxy + "featureGates: {AllowServiceExternalIPs: false}\n"
	for _, c := range []struct {
		name, text string
		args       []string
		want       resolve.ExternalIPs
		warnings   int
	}{
		{"file", off, nil, resolve.RefuseExternalIPs, 0},
		{"file, on", proxy + "featureGates: {AllowServiceExternalIPs: true}\n", nil, resolve.SafeExternalIPs, 0},
		{"file, another", proxy + "featureGates: {AllowServiceExternalIPs: false, SomeGate: true}\n", nil,
			resolve.RefuseExternalIPs, 1},
		{"flag", "", []string{"--feature-gates=AllowServiceExternalIPs=false"}, resolve.RefuseExternalIPs, 0},
		{"against the file", off + "---\napiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\nexternalIPs: Any\n",
			nil,
			resolve.RefuseExternalIPs, 1},
		{"against the flag", off, []string{"--external-ips=Safe"}, resolve.RefuseExternalIPs, 1},
		{"neither", "", nil, resolve.SafeExternalIPs, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := load(t, c.text, c.args...)
			if err != nil {
				t.Fatal(err)
			}
			if got.Own.ExternalIPs != c.want || len(got.Warnings) != c.warnings {
				t.Errorf("externalIPs %s, warnings %q", got.Own.ExternalIPs, got.Warnings)
			}
		})
	}
}

// Pods that share the uplink's link-layer address leave by it alone.
func TestDevicesOfPods(t *testing.T) {
	for text, want := range map[string]string{
		"veth": "", "netkit": "", "macvlan": `Unsupported value: "macvlan": supported values: "veth", "netkit", "ipvlan-l2"`,
		"ipvlan-l2": "network.overlay: Invalid value: \"Subnets\": must be Never with network.device ipvlan-l2",
	} {
		_, err := load(t, "", "--network-mode", "Own", "--network-device", text)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
	c := must(t, "", "--network-mode", "Own", "--network-device", "ipvlan-l3", "--network-overlay", "Never")
	if c.PodDevice() != model.IPVLANL3 || c.ResolveNetwork(resolve.Config{}).Device != model.IPVLANL3 {
		t.Errorf("%s", c.PodDevice())
	}
	if c := must(t, "", "--network-device", "netkit"); c.PodDevice() != model.Veth {
		t.Errorf("without a network of its own: %s", c.PodDevice())
	}
}
