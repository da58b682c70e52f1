package test_test

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// recording is fairlead flows record on a node of a box.
type recording struct {
	*exec.Cmd
	file string
}

// recordFlows begins to record on each node.
func recordFlows(t *testing.T, name, dir string, flags ...string) (all []*recording) {
	t.Helper()
	files := t.TempDir()
	for _, node := range []string{"a", "b", "c"} {
		file := filepath.Join(files, node+".flows")
		args := onNode(name, node, dir, append([]string{"flows", "record", "--for", "10m", "--out", file}, flags...)...)
		r := &recording{exec.Command(args[0], args[1:]...), file}
		r.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		pipe, err := r.StderrPipe()
		if err == nil {
			err = r.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { syscall.Kill(-r.Process.Pid, syscall.SIGKILL) })
		line, err := bufio.NewReader(pipe).ReadString('\n')
		if err != nil || !strings.HasPrefix(line, "recording on node "+node) {
			t.Fatalf("record on %s: %v %s", node, err, line)
		}
		all = append(all, r)
	}
	return all
}

// end ends a recording and returns its file.
func (r *recording) end(t *testing.T) string {
	t.Helper()
	syscall.Kill(-r.Process.Pid, syscall.SIGINT)
	if err := r.Wait(); err != nil {
		t.Fatalf("record: %v", err)
	}
	return r.file
}

// Policies that are suggested from recorded traffic let the same traffic pass, and no other.
func TestPoliciesFromRecordedFlows(t *testing.T) {
	for _, mode := range []string{"nftables", "ebpf"} {
		t.Run(mode, func(t *testing.T) { policiesFromFlows(t, mode, false) })
	}
	t.Run("engine-ebpf", func(t *testing.T) { policiesFromFlows(t, "ebpf", true) })
}

// audited has policy engines at work without denying anything.
const audited = `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {namespace: shop, name: audited, annotations: {fairlead.dev/audit: "true"}}
spec: {podSelector: {}, policyTypes: [Ingress, Egress]}
`

// policiesFromFlows records from connection tracking, or with engine from the policy engine ebpf alone.
func policiesFromFlows(t *testing.T, mode string, engine bool) {
	var network []string
	if mode == "ebpf" { // masquerade in the agents' own network needs connection tracking
		network = []string{"--network", "wires"}
	}
	options := []string{"--mode", mode}
	if engine {
		options = append(options, "--policy-engine", "ebpf")
	}
	dir := shop(t)
	policies := filepath.Join(dir, "policies.yaml")
	if err := os.Remove(policies); err != nil {
		t.Fatal(err)
	}
	if engine {
		if err := os.WriteFile(policies, []byte(audited), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	name := boxIn(t, dir, network, options...)
	var flags []string
	if mode == "ebpf" && !engine {
		eventually(t, "no rule needs connection tracking", func() bool {
			out, _ := try(onNode(name, "a", dir, "flows", "record", "--for", "1ms", "--out", filepath.Join(t.TempDir(), "f"))...)
			return strings.Contains(out, "connection tracking is off")
		})
		flags = []string{"--track"}
	}
	rows := []struct{ from, to string }{
		{"shop/client", "shop/web:http"}, {"shop/client", "shop/cart:grpc"}, {"shop/client", "shop/dns:53/udp"},
		{"shop/web-1", database}, {"shop/web-3", database}, {"outside", "a:30080"}, {"shop/web-2", "shop/cart:grpc"},
	}
	recordings := recordFlows(t, name, dir, flags...)
	for _, c := range rows {
		// to each backend
		must(t, fairlead, "sandbox", "ask", "--name", name, "--count", "20", c.from, c.to)
	}
	args := []string{fairlead, "policy", "suggest", "--source", dir}
	var files []string
	for _, r := range recordings {
		files = append(files, r.end(t))
	}
	suggested := must(t, append(args, files...)...)
	if engine {
		tracked := must(t, fairlead, "sandbox", "exec", "--name", name, "a", "--", "cat",
			"/proc/sys/net/netfilter/nf_conntrack_count")
		if strings.TrimSpace(tracked) != "0" {
			t.Errorf("%s connections were tracked", strings.TrimSpace(tracked))
		}
	}
	if out := ruleset(t, name+"-node-a"); strings.Contains(out, "fairlead-record") {
		t.Errorf("the recording left its table behind: %s", out)
	}
	if err := os.WriteFile(policies, []byte(suggested), 0o644); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the suggested policies are in force", func() bool {
		return !connects(name, "shop/client", database) && !connects(name, "shop/cart-1", "shop/web:http")
	})
	for _, c := range rows {
		if _, err := try(fairlead, "sandbox", "ask", "--name", name, "--count", "20", c.from, c.to); err != nil {
			t.Errorf("%s to %s, which was recorded: %v\n%s", c.from, c.to, err, suggested)
		}
	}
	whatif := []string{fairlead, "policy", "whatif", "--source", dir, "--flows", strings.Join(files, ",")}
	exits(t, 0, []string{"0 would be cut"}, whatif...)
	without := strings.Replace(suggested, "port: 5432", "port: 5433", 1)
	file := filepath.Join(t.TempDir(), "changed.yaml")
	if err := os.WriteFile(file, []byte(without), 0o644); err != nil {
		t.Fatal(err)
	}
	exits(t, 1, []string{"shop/web  shop/db", "5432/tcp", "isolated by NetworkPolicy shop/suggested-db ingress"},
		append(whatif, file)...)
}
