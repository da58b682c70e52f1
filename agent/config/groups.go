package config

import (
	"slices"
	"strings"
)

// The titles below which help lists flags.
const (
	plane    = "Data plane"
	modeEBPF = "Mode ebpf"
	pods     = "Pods and node ports"
	podNet   = "Pod network"
	policies = "Network policies"
	servers  = "Servers"
	logs     = "Logging"
	settings = "Node settings"
	others   = "kube-proxy's other flags"
	// Sources is the group of flags that say where objects come from, and for which node.
	Sources = "Source of objects"
	// NoEffect is the group of flags without effect.
	NoEffect = "Accepted without effect"
)

// Groups are the titles in the order of help.
var Groups = []string{Sources, plane, modeEBPF, pods, podNet, policies, servers, logs, settings, others, NoEffect}

// groupOf are groups by the flags, or what their names begin with, that they hold. The longest that fits counts.
var groupOf = map[string]string{
	"config": Sources, "source": Sources, "kubeconfig": Sources, "master": Sources, "node": Sources,
	"service-proxy-name": Sources, "kube-api-": Sources,
	"mode": plane, "scheduler": plane, "maglev-": plane, "migrate-": plane,
	"ebpf-": modeEBPF, "direct-server-return": modeEBPF,
	"cluster-cidr": pods, "detect-local-mode": pods, "pod-": pods, "nodeport-addresses": pods, "external-ips": pods,
	"masquerade-all": pods,
	"policy-":        policies, "network-": podNet,
	"healthz-bind-address": servers, "metrics-bind-address": servers, "profiling": servers,
	"bind-address-hard-fail": servers,
	"v":                      logs, "verbose": logs, "vmodule": logs, "log": logs,
	"conntrack-": settings, "oom-score-adj": settings, "init-only": settings,
}

// Group returns the group of a flag.
func Group(flag string) string {
	if i := slices.IndexFunc(rows, func(r Row) bool { return r.Flag == flag }); i >= 0 {
		f, known := fieldOf(rows[i].Field)
		if known && !f.Honoured || rows[i].Text == "Has no effect." {
			return NoEffect
		}
	}
	longest, group := -1, others
	for begin, g := range groupOf {
		prefix := strings.HasSuffix(begin, "-") || begin == "log"
		if len(begin) > longest && (flag == begin || prefix && strings.HasPrefix(flag, begin)) {
			longest, group = len(begin), g
		}
	}
	return group
}
