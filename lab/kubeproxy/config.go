package kubeproxy

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/sandbox/apiserver"
)

// Where a kube-proxy tells of itself, in its network namespace: upstream's ports.
const (
	healthAddress  = "127.0.0.1:10256"
	metricsAddress = "127.0.0.1:10249"
)

// Options say what to start.
type Options struct {
	Binary     string
	Mode       Mode
	Variant    Variant // of iptables, for the mode of that name
	Namespace  *netns.Namespace
	Server     string // URL of the API server as seen from the namespace, such as http://127.0.0.1:8080
	Kubeconfig string // absolute path of one to use instead of Server
	Node       string // name of the Node that it serves
	// absolute path of a folder for this kube-proxy alone: configuration, log, lock; made if it isn't there
	Dir string

	// pods' addresses, whose source isn't hidden; "": 10.128.0.0/9, as sandbox/generate has them
	ClusterCIDR               string
	MinSyncPeriod, SyncPeriod time.Duration // 0: upstream's, 1 s and 30 s
	Verbosity                 int           // of the log (-v); 0: upstream's
}

// rules is how often a mode syncs.
type rules struct {
	MinSyncPeriod string `json:"minSyncPeriod,omitempty"`
	SyncPeriod    string `json:"syncPeriod,omitempty"`
}

// configuration is what of kubeproxy.config.k8s.io/v1alpha1 (k8s.io/kube-proxy/config/v1alpha1/types.go) is not left to
// upstream's defaults.
type configuration struct {
	APIVersion         string            `json:"apiVersion"`
	Kind               string            `json:"kind"`
	Mode               Mode              `json:"mode"`
	HostnameOverride   string            `json:"hostnameOverride"`
	HealthzBindAddress string            `json:"healthzBindAddress"`
	MetricsBindAddress string            `json:"metricsBindAddress"`
	DetectLocalMode    string            `json:"detectLocalMode"`
	ClusterCIDR        string            `json:"clusterCIDR"`
	OOMScoreAdj        int               `json:"oomScoreAdj"`
	ClientConnection   map[string]string `json:"clientConnection"`
	Conntrack          map[string]any    `json:"conntrack"`
	IPTables           rules             `json:"iptables"`
	NFTables           rules             `json:"nftables"`
	IPVS               rules             `json:"ipvs"`
}

func (o Options) path(name string) string { return filepath.Join(o.Dir, name) }

// write makes the folder with the configuration in it.
func (o Options) write() error {
	every := rules{duration(o.MinSyncPeriod), duration(o.SyncPeriod)}
	c := configuration{
		APIVersion: "kubeproxy.config.k8s.io/v1alpha1", Kind: "KubeProxyConfiguration",
		Mode: o.Mode, HostnameOverride: o.Node, HealthzBindAddress: healthAddress, MetricsBindAddress: metricsAddress,
		DetectLocalMode: "ClusterCIDR", ClusterCIDR: cmp.Or(o.ClusterCIDR, "10.128.0.0/9"),
		ClientConnection: map[string]string{"kubeconfig": cmp.Or(o.Kubeconfig, o.path("kubeconfig"))},
		Conntrack: map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s",
			"tcpCloseWaitTimeout": "0s"},
		IPTables: every, NFTables: every, IPVS: every,
	}
	text, err := yaml.Marshal(c)
	if err != nil {
		return err
	}
	return errors.Join(
		os.MkdirAll(o.Dir, 0o755),
		os.WriteFile(o.path("config.yaml"), text, 0o644),
		os.WriteFile(o.path("kubeconfig"), apiserver.Kubeconfig(o.Server), 0o644))
}

func duration(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.String()
}

// environment is that of this kube-proxy.
func (o Options) environment() ([]string, error) {
	if o.Mode != IPTables {
		return Environment(o.Dir, Found)
	}
	return Environment(o.Dir, o.Variant)
}

// Environment returns that of this process for a program that runs iptables: with a lock in dir for its own tables, and
// the commands of a variant, by links in dir, first in PATH.
func Environment(dir string, v Variant) ([]string, error) {
	env := append(os.Environ(), "XTABLES_LOCKFILE="+filepath.Join(dir, "xtables.lock"))
	if v == Found {
		return env, nil
	}
	multi, err := exec.LookPath("xtables-" + string(v) + "-multi")
	if err != nil {
		return nil, fmt.Errorf("iptables of variant %s: %w: install the Debian package iptables", v, err)
	}
	bin := filepath.Join(dir, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return nil, err
	}
	for _, name := range []string{"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save",
		"ip6tables-restore"} {
		if err := os.Symlink(multi, filepath.Join(bin, name)); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, err
		}
	}
	return append(env, "PATH="+bin+":"+os.Getenv("PATH")), nil
}
