package test_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
)

const familiesYAML = `
apiVersion: v1
kind: Node
metadata: {name: a}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIPs: [10.96.0.10, "fd00:96::10"], ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-4, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.0.0.1]}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-6, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv6
ports: [{port: 8080}]
endpoints: [{addresses: ["fd00::1"]}]
`

// A node without the tools of one family serves the other, and names what is missing as a problem of the Services of
// the family that it doesn't serve.
func TestToolsOfOneFamily(t *testing.T) {
	entries := map[string]string{"iptables": "10.96.0.10:80", "ip6tables": "[fd00:96::10]:80"}
	for _, c := range []struct{ mode, variant, missing string }{
		{"iptables", "nft", "ip6tables"}, {"iptables", "nft", "iptables"}, {"iptables-legacy", "legacy", "ip6tables"},
	} {
		t.Run(c.mode+" without "+c.missing, func(t *testing.T) {
			ns := familyNode(t)
			path := t.TempDir()
			for tool := range entries {
				for _, verb := range []string{"save", "restore"} {
					name := fmt.Sprintf("%s-%s-%s", tool, c.variant, verb)
					at, err := exec.LookPath(name)
					if tool != c.missing {
						err = errors.Join(err, os.Symlink(at, filepath.Join(path, name)))
					}
					if err != nil {
						t.Fatal(err)
					}
				}
			}
			file := filepath.Join(t.TempDir(), "objects.yaml")
			if err := os.WriteFile(file, []byte(familiesYAML), 0o644); err != nil {
				t.Fatal(err)
			}
			log := &text{}
			run := exec.Command(fairlead, "run", "--source", file, "--node", "a", "--mode", c.mode, "--healthz-bind-address=")
			run.Env = []string{"PATH=" + path, "XTABLES_LOCKFILE=" + filepath.Join(path, "lock")}
			run.Stdout, run.Stderr = log, log
			if err := ns.Do(run.Start); err != nil {
				t.Fatal(err)
			}
			defer func() { run.Process.Kill(); run.Wait() }()
			eventually(t, "it serves", func() bool { return pageIn(ns, "/readyz") == "ok\n" })
			for tool, entry := range entries {
				if err := dialIn(ns, entry); (err == nil) != (tool != c.missing) {
					t.Errorf("%s: %v", entry, err)
				}
			}
			contains(t, pageIn(ns, "/status"), `"default"`, c.missing+" is not installed")
			if !log.has(c.missing + " is not installed") {
				t.Errorf("the log doesn't say what is missing: %s", &log.b)
			}
		})
	}
}

// familyNode returns a network namespace with a server at port 8080 of an address of each family, and routes to
// Services.
func familyNode(t *testing.T) *netns.Namespace {
	t.Helper()
	name := fmt.Sprintf("fltest-agt-%x", time.Now().UnixNano()%(1<<28))
	must(t, "ip", "netns", "add", name)
	t.Cleanup(func() { try("ip", "netns", "del", name) })
	for _, args := range []string{"link set lo up", "address add 10.0.0.1/32 dev lo",
		"address add fd00::1/128 dev lo nodad",
		"route add 10.96.0.0/12 dev lo", "route add fd00:96::/112 dev lo"} {
		must(t, append([]string{"ip", "-n", name}, strings.Fields(args)...)...)
	}
	ns, err := netns.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	for _, at := range []string{"10.0.0.1:8080", "[fd00::1]:8080"} {
		var l net.Listener
		if err := ns.Do(func() (err error) { l, err = net.Listen("tcp", at); return err }); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
	}
	return ns
}

// dialIn connects from a network namespace.
func dialIn(ns *netns.Namespace, to string) error {
	return ns.Do(func() error {
		c, err := net.DialTimeout("tcp", to, 3*time.Second)
		if err == nil {
			c.Close()
		}
		return err
	})
}

// pageIn returns a page of the agent in a network namespace, "" while there is none.
func pageIn(ns *netns.Namespace, path string) string {
	dial := func(_ context.Context, network, address string) (c net.Conn, err error) {
		err = ns.Do(func() (err error) { c, err = net.Dial(network, address); return err })
		return c, err
	}
	web := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}
	r, err := web.Get("http://127.0.0.1:10249" + path)
	if err != nil {
		return ""
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body)
	return string(b)
}
