package config

import (
	"slices"
	"strings"
)

// Groups are the titles below which help lists flags, in order. NoEffect is the last.
var Groups = []string{
	"Source of objects", "Data plane", "Mode ebpf", "Pods and node ports", "Servers", "Logging", "Node settings",
	"kube-proxy's other flags", NoEffect,
}

// NoEffect is the group of flags that change nothing.
const NoEffect = "Accepted without effect"

// groupOf are groups by the flags, or what their names begin with, that they hold. The longest that fits counts.
var groupOf = map[string]string{
	"config": Groups[0], "source": Groups[0], "kubeconfig": Groups[0], "master": Groups[0], "node": Groups[0],
	"service-proxy-name": Groups[0], "kube-api-": Groups[0],
	"mode": Groups[1], "scheduler": Groups[1], "maglev-": Groups[1], "migrate-": Groups[1],
	"ebpf-": Groups[2], "direct-server-return": Groups[2],
	"cluster-cidr": Groups[3], "detect-local-mode": Groups[3], "pod-": Groups[3], "nodeport-addresses": Groups[3],
	"external-ips": Groups[3], "masquerade-all": Groups[3],
	"healthz-bind-address": Groups[4], "metrics-bind-address": Groups[4], "profiling": Groups[4],
	"bind-address-hard-fail": Groups[4],
	"v":                      Groups[5], "verbose": Groups[5], "vmodule": Groups[5], "log": Groups[5],
	"conntrack-": Groups[6], "oom-score-adj": Groups[6], "init-only": Groups[6],
}

// Group returns the group of a flag.
func Group(flag string) string {
	if i := slices.IndexFunc(rows, func(r Row) bool { return r.Flag == flag }); i >= 0 {
		f, known := fieldOf(rows[i].Field)
		if known && !f.Honoured || strings.HasPrefix(rows[i].Text, "Changes nothing") {
			return NoEffect
		}
	}
	longest, group := -1, Groups[len(Groups)-2]
	for begin, g := range groupOf {
		prefix := strings.HasSuffix(begin, "-") || begin == "log"
		if len(begin) > longest && (flag == begin || prefix && strings.HasPrefix(flag, begin)) {
			longest, group = len(begin), g
		}
	}
	return group
}
