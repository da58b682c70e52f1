package test_test

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestTrace follows connections through the hooks of a node: all of them, those of one Service and pod, and what the
// counters say of them afterwards.
func TestTrace(t *testing.T) {
	name, dir := box(t, "--mode", "ebpf")
	args := onNode(name, "b", dir, "trace")
	out, err := try(fairlead, "trace", "--source", dir, "--node", "b") // in this namespace no agent serves
	if err == nil {
		t.Errorf("a node without hooks was traced:\n%s", out)
	}
	contains(t, out, "--mode ebpf")
	eventually(t, "the agent serves with hooks", func() bool {
		out, err := try(onNode(name, "b", dir, "show", "--mode", "ebpf", "-o", "json")...)
		var s struct{ FactsMissing, FactsHeld int }
		return err == nil && json.Unmarshal([]byte(out), &s) == nil && s.FactsMissing == 0 && s.FactsHeld > 0
	})

	probe := func() { try(fairlead, "sandbox", "ask", "--name", name, "shop/client", "shop/web:80") }
	for _, filter := range [][]string{nil, {"--service", "shop/web", "--pod", "shop/client"}} {
		trace := exec.Command(args[0], append(args[1:], append(filter, "-o", "json")...)...)
		pipe, err := trace.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		trace.Stderr = os.Stderr
		if err := trace.Start(); err != nil {
			t.Fatal(err)
		}
		lines := make(chan string, 1000)
		go func() {
			defer close(lines)
			for s := bufio.NewScanner(pipe); s.Scan(); {
				lines <- s.Text()
			}
		}()
		var line string
		eventually(t, "a connection is printed", func() bool {
			probe()
			select {
			case line = <-lines:
				return true
			default:
				return false
			}
		})
		var e struct{ Client, Service, Entry, Backend, BackendPod, Outcome string }
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%v:\n%s", err, line)
		}
		if e.Client != "shop/client" || !strings.HasPrefix(e.Service, "shop/web") || e.Outcome != "translated" ||
			!strings.HasPrefix(e.BackendPod, "shop/web-") {
			t.Errorf("a line says %+v", e)
		}
		if out, err := try(args...); err == nil || !strings.Contains(out, "one listener at a time") {
			t.Errorf("a second listener: %v\n%s", err, out)
		}
		trace.Process.Signal(os.Interrupt)
		if err := trace.Wait(); err != nil {
			t.Errorf("interrupted, it says %v", err)
		}
	}
	out, err = try(append(args, "--service", "shop/nothing")...)
	if err == nil {
		t.Error("a Service that isn't there was traced")
	}
	contains(t, out, "the node serves no such Service")
	contains(t, must(t, onNode(name, "b", dir, "show", "--mode", "ebpf")...), "CONNECTIONS FROM THIS NODE",
		"shop/web:http",
		"fast path: IPv4 ")
	const get = `exec 3<>/dev/tcp/127.0.0.1/10249; printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3; cat <&3`
	contains(t, must(t, fairlead, "sandbox", "exec", "--name", name, "b", "--", "bash", "-c", get),
		`fairlead_service_connections_total{service="shop/web:http"}`,
		`fairlead_service_refused_total{service="shop/web:http"} 0`,
		`fairlead_fast_path_enabled{ip_family="IPv4"}`, `fairlead_fast_path_off{ip_family="IPv6",reason="ipsec"} 0`)
	contains(t, must(t, fairlead, "sandbox", "exec", "--name", name, "b", "--", "bash", "-c",
		strings.Replace(get, "/metrics", "/status", 1)), `"fastPath":{"ipv4":{"enabled":`)
}
