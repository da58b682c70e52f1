package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/sandbox"
)

// A node is migrated from a real kube-proxy in mode iptables as docs/how-to/migrate-from-kube-proxy.md says, with the
// tools of the image alone: of connections from a pod, the host network and outside none fails, new ones or open ones,
// and kube-proxy's chains are gone.
func TestDeployMigration(t *testing.T) {
	t.Run("legacy", func(t *testing.T) { testMigration(t, kubeproxy.Legacy, "nftables") })
	t.Run("nft", func(t *testing.T) { testMigration(t, kubeproxy.Nft, "ebpf") })
}

func testMigration(t *testing.T, variant kubeproxy.Variant, mode string) {
	h, err := box.Node("a")
	check(t, err)
	client, err := box.Pod("default", "client")
	check(t, err)
	to := service(t, "web", web1, web2)
	external := nodePort(t, "web", to.Port())
	proxy := startKubeProxy(t, h, variant)
	clients := []struct {
		name string
		from *sandbox.Host
		to   netip.AddrPort
	}{{"pod", client, to}, {"host network", h, to}, {"outside", box.External(), external}}
	open := newFlows()
	var flows []*traffic
	begin := func() {
		for _, c := range clients {
			open.begin(t, c.from, c.to)
		}
	}
	begin()
	for _, c := range clients {
		flows = append(flows, flowOf(func() error {
			_, err := requestFrom(c.from, c.to)
			return err
		}))
	}

	r := install(t, "mode="+mode, "migrateFromKubeProxy=Remove", "kubeProxy.clusterCIDR=10.128.0.0/9")
	settings := r.start(t, r.pod.InitContainers[0])
	check(t, settings.cmd.Wait())
	settings.alive = false
	a := r.start(t, r.pod.Containers[0])
	moves := release{pod: r.moves, files: r.files, secret: r.secret}.start(t, r.moves.InitContainers[0])
	begin()
	if left := kubeProxyChains(t, h); len(left) == 0 {
		t.Error("no chains of kube-proxy while it runs")
	}
	check(t, proxy.Stop())
	a.serving(t)
	begin()
	until(t, "kube-proxy's chains are gone", func() error {
		if left := kubeProxyChains(t, h); len(left) > 0 {
			return fmt.Errorf("%d are left: %v: %s", len(left), left, moves.log)
		}
		return nil
	})
	begin()
	plane.must(t, "PATCH", sliceList+"/web", patch(web2), nil)
	reaches(t, to, "web-2")
	for i, f := range flows {
		t.Logf("from %s:", clients[i].name)
		f.end(t)
	}
	open.end(t)
}

// startKubeProxy starts a kube-proxy on a node, and waits until its rules are there.
func startKubeProxy(t testing.TB, h *sandbox.Host, variant kubeproxy.Variant) *kubeproxy.Proxy {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	kubeconfig, err := plane.Kubeconfig("kube-proxy", first, "system:masters")
	check(t, err)
	ns, err := netns.Open(h.Namespace)
	check(t, err)
	t.Cleanup(func() { ns.Close() })
	proxy, err := kubeproxy.Start(ctx, kubeproxy.Options{Binary: built(t, "KUBE_PROXY"), Mode: kubeproxy.IPTables,
		Variant:   variant,
		Namespace: ns, Kubeconfig: kubeconfig, Node: "a", Dir: filepath.Join(t.TempDir(), "kube-proxy")})
	check(t, err)
	t.Cleanup(func() {
		check(t, proxy.Stop(), kubeproxy.Clean(context.Background(), proxy.Options))
	})
	_, err = proxy.Ready(ctx)
	check(t, err)
	return proxy
}

// kubeProxyChains returns the chains of kube-proxy on a node, of both families and both variants of iptables.
// KUBE-FIREWALL is the kubelet's too, and kube-proxy's own clean-up leaves it.
func kubeProxyChains(t testing.TB, h *sandbox.Host) (chains []string) {
	t.Helper()
	for _, variant := range []string{"legacy", "nft"} {
		for _, save := range []string{"iptables-save", "ip6tables-save"} {
			var out safe
			cmd := exec.Command("xtables-"+variant+"-multi", save)
			cmd.Stdout = &out
			check(t, h.Do(cmd.Start), cmd.Wait())
			lines := slices.Collect(strings.Lines(out.String()))
			chains = append(chains, slices.DeleteFunc(lines, func(l string) bool {
				return !strings.HasPrefix(l, ":KUBE-") || strings.HasPrefix(l, ":KUBE-FIREWALL ")
			})...)
		}
	}
	return chains
}
