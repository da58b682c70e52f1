package kubernetes

import (
	"fmt"
	"net/netip"
	"path/filepath"

	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/controlplane"
)

// Where a machine has what its programs read.
const (
	kubeletConfig     = "/etc/kubernetes/kubelet.yaml"
	kubeletKubeconfig = "/etc/kubernetes/kubelet.conf"
	agentKubeconfig   = "/etc/kubernetes/fairlead.conf"
	authority         = "/etc/kubernetes/ca.crt"
	containerdConfig  = "/etc/containerd/config.toml"
	containerdSocket  = "/run/containerd/containerd.sock"
	pluginFolder      = "/opt/cni/bin" // containerd's default
	bridgeConfig      = "/etc/cni/net.d/10-bridge.conflist"
	resolvConf        = "/etc/kubernetes/resolv.conf"
)

// machine returns the machine of the Node of index i, from 0.
func (c *Cluster) machine(i int, at netip.Addr, images []string) (Machine, error) {
	name := nodeName(i)
	server := netip.AddrPortFrom(c.Plane.Address, controlplane.First)
	kubelet, err := c.Plane.KubeconfigAt(server, "system:node:"+name, "system:nodes")
	if err != nil {
		return Machine{}, err
	}
	agent, err := c.Plane.KubeconfigAt(server, "fairlead", "system:masters")
	if err != nil {
		return Machine{}, err
	}
	p := c.Programs
	m := Machine{
		Name: name, Dir: filepath.Join(c.Dir, "node-"+name), Cgroup: cgroup(c.Name, name),
		Path:    p.Containerd + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		Folders: []string{pluginFolder},
		Files: []File{
			{kubeletConfig, kubeletText, 0o644},
			{kubeletKubeconfig, string(kubelet), 0o600},
			{agentKubeconfig, string(agent), 0o600},
			{authority, string(c.Plane.CA.PEM()), 0o644},
			{containerdConfig, fmt.Sprintf(containerdText, containerdSocket, PauseImage, c.plugins(), p.Runc), 0o644},
			{resolvConf, "", 0o644},
		},
	}
	switch {
	case c.Bridge:
		m.Files = append(m.Files, File{bridgeConfig, fmt.Sprintf(bridgeText, bridgeRange(i).String()), 0o644})
	case !c.Bare:
		m.Programs = append(m.Programs, Program{Name: "plugin", Ends: true,
			Args: []string{p.Plugin, "install", pluginFolder}})
	}
	m.Programs = append(m.Programs, Program{Name: "containerd", Socket: containerdSocket,
		Args: []string{filepath.Join(p.Containerd, "containerd"), "--config", containerdConfig}})
	for _, i := range images {
		m.Programs = append(m.Programs, Program{Name: "images", Ends: true, Args: []string{
			filepath.Join(p.Containerd, "ctr"), "--address", containerdSocket, "--namespace", "k8s.io", "images", "import", i}})
	}
	if !c.Bare {
		m.Programs = append(m.Programs, c.proxy(name))
	}
	m.Programs = append(m.Programs, Program{Name: "kubelet", Args: []string{p.Node, "kubelet", "--config", kubeletConfig,
		"--kubeconfig", kubeletKubeconfig, "--node-ip", at.String(), "--hostname-override", name, "--root-dir",
		"/var/lib/kubelet"}})
	return m, nil
}

// proxy returns what serves Services on a Node.
func (c *Cluster) proxy(name string) Program {
	if c.KubeProxy {
		return Program{Name: "kube-proxy", Args: []string{c.Programs.KubeProxy, "--kubeconfig", agentKubeconfig,
			"--hostname-override", name, "--proxy-mode", "iptables", "--cluster-cidr", pods[0].String(),
			"--conntrack-max-per-core", "0"}} // the kernel's limit stays
	}
	args := []string{c.Programs.Agent, "run", "--kubeconfig", agentKubeconfig, "--node", name, "--policy-mode", "Enforce"}
	if c.Bridge {
		args = append(args, "--cluster-cidr", pods[0].String())
	} else {
		args = append(args, "--network-mode", "Own")
	}
	return Program{Name: "fairlead", Args: append(args, c.Agent...)}
}

// plugins returns the folder of CNI plugins.
func (c *Cluster) plugins() string {
	if c.Bridge {
		return c.Programs.Bridge
	}
	return pluginFolder
}

// bridgeRange returns the addresses of the pods of the Node of index i, from 0, with Options.Bridge.
func bridgeRange(i int) netip.Prefix {
	at := pods[0].Addr().As4()
	at[2] = byte(i + 1)
	return netip.PrefixFrom(netip.AddrFrom4(at), 24)
}

// connect writes the routes to pods of other nodes, with Options.Bridge.
func (c *Cluster) connect() error {
	hosts := []*sandbox.Host{c.box.External()}
	for i := range c.Nodes {
		h, err := c.box.Node(nodeName(i))
		if err != nil {
			return err
		}
		hosts = append(hosts, h)
	}
	for i, to := range hosts[1:] {
		for _, h := range hosts {
			if h != to {
				if err := h.Route(bridgeRange(i), to.Addresses[0]); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// bridgeText is the configuration of the CNI plugins bridge and host-local, with a range.
const bridgeText = `{"cniVersion": "1.0.0", "name": "bridge", "plugins": [{"type": "bridge", "bridge": "cni0",
  "isGateway": true, "hairpinMode": true, "ipam": {"type": "host-local", "dataDir": "/run/host-local",
  "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
`

// kubeletText is a KubeletConfiguration for a machine without privileges over its processors and memory.
const kubeletText = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://` + containerdSocket + `
authentication: {x509: {clientCAFile: ` + authority + `}, webhook: {enabled: false}, anonymous: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
evictionHard: {memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%"}
imageGCHighThresholdPercent: 100
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
resolvConf: ` + resolvConf + `
oomScoreAdj: 0
nodeStatusUpdateFrequency: 2s
nodeStatusReportFrequency: 10s
maxPods: 250
`

// containerdText is containerd's configuration: its socket, the pause image and runc.
const containerdText = `version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = %q
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = %q
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = [%q]
    conf_dir = "/etc/cni/net.d"
    use_internal_loopback = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = %q
      SystemdCgroup = false
`
