// Package test_test tries the shipped binary as its users do: from outside, with manifests in and packets, tables and
// exit codes out.
package test_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// fairlead is the binary under test.
var fairlead string

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "test: network namespaces need root: run as root (sudo make test)")
		os.Exit(1)
	}
	dir, err := os.MkdirTemp("", "fairlead-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fairlead = filepath.Join(dir, "fairlead")
	code := 1
	if out, err := exec.Command("go", "build", "-o", fairlead, "../cmd/fairlead").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
	} else {
		os.Chmod(dir, 0o755)
		code = m.Run()
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

// try runs a command and returns its output and whether it succeeded.
func try(args ...string) (string, error) {
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	return string(out), err
}

// must runs a command that must succeed.
func must(t testing.TB, args ...string) string {
	t.Helper()
	out, err := try(args...)
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// exits runs a command that must end with an exit status and print texts.
func exits(t *testing.T, code int, texts []string, args ...string) {
	t.Helper()
	out, err := try(args...)
	got := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exit.ExitCode()
	}
	if got != code {
		t.Errorf("%s: exit status %d, want %d: %v", strings.Join(args, " "), got, code, err)
	}
	contains(t, out, texts...)
}

// contains complains about each text that out lacks.
func contains(t *testing.T, out string, texts ...string) {
	t.Helper()
	for _, s := range texts {
		if !strings.Contains(out, s) {
			t.Errorf("%q is missing in:\n%s", s, out)
		}
	}
}

// eventually tries until ok holds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	within(t, 20*time.Second, what, ok)
}

// within waits as long for ok.
func within(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it never came to be that %s", what)
		}
	}
}

// box brings a sandbox up from a copy of the shop, whose agents get flags, and returns its name and the copy's folder.
func box(t *testing.T, flags ...string) (name, dir string) {
	t.Helper()
	return boxOf(t, nil, flags...)
}

// boxOf is box with flags of the sandbox, too.
func boxOf(t *testing.T, own []string, flags ...string) (name, dir string) {
	t.Helper()
	dir = shop(t)
	return boxIn(t, dir, own, flags...), dir
}

