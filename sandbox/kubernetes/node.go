package kubernetes

import (
	"fmt"
	"net/netip"
	"path/filepath"

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
	resolvConf        = "/etc/kubernetes/resolv.conf"
)

// machine returns the machine of a Node.
func (c *Cluster) machine(name string, at netip.Addr, images []string) (Machine, error) {
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
			{containerdConfig, fmt.Sprintf(containerdText, containerdSocket, PauseImage, p.Runc), 0o644},
			{resolvConf, "", 0o644},
		},
	}
	m.Programs = []Program{
		{Name: "plugin", Ends: true, Args: []string{p.Plugin, "install", pluginFolder}},
		{Name: "containerd", Socket: containerdSocket,
			Args: []string{filepath.Join(p.Containerd, "containerd"), "--config", containerdConfig}},
	}
	for _, i := range images {
		m.Programs = append(m.Programs, Program{Name: "images", Ends: true, Args: []string{
			filepath.Join(p.Containerd, "ctr"), "--address", containerdSocket, "--namespace", "k8s.io", "images", "import", i}})
	}
	m.Programs = append(m.Programs,
		Program{Name: "fairlead", Args: append([]string{p.Agent, "run", "--kubeconfig", agentKubeconfig, "--node", name,
			"--network-mode", "Own", "--policy-mode", "Enforce"}, c.Agent...)},
		Program{Name: "kubelet", Args: []string{p.Node, "kubelet", "--config", kubeletConfig, "--kubeconfig",
			kubeletKubeconfig, "--node-ip", at.String(), "--hostname-override", name, "--root-dir", "/var/lib/kubelet"}})
	return m, nil
}

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
    bin_dirs = ["` + pluginFolder + `"]
    conf_dir = "/etc/cni/net.d"
    use_internal_loopback = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = %q
      SystemdCgroup = false
`
