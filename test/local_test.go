package test_test

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/generate"
)

// bare is a command of fairlead's inside a node of a box, without flags of configuration.
func bare(name, node string, args ...string) []string {
	return append([]string{fairlead, "sandbox", "exec", "--name", name, node, "--", filepath.Base(fairlead)}, args...)
}

// Commands on a node decide as its agent does, which has flags that they don't have.
func TestCommandsDecideAsTheAgent(t *testing.T) {
	for _, network := range []string{"own", "wires"} {
		for _, mode := range []string{"nftables", "ebpf"} {
			t.Run(network+" "+mode, func(t *testing.T) {
				engine := map[string]string{"nftables": "iptables", "ebpf": "ebpf"}[mode]
				name, dir := boxOf(t, []string{"--network", network}, "--mode", mode, "--policy-engine", engine,
					"--external-ips", "Any", "--cluster-cidr", "10.128.0.0/16,fd00:128::/48")
				eventually(t, "the kernel is in sync", func() bool {
					out, err := try(bare(name, "a", "show")...)
					return err == nil && strings.Contains(out, "0 missing, 0 too many") && !strings.Contains(out, "lacks") &&
						strings.Contains(out, "mode Enforce, engine "+engine) && !strings.Contains(out, "warning")
				})
				contains(t, must(t, bare(name, "a", "plan")...), "put 0, replace 0, delete 0")
				contains(t, must(t, bare(name, "b", "explain", "shop/client", "shop/web:http")...),
					"kernel: Services in sync; policies in sync")
				if network == "own" {
					contains(t, must(t, bare(name, "b", "show", "network")...), "0 missing, 0 too many")
				}
				out, _ := try(onNode(name, "a", dir, "show", "--mode", "iptables")...)
				if strings.Contains(out, " 0 missing") || strings.Contains(out, "warning") {
					t.Errorf("with flags, they decide:\n%s", out)
				}
				refuseOthers(t, name)
			})
		}
	}
}

// refuseOthers demands that the agent of a box's node a sends nothing to an unprivileged user.
func refuseOthers(t *testing.T, name string) {
	t.Helper()
	folder := must(t, fairlead, "sandbox", "exec", "--name", name, "a", "printenv", "FAIRLEAD_RUN_FOLDER")
	c := exec.Command("nsenter", "--net=/run/netns/"+name+"-node-a", "--setuid", "65534", "--setgid", "65534", fairlead,
		"show")
	c.Env = append(os.Environ(), "FAIRLEAD_RUN_FOLDER="+strings.TrimSpace(folder))
	out, err := c.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "permission denied: run as root") {
		t.Errorf("an unprivileged user: %v: %s", err, out)
	}
}

// Without an agent, the flags' defaults and the environment decide, and a line says so.
func TestCommandsDecideWithoutAnAgent(t *testing.T) {
	name, dir := boxOf(t, []string{"--node-agent=false"})
	const line = "no agent runs in this network namespace"
	contains(t, must(t, bare(name, "a", "show", "shop/web")...), line, "shop/web:http", "lacks", "node a: ")
	out := must(t, onNode(name, "a", dir, "show", "shop/web")...)
	if strings.Contains(out, line) {
		t.Errorf("with flags, no agent is missed:\n%s", out)
	}
	exits(t, 0, []string{"nothing of Fairlead's is left"}, bare(name, "a", "clean")...)
}

