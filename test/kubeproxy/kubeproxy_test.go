package kubeproxy

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// modes are those in which kube-proxy can tell this kernel.
var modes = []struct {
	name    string
	mode    kubeproxy.Mode
	variant kubeproxy.Variant
}{
	{"nftables", kubeproxy.NFTables, kubeproxy.Found},
	{"iptables-legacy", kubeproxy.IPTables, kubeproxy.Legacy},
	{"iptables-nft", kubeproxy.IPTables, kubeproxy.Nft},
}

// TestModes has a kube-proxy of every way start, follow changes, lose its server, stop and clean up.
func TestModes(t *testing.T) {
	for _, w := range modes {
		t.Run(w.name, func(t *testing.T) {
			ns := space(t)
			p := probe(t, ns)
			ctx := patience(t, 2*time.Minute)
			o := options(t, ns, w.mode, w.variant)
			n, cold, err := kubeproxy.NewNode(ctx, o, append(generate.Cluster(20, 10), p.Objects()...)...)
			check(t, err)
			stop := sync.OnceFunc(func() { check(t, n.Close()) })
			defer stop()
			if cold.Wall <= 0 || cold.Sync <= 0 || cold.Sync > cold.Wall || cold.CPU() <= 0 || cold.Resident < 10<<20 ||
				cold.Peak < cold.Resident {
				t.Errorf("cold sync: %+v", cold)
			}
			check(t, p.Reach(ctx))
			for range 3 {
				latency, err := p.Move(ctx, n.Apply)
				check(t, err)
				t.Logf("moved in %v", latency)
			}
			if m, err := n.Synced(ctx, 4); err != nil || m.Programming.Count < 3 || m.Full.Count == 0 {
				t.Errorf("metrics after three changes: %+v, %v", m, err)
			}
			if n.API.Watchers() < 4 || n.API.Events() == 0 {
				t.Errorf("%d watches of the server, and %d Events", n.API.Watchers(), n.API.Events())
			}
			if !strings.Contains(rules(t, ns, w.variant), "large-00000/svc-000007") {
				t.Error("a generated Service is in no rule")
			}
			stop()
			complaints(t, o)
			check(t, kubeproxy.Clean(ctx, o))
			if left := rules(t, ns, w.variant); strings.Contains(left, "large-") {
				t.Errorf("after the clean-up there is:\n%s", left)
			}
		})
	}
}

// complaints fails for what a kube-proxy's log says of its server: lines of the files of client-go that speak with one.
func complaints(t *testing.T, o kubeproxy.Options) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(o.Dir, "log"))
	check(t, err)
	for line := range strings.Lines(string(b)) {
		for _, file := range []string{"reflector.go", "streamwatcher.go", "request.go", "event_broadcaster.go"} {
			if strings.Contains(line, file) {
				t.Errorf("it says: %s", line)
			}
		}
	}
}

// TestServerGoesAndComesBack: a client that was cut off goes on where it was; one that finds another server, of younger
// versions than it knows, begins anew.
func TestServerGoesAndComesBack(t *testing.T) {
	ns := space(t)
	p := probe(t, ns)
	first := apiserver.New(append(generate.Cluster(20, 10), p.Objects()...)...)
	address, stop := serveAt(t, ns, first, "127.0.0.1:0")
	ctx := patience(t, 3*time.Minute)
	o := options(t, ns, kubeproxy.NFTables, kubeproxy.Found)
	o.Server = "http://" + address
	proxy, _, err := kubeproxy.ColdSync(ctx, o)
	check(t, err)
	defer func() { check(t, proxy.Stop()) }()
	for _, again := range []func(source.Object) *apiserver.Server{
		func(s source.Object) *apiserver.Server {
			first.Apply(source.Change{Key: source.KeyOf(s), Object: s})
			return first
		},
		func(s source.Object) *apiserver.Server {
			return apiserver.New(append(generate.Cluster(2, 10), p.Service(), s)...)
		},
	} {
		latency, err := p.Move(ctx, func(s source.Object) error {
			stop()
			_, stop = serveAt(t, ns, again(s), address)
			return nil
		})
		check(t, err)
		t.Logf("found the server again, and moved, in %v", latency)
	}
	stop()
}

// rules lists what the kernel has been told in a namespace.
func rules(t *testing.T, ns *netns.Namespace, variant kubeproxy.Variant) string {
	t.Helper()
	cmd := exec.Command("nft", "list", "ruleset")
	if variant != kubeproxy.Found {
		cmd = exec.Command("xtables-"+string(variant)+"-multi", "iptables-save")
	}
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	check(t, ns.Do(cmd.Start))
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %v: %s", cmd, err, out.String())
	}
	return out.String()
}