// shop returns a folder with a copy of the example's files.
func shop(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("../examples/shop")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// boxIn is boxOf of a folder's files.
func boxIn(t *testing.T, dir string, own []string, flags ...string) (name string) {
	t.Helper()
	name = fmt.Sprintf("t%x", time.Now().UnixNano()%(1<<28))
	t.Cleanup(func() {
		try(fairlead, "sandbox", "down", name)
		if out := must(t, "ls", "/run/netns"); strings.Contains(out, name+"-") {
			t.Errorf("namespaces are left behind:\n%s", out)
		}
	})
	must(t, slices.Concat([]string{fairlead, "sandbox", "up", dir, "--name", name}, own, []string{"--"}, flags)...)
	return name
}

// onNode runs a command of fairlead's inside a node of a box.
func onNode(name, node, dir string, args ...string) []string {
	return append([]string{fairlead, "sandbox", "exec", "--name", name, node, "--", filepath.Base(fairlead)},
		append(args, "--source", dir, "--node", node)...)
}

func TestSession(t *testing.T) {
	name, dir := box(t)
	contains(t, must(t, fairlead, "sandbox", "ls", name), "agent ready", "shop/web-1", "outside")
	contains(t, must(t, fairlead, "sandbox", "ask", "--name", name, "shop/client", "shop/web:80"), "shop/web-")
	contains(t, must(t, onNode(name, "a", dir, "show")...), "shop/web:http", "10.96.0.10:80/tcp", "in sync",
		"0 missing, 0 too many")
	contains(t, must(t, onNode(name, "a", dir, "plan")...), "put 0, replace 0, delete 0", "Nothing was changed")
	contains(t, must(t, onNode(name, "b", dir, "explain", "shop/client", "shop/web:http")...),
		": a pod of this node's network", "ClusterIP of Service shop/web:http", "one of 3 endpoints", "pod shop/web-1",
		"sees source 10.128.2.99", "kernel: Services in sync; policies in sync",
		"internalTrafficPolicy Cluster")
	contains(t, must(t, onNode(name, "a", dir, "explain", "shop/client", "shop/web:http")...), "runs on node b")

	t.Run("a saved file takes effect", func(t *testing.T) {
		file := filepath.Join(dir, "web.yaml")
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		plan := t.TempDir()
		os.CopyFS(plan, os.DirFS(dir))
		without := bytes.ReplaceAll(b, []byte("10.128.3.10"), []byte("10.128.3.77"))
		os.WriteFile(filepath.Join(plan, "web.yaml"), without, 0o644)
		exits(t, 1, []string{"endpoint4", "Nothing was changed"}, onNode(name, "a", plan, "plan")...)
		exits(t, 2, []string{"--oops"}, onNode(name, "a", plan, "plan", "--oops")...)
		os.WriteFile(file, without, 0o644)
		eventually(t, "the kernel has the new endpoint", func() bool {
			out, _ := try(onNode(name, "a", dir, "show", "-o", "wide")...)
			return strings.Contains(out, "10.128.3.77") && strings.Contains(out, "0 missing, 0 too many")
		})
		os.WriteFile(file, b, 0o644)
	})

	t.Run("a broken file changes nothing and is named", func(t *testing.T) {
		file := filepath.Join(dir, "cart.yaml")
		b, _ := os.ReadFile(file)
		os.WriteFile(file, append(b, []byte("\n---\napiVersion: v1\nkind: Service\nmetadata: {name: bad, namespace: "+
			"shop}\nspec: {ports: [{port: 70000}]}\n")...), 0o644)
		eventually(t, "the agent names the problem", func() bool {
			page := status(t, name, "a")
			return strings.Contains(page, "cart.yaml") && strings.Contains(page, "port")
		})
		contains(t, must(t, fairlead, "sandbox", "ask", "--name", name, "shop/client", "shop/cart:7000"), "shop/cart-")
		exits(t, 1, []string{"shop/web:http", "70000", "not every object could be read"}, onNode(name, "a", dir, "show")...)
		exits(t, 2, []string{"Nothing was changed", "not every object could be read"}, onNode(name, "a", dir, "plan")...)
		os.WriteFile(file, b, 0o644)
	})

	t.Run("for programs", func(t *testing.T) {
		var shown struct {
			FactsMissing int
			Frontends    []struct{ Service, Kernel string }
		}
		out := must(t, onNode(name, "a", dir, "show", "-o", "json")...)
		if err := json.Unmarshal([]byte(out), &shown); err != nil || len(shown.Frontends) == 0 {
			t.Errorf("show -o json: %v: %s", err, out)
		}
		contains(t, must(t, onNode(name, "a", dir, "explain", "outside", "a:30080", "-o", "yaml")...), "outcome: forward",
			"origin: external")
		if out, err := try(onNode(name, "a", dir, "show", "-o", "xml")...); err == nil ||
			!strings.Contains(out, "json, yaml or wide") {
			t.Errorf("-o xml: %v %s", err, out)
		}
	})
}

// ruleset is everything that a namespace's nf_tables hold, without counters of packets.
func ruleset(t *testing.T, namespace string) string {
	t.Helper()
	return must(t, "ip", "netns", "exec", namespace, "nft", "-s", "list", "ruleset")
}

func TestCleanPreservesForeignRules(t *testing.T) {
	ns := fmt.Sprintf("fltest-%x", time.Now().UnixNano()%(1<<28))
	must(t, "ip", "netns", "add", ns)
	defer try("ip", "netns", "del", ns)
	foreign := filepath.Join(t.TempDir(), "others.nft")
	os.WriteFile(foreign, []byte(`
table ip kube-proxy {
	map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; elements = { 10.96.0.10 . tcp . 80 : goto web } }
	chain web { };
	chain nat-prerouting { type nat hook prerouting priority dstnat; policy accept; ip daddr . meta l4proto . th dport vmap @service-ips; };
}
table inet firewalld { chain filter_INPUT { type filter hook input priority filter + 10; policy accept; ct state established accept; }; }
table ip nat { chain POSTROUTING { type nat hook postrouting priority srcnat; policy accept; ip saddr 172.17.0.0/16 masquerade; }; }
`), 0o644)
	must(t, "ip", "netns", "exec", ns, "nft", "-f", foreign)
	before := ruleset(t, ns)
	run := exec.Command("ip", "netns", "exec", ns, fairlead, "run", "--source", "../examples/shop", "--node", "a",
		"--nodeport-addresses", "all,localhost", "--policy-mode", "Enforce")
	var log bytes.Buffer
	run.Stdout, run.Stderr = &log, &log
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent is ready", func() bool {
		out, _ := try("ip", "netns", "exec", ns, "nft", "list", "map", "inet", "fairlead", "service4")
		return strings.Contains(out, "10.96.0.10")
	})
	eventually(t, "policies are enforced", func() bool { return strings.Contains(ruleset(t, ns), "fairlead-policy") })
	during := ruleset(t, ns)
	for _, table := range strings.SplitAfter(before, "\n}\n") {
		contains(t, during, strings.TrimSpace(table))
	}
	run.Process.Signal(syscall.SIGTERM)
	if err := run.Wait(); err != nil {
		t.Errorf("the agent ended with %v:\n%s", err, &log)
	}
	if ruleset(t, ns) == before {
		t.Error("ending the agent took its rules along: traffic would stop")
	}
	contains(t, must(t, "ip", "netns", "exec", ns, fairlead, "clean"), "nothing of Fairlead's is left")
	if after := ruleset(t, ns); after != before {
		t.Errorf("clean left another kernel:\n%s\nbefore:\n%s", after, before)
	}
	if out := must(t, "ip", "netns", "exec", ns, "cat", "/proc/sys/net/ipv4/conf/all/route_localnet"); out != "0\n" {
		t.Errorf("clean left route_localnet=%s", out)
	}
	must(t, "ip", "netns", "exec", ns, fairlead, "clean") // twice is no error
}