// Commands follow an agent whose configuration changes, and objects are read from its API server, by paths that are
// the agent's.
func TestCommandsDecideAsAnAgentThatChanges(t *testing.T) {
	ns, kubeconfig := scaleNode(t, "localtest", apiserver.New(generate.Cluster(3, 2)...))
	t.Chdir(filepath.Dir(kubeconfig))
	configure := func(mode string) {
		t.Helper()
		text := "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\nmode: " + mode +
			"\nmaglevTableSize: 251\nscheduler: maglev\nnetwork: {runFolder: run}\n"
		if err := os.WriteFile("config.yaml", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	configure("auto")
	runIn(t, ns, "--config", "config.yaml", "--kubeconfig", filepath.Base(kubeconfig), "--node", "a")
	command := func(args ...string) string {
		out, errors, _ := besideAgent(ns, filepath.Join(filepath.Dir(kubeconfig), "run"), args...)
		return out + errors
	}
	show := func() string { return command("show") }
	synced := func(out string) bool {
		return strings.Contains(out, "0 missing, 0 too many") && strings.Contains(out, generate.Namespace(0)+"/")
	}
	eventually(t, "the kernel is in sync in mode auto", func() bool { return synced(show()) })
	configure("ebpf")
	eventually(t, "the kernel is in sync in mode ebpf", func() bool {
		out := show()
		return synced(out) && strings.Contains(out, "packets at devices")
	})
	if err := os.Remove(kubeconfig); err != nil { // nothing is listed again
		t.Fatal(err)
	}
	if out := show(); !synced(out) {
		t.Errorf("show without an API server:\n%s", out)
	}
	contains(t, command("show", "svc-000001."+generate.Namespace(0)), "/svc-000001:http")
	contains(t, command("show", "svc-9"), `is named "svc-9"`)
	contains(t, command("plan"), "put 0, replace 0, delete 0")
	at := generate.ServiceAddress(0).String() + ":80"
	contains(t, command("explain", generate.EndpointAddress(1).String(), at), "internalTrafficPolicy Cluster",
		"kernel: in sync")
	contains(t, command("explain", "shop/client", at), "addresses and numbers need no objects", "kubeconfig")
}

// besideAgent runs a command in the namespace of an agent with that run folder. It returns what it printed to standard
// output and to standard error.
func besideAgent(ns *netns.Namespace, folder string, args ...string) (out, errors string, err error) {
	c := exec.Command(fairlead, append(args, "--network-run-folder", folder)...)
	var printed, warned bytes.Buffer
	c.Dir, c.Stdout, c.Stderr = "/", &printed, &warned
	if err = ns.Do(c.Start); err == nil {
		err = c.Wait()
	}
	return printed.String(), warned.String(), err
}

// While the agent has not decided policies, show prints Services, and a warning in place of policies: it fails, since
// an object could not be read.
func TestShowWarnsOfUndecidedPolicies(t *testing.T) {
	server := apiserver.New(generate.Cluster(3, 2)...)
	ns, kubeconfig := scaleNode(t, "undecidedtest", server)
	var allowed atomic.Bool
	var l net.Listener
	err := ns.Do(func() (err error) {
		l, err = net.Listen("tcp4", "127.0.0.1:0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	front := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !allowed.Load() && strings.HasSuffix(r.URL.Path, "/networkpolicies") {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusForbidden)
			io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","message":"no",`+
				`"code":403}`)
			return
		}
		server.ServeHTTP(w, r)
	})}
	go front.Serve(l)
	t.Cleanup(func() { front.Close() })
	if err := os.WriteFile(kubeconfig, apiserver.Kubeconfig("http://"+l.Addr().String()), 0o600); err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(t.TempDir(), "run")
	runIn(t, ns, "--kubeconfig", kubeconfig, "--node", "a", "--mode", "nftables", "--policy-mode", "Enforce",
		"--policy-engine", "nftables", "--network-run-folder", folder)

	const warning = "fairlead: warning: network policies are left out: the agent has not decided them: " +
		"not read yet: NetworkPolicy\n"
	eventually(t, "Services are shown, and policies are left out", func() bool {
		out, warned, err := besideAgent(ns, folder, "show")
		return err != nil && strings.HasPrefix(warned, warning) && strings.Contains(out, generate.Namespace(0)+"/") &&
			!strings.Contains(out, "engine nftables")
	})
	allowed.Store(true)
	within(t, time.Minute, "policies are shown without a warning", func() bool {
		out, warned, err := besideAgent(ns, folder, "show")
		return err == nil && warned == "" && strings.Contains(out, "mode Enforce, engine nftables")
	})
}
