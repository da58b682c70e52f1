package test_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
)

// dropIn is the file that kubeadm's users have, shortened, and ours beside it.
const dropIn = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
hostnameOverride: A
mode: %s
portRange: 1-2
conntrack: {tcpCloseWaitTimeout: 37m0s}
---
apiVersion: fairlead.dev/v1alpha1
kind: FairleadConfiguration
source: %s
`

// TestDropIn runs a node by kube-proxy's file: its pages are there, what is not honoured is named, settings are made,
// another mode is taken up without another process and leaves nothing of the one before, a wrong file changes nothing,
// and --cleanup leaves nothing.
func TestDropIn(t *testing.T) {
	ns := fmt.Sprintf("fltest-%x", time.Now().UnixNano()%(1<<28))
	must(t, "ip", "netns", "add", ns)
	defer try("ip", "netns", "del", ns)
	must(t, "ip", "-n", ns, "link", "set", "lo", "up")
	in := func(args ...string) []string { return append([]string{"ip", "netns", "exec", ns}, args...) }
	shop, err := filepath.Abs("../examples/shop")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config.conf")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	closeWait := in("cat", "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait")
	before := must(t, closeWait...)
	for what, text := range map[string]string{
		"without its source": fmt.Sprintf(dropIn, "nftables", shop+"/nowhere"),
		"without its kubeconfig": "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n" +
			"conntrack: {tcpCloseWaitTimeout: 37m0s}\nclientConnection: {kubeconfig: /nowhere}\n",
		"without its address": strings.Replace(fmt.Sprintf(dropIn, "nftables", shop), "portRange: 1-2",
			"bindAddressHardFail: true\nmetricsBindAddress: 192.0.2.1:10249", 1),
	} {
		write(text)
		if out, err := try(in(fairlead, "run", "--config", file)...); err == nil {
			t.Errorf("%s it starts: %s", what, out)
		}
		if now := must(t, closeWait...) + ruleset(t, ns); now != before {
			t.Errorf("%s it changed the node: %s", what, now)
		}
	}
	write(fmt.Sprintf(dropIn, "nftables", shop))
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	run := exec.Command(in()[0], in(fairlead, "run", "--config", file, "--proxy-mode", "ipvs")[1:]...)
	run.Stdout, run.Stderr = log, log
	run.Env = append(os.Environ(), "XTABLES_LOCKFILE="+filepath.Join(t.TempDir(), "lock"))
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	defer run.Process.Kill()
	says := func(text string) {
		t.Helper()
		eventually(t, "the log says "+text, func() bool {
			b, _ := os.ReadFile(log.Name())
			return bytes.Contains(b, []byte(text))
		})
	}
	says("msg=serving node=a mode=nftables")
	says("portRange")
	says("--proxy-mode is ignored")
	space, err := netns.Open(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer space.Close()
	web := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, address string) (c net.Conn, err error) {
			err = space.Do(func() error {
				c, err = net.Dial(network, address)
				return err
			})
			return c, err
		}}}
	page := func(url string) string {
		r, err := web.Get("http://127.0.0.1:" + url)
		if err != nil {
			return err.Error()
		}
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		return string(b)
	}
	eventually(t, "the node is healthy by the kernel's word",
		func() bool { return strings.Contains(page("10256/healthz"), `"IPv4"`) })
	contains(t, page("10249/proxyMode"), "nftables")
	contains(t, page("10249/configz"), `"tcpCloseWaitTimeout":"37m0s"`, `"kind":"FairleadConfiguration"`)
	contains(t, page("10249/metrics"), `kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1`,
		"kubeproxy_sync_proxy_rules_service_changes_total 6")
	contains(t, must(t, closeWait...), "2220")

	write(fmt.Sprintf(dropIn, "magic", shop))
	says("the last one stays in force")
	contains(t, page("10249/proxyMode"), "nftables")
	write(fmt.Sprintf(dropIn, "iptables", shop))
	says("msg=serving node=a mode=iptables")
	eventually(t, "what mode nftables had written is gone",
		func() bool { return !strings.Contains(ruleset(t, ns), "table inet fairlead") })
	contains(t, must(t, in("iptables-save", "-t", "nat")...), "10.96.0.10")
	run.Process.Signal(syscall.SIGTERM)
	if err := run.Wait(); err != nil {
		t.Errorf("ended by SIGTERM: %v", err)
	}
	must(t, in(fairlead, "run", "--cleanup")...)
	if out := must(t, in("iptables-save")...) + ruleset(t, ns); strings.Contains(strings.ToLower(out), "fairlead") {
		t.Errorf("after --cleanup there is:\n%s", out)
	}
}

// TestWritesItsConfiguration: what the flags come to, as a file that says the same.
func TestWritesItsConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "written.yaml")
	must(t, fairlead, "run", "--write-config-to", file, "--proxy-mode", "ipvs", "--cluster-cidr", "10.1.0.0/16")
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	contains(t, string(b), "mode: ipvs", "clusterCIDR: 10.1.0.0/16", "kind: FairleadConfiguration", "maxPerCore: 32768")
}

// TestVersionAsKubeProxyHasIt: a script that asks kube-proxy for its version asks Fairlead in the same way.
func TestVersionAsKubeProxyHasIt(t *testing.T) {
	contains(t, must(t, fairlead, "run", "--version"), "in place of kube-proxy v1.37.")
	contains(t, must(t, fairlead, "run", "--version=raw"), `version.Info{Major:"1", Minor:"37"`, `GoVersion:"go1.`)
	if out, err := try(fairlead, "run", "--version=v1.36.0"); err == nil || !strings.Contains(out, "true, false or raw") {
		t.Errorf("another version: %v, %s", err, out)
	}
}