func TestErrorsNameTheRemedy(t *testing.T) {
	broken := filepath.Join(t.TempDir(), "none")
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"run"}, []string{"--source", "examples/shop"}},
		{[]string{"run", "--source", "../examples/shop"}, []string{"--node"}},
		{[]string{"show", "--source", broken, "--node", "a"}, []string{broken}},
		{[]string{"show", "--source", "../examples/shop", "--node", "zebra"}, []string{"zebra", "\"a\""}},
		{[]string{"show", "--source", "../examples/shop", "--node", "a", "--cluster-cidr", "10.0.0.0"},
			[]string{"10.0.0.0", "10.244.0.0/16"}},
		{[]string{"show", "--source", "../examples/shop", "--node", "a", "--nodeport-addresses", "primry"},
			[]string{"primry", "primary"}},
		{[]string{"explain", "--source", "../examples/shop", "--node", "a", "shop/client", "shop/web"}, []string{"port"}},
		{[]string{"explain", "--source", "../examples/shop", "--node", "a", "shop/nobody", "shop/web:80"},
			[]string{"shop/nobody"}},
		{[]string{"explain", "--source", "../examples/shop", "--node", "a", "shop/client", "shop/web:ftp"},
			[]string{"ftp", "http"}},
		{[]string{"snow"}, []string{"snow", "show"}},
		{[]string{"sandbox", "upp"}, []string{"upp", "did you mean up?"}},
		{[]string{"lab", "run", "tigra"}, []string{"tigra", "did you mean tigera?"}},
		{[]string{"lab", "run", "speed"}, []string{"speed", "services", "tigera"}},
		{[]string{"run", "--source", "../examples/shop", "--node", "a", "--mode", "ebfp"}, []string{"ebfp", "ebpf"}},
	} {
		out, err := try(append([]string{fairlead}, c.args...)...)
		if err == nil {
			t.Errorf("fairlead %s: no error: %s", strings.Join(c.args, " "), out)
		}
		contains(t, out, c.want...)
	}
}

