package node

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/sysctl"
)

// LogConcerns logs which settings of the calling thread's network namespace keep Services from working as expected, as
// kube-proxy does at its start. Nothing is changed. tracked says that the data plane translates by connection tracking.
func LogConcerns(log *slog.Logger, tracked bool) {
	if why := withoutIPv6(); why != "" {
		log.Info("IPv6 Services are not reachable on this node", "reason", why)
	}
	if v, _ := value("net/ipv4/ip_forward"); v == "0" {
		log.Warn("IPv4 forwarding is off: only the node's own processes reach Services", "sysctl",
			"net.ipv4.ip_forward", "value", v)
	}
	if !tracked {
		return
	}
	bridges, err := podBridges()
	if err != nil {
		log.Info("checking the pods' bridges failed", "error", err)
	}
	if len(bridges) == 0 {
		return
	}
	for _, name := range []string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
		v, err := value("net/bridge/" + name)
		if errors.Is(err, fs.ErrNotExist) {
			v = "missing: load the module br_netfilter"
		}
		if v != "1" {
			log.Warn("replies between pods of one bridge are not translated: a pod can't reach a Service whose endpoint "+
				"is on its own bridge", "bridges", strings.Join(bridges, ", "), "sysctl", "net.bridge."+name, "value", v)
		}
	}
}

// withoutIPv6 returns why the namespace has no IPv6, "" where it has.
func withoutIPv6() string {
	if _, err := os.Stat("/proc/thread-self/net/if_inet6"); errors.Is(err, fs.ErrNotExist) {
		return "the kernel has no IPv6"
	}
	if v, _ := value("net/ipv6/conf/all/disable_ipv6"); v == "1" {
		return "net.ipv6.conf.all.disable_ipv6 is 1"
	}
	return ""
}

// podBridges returns the bridges of the calling thread's namespace that pods are ports of.
func podBridges() ([]string, error) {
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	c, err := link.Dial(ns)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	defer c.Close()
	return c.PodBridges()
}

// value reads a sysctl.
func value(name string) (string, error) {
	s, err := sysctl.Open(name)
	if err != nil {
		return "", err
	}
	defer s.Close()
	return s.Get()
}
