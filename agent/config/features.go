package config

import resolve "fairlead.dev/fairlead/resolve/service"

// Feature is a feature gate that kube-proxy 1.37 reads, and what it comes to here.
type Feature struct {
	Name    string
	Stage   string // in Kubernetes 1.37: ALPHA, BETA, DEPRECATED, or "" for GA
	Enabled bool   // what the gate enables is served, whatever featureGates says
}

// Features returns the gates that kube-proxy 1.37 reads on Linux.
func (c *Config) Features() []Feature {
	return []Feature{
		{"AllowServiceExternalIPs", "", c.Own.ExternalIPs != resolve.RefuseExternalIPs},
		{"ComponentFlagz", "BETA", true},
		{"ComponentStatusz", "BETA", true},
		{"KubeProxyIPVS", "DEPRECATED", true},
		{"KubeProxyNFTablesLocalhostNodePorts", "ALPHA", false}, // IPv4 is served without it, ::1 is not
		{"MultiCIDRServiceAllocator", "", false},                // ServiceCIDRs are not watched
		{"NFTablesNetlink", "BETA", true},
		{"NativeHistograms", "BETA", true},
		{"PreferSameTrafficDistribution", "", true},
	}
}
