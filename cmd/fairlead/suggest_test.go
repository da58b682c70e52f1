package main

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/model"
)

// shopEnds are ends of flows in examples/shop, by name.
var shopEnds = map[string]string{"shop/client": "10.128.2.99", "shop/web-1": "10.128.1.10", "shop/web-2": "10.128.2.10",
	"shop/db-0": "10.128.1.12", "shop/dns-1": "10.128.1.53", "node b": "172.18.0.12", "outside": "198.51.100.7",
	"shop/web-gone": "10.128.3.77"}

// shopFlows writes what nodes a and b record while the client uses the web pods, and these the database.
func shopFlows(t *testing.T) (files []string) {
	dir := t.TempDir()
	at := time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)
	for _, node := range []string{"a", "b"} {
		f := &flowlog.File{Header: flowlog.Header{Node: node, Start: at, End: at.Add(time.Hour)},
			Pods: map[string]flowlog.Pod{}}
		end := func(name, node string) flowlog.End {
			e := flowlog.End{Addr: netip.MustParseAddr(shopEnds[name])}
			if _, pod, is := strings.Cut(name, "/"); is {
				app, _, _ := strings.Cut(pod, "-")
				f.Pods[name] = flowlog.Pod{Name: name, Node: node, Labels: map[string]string{"app": app,
					"pod-template-hash": pod}}
				e.Pod = name
			}
			return e
		}
		for _, c := range []struct {
			from, on, to, at string
			protocol         model.Protocol
			port             uint16
			count            uint64
		}{
			{"shop/client", "b", "shop/web-1", "a", model.TCP, 8080, 40},
			{"shop/client", "b", "shop/web-2", "b", model.TCP, 8080, 30},
			{"shop/client", "b", "shop/dns-1", "a", model.UDP, 53, 12},
			{"shop/web-1", "a", "shop/db-0", "a", model.TCP, 5432, 7},
			{"shop/web-2", "b", "shop/db-0", "a", model.TCP, 5432, 5},
			{"shop/web-gone", "b", "outside", "", model.TCP, 443, 2},
			{"outside", "", "shop/web-2", "b", model.TCP, 8080, 3},
			{"node b", "", "shop/web-1", "a", model.TCP, 8080, 4},
			{"shop/client", "b", "shop/db-0", "", model.TCP, 5432, 9}, // which node a does not accept
			{"shop/client", "b", "shop/web-2", "b", 1, 0, 1},
		} {
			if c.on == node || c.at == node {
				server := c.at
				if c.to == "shop/db-0" {
					server = "a"
				}
				f.Flows = append(f.Flows, flowlog.Flow{Client: end(c.from, c.on), Server: end(c.to, server),
					Protocol: c.protocol, Port: c.port, Count: c.count})
			}
		}
		var b bytes.Buffer
		if err := f.Write(&b); err != nil {
			t.Fatal(err)
		}
		files = append(files, filepath.Join(dir, node+".flows"))
		if err := os.WriteFile(files[len(files)-1], b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// What is suggested is what docs/how-to/suggest-policies.md shows, denies none of the flows and allows nothing else.
func TestPolicySuggest(t *testing.T) {
	files, dir := shopFlows(t), shop(t, "")
	suggested, code := command(t, append([]string{"policy", "suggest", "--source", dir}, files...)...)
	if code != 0 {
		t.Fatalf("exit status %d: %s", code, suggested)
	}
	doc, err := os.ReadFile("../../docs/how-to/suggest-policies.md")
	if err != nil {
		t.Fatal(err)
	}
	i := strings.Index(suggested, "---\n")
	if sample := suggested[:i] + "---\n" + strings.Split(suggested, "---\n")[4]; !strings.Contains(string(doc), sample) {
		t.Errorf("docs/how-to/suggest-policies.md lacks this sample:\n%s", sample)
	}
	applied := write(t, t.TempDir(), "suggested", suggested)
	whatif := []string{"policy", "whatif", applied, "--source", dir, "--flows", strings.Join(files, ",")}
	got, code := command(t, whatif...)
	if want := "shop/client  shop/web  protocol 1"; code != 1 || !strings.Contains(got, want) ||
		!strings.Contains(got, "1 would be cut") {
		t.Errorf("exit status %d, want only %q cut: %s\n%s", code, want, got, suggested)
	}
	whole := shop(t, suggested)
	dns, err := os.ReadFile("../../examples/shop/dns.yaml")
	if err != nil {
		t.Fatal(err)
	}
	write(t, whole, "dns", string(dns))
	expectations := write(t, t.TempDir(), "expectations", `
apiVersion: fairlead.dev/v1alpha1
kind: PolicyExpectations
expectations:
- {from: shop/client, to: shop/web, port: http, expect: allowed, by: shop/suggested-web}
- {from: shop/app=web, to: shop/db, port: sql, expect: allowed, by: shop/suggested-db}
- {from: [shop/app=web, shop/app=db], to: shop/dns, port: [dns, dns-tcp], expect: allowed}
- {from: "198.51.100.7", to: shop/app=web, port: 8080, expect: allowed}
- {from: [shop/client, shop/app=cart, outside], to: shop/db, port: sql, expect: denied}
- {from: shop/app=web, to: shop/cart, port: grpc, expect: denied}
- {from: shop/app=db, to: outside, port: "*", expect: denied}
`)
	if got, code := command(t, "policy", "check", expectations, "--source", whole); code != 0 {
		t.Errorf("exit status %d: %s\n%s", code, got, suggested)
	}
}

// A policy that lacks one rule cuts that flow alone, by the rule's absence.
func TestPolicyWhatif(t *testing.T) {
	files, dir := shopFlows(t), shop(t, "")
	suggested, _ := command(t, append([]string{"policy", "suggest", "--source", dir}, files...)...)
	db := strings.Index(suggested, `  name: "suggested-db"`)
	at := db + strings.Index(suggested[db:], "  ingress:")
	end := at + strings.Index(suggested[at:], "  egress:")
	changed := write(t, t.TempDir(), "changed", suggested[:at]+suggested[end:])
	got, code := command(t, "policy", "whatif", changed, "--source", shop(t, shopPolicies), "--only", "--flows",
		strings.Join(files, ","), "-o", "yaml")
	for _, want := range []string{"flowsCut: 3", "from: shop/web", "to: shop/db", "connections: 12",
		"NetworkPolicy shop/suggested-db ingress"} {
		if code != 1 || !strings.Contains(got, want) || strings.Count(got, "to: shop/db") != 1 {
			t.Errorf("exit status %d, want 1 and %q: %s", code, want, got)
		}
	}
	if got, code := command(t, "policy", "whatif", "--source", dir, "--flows", files[0]); code != 0 {
		t.Errorf("no policies: exit status %d: %s", code, got)
	}
	for _, args := range [][]string{{"whatif", "--source", dir}, {"whatif", "--source", dir, "--flows", dir},
		{"suggest", "--source", dir, applied(t)}} {
		if got, code := command(t, append([]string{"policy"}, args...)...); code == 0 {
			t.Errorf("%q: exit status 0: %s", args, got)
		}
	}
}

// applied is a file that is no recording.
func applied(t *testing.T) string { return write(t, t.TempDir(), "no", shopPolicies) }