func TestWithoutRoot(t *testing.T) {
	for _, args := range [][]string{
		{"clean"},
		{"run", "--source", "../examples/shop", "--node", "a", "--status-address", ""},
		{"show", "--source", "../examples/shop", "--node", "a"},
		{"sandbox", "up", "../examples/shop"},
		{"lab", "run", "services", "--quick"},
	} {
		c := exec.Command(fairlead, args...)
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		out, err := c.CombinedOutput()
		if err == nil {
			t.Errorf("fairlead %s as nobody: no error: %s", strings.Join(args, " "), out)
		}
		contains(t, string(out), "root")
	}
}

// agentIn returns the process id of the agent in a namespace, 0 if there is none now.
func agentIn(namespace string) int {
	pids, _ := try("ip", "netns", "pids", namespace)
	for _, f := range strings.Fields(pids) {
		if line, _ := os.ReadFile("/proc/" + f + "/cmdline"); strings.Contains(string(line), "\x00run\x00") {
			pid, _ := strconv.Atoi(f)
			return pid
		}
	}
	return 0
}

func TestKilledAgentLeavesTrafficAlone(t *testing.T) {
	for _, network := range []string{"wires", "own"} {
		t.Run(network, func(t *testing.T) { killedAgentLeavesTrafficAlone(t, network) })
	}
}

func killedAgentLeavesTrafficAlone(t *testing.T, network string) {
	name, _ := boxOf(t, []string{"--network", network})
	node := name + "-node-b" // where the client is
	monitor := exec.Command("ip", "netns", "exec", node, "nft", "monitor")
	var events bytes.Buffer
	monitor.Stdout, monitor.Stderr = &events, &events
	if err := monitor.Start(); err != nil {
		t.Fatal(err)
	}
	before := must(t, "ip", "netns", "exec", node, "nft", "-s", "list", "table", "inet", "fairlead")
	output := make(chan string)
	go func() {
		out, err := try(fairlead, "sandbox", "ask", "--name", name, "--count", "3000", "shop/client", "shop/web:80")
		output <- fmt.Sprintf("%s%v", out, err)
	}()
	for range 3 {
		pid := agentIn(node)
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatalf("kill agent %d: %v", pid, err)
		}
		eventually(t, "the agent is back and ready", func() bool {
			again := agentIn(node)
			return again != 0 && again != pid && strings.Count(must(t, fairlead, "sandbox", "ls", name), "agent ready") == 3
		})
	}
	if out := <-output; !strings.Contains(out, "shop/web-1") || strings.Contains(out, "refused") ||
		strings.Contains(out, "no answer") || !strings.HasSuffix(out, "<nil>") {
		t.Errorf("connections failed while the agent was killed three times:\n%s", out)
	}
	monitor.Process.Signal(syscall.SIGINT)
	monitor.Wait()
	// a new process makes the table of policies its own, which says so and changes nothing
	s := strings.ReplaceAll(events.String(), "add table inet fairlead-policy\n", "")
	if strings.Contains(s, "fairlead") {
		t.Errorf("restarts wrote to the kernel, which was as it should be:\n%.6000s", s)
	}
	if after := must(t, "ip", "netns", "exec", node, "nft", "-s", "list", "table", "inet",
		"fairlead"); len(after) != len(before) {
		t.Errorf("the table is another after restarts: %d bytes, before %d", len(after), len(before))
	}
}
