package test_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

var scalePods = flag.Int("scale-pods", 1000, "TestPolicyScale: pods of the cluster; for four of them it has three "+
	"policies")

var scaleRest = flag.Duration("scale-rest", 0, "for how long an agent is left alone before its memory is read")

var scaleServices = flag.Int("scale-services", 1000, "TestServiceScale: Services of the cluster, of 10 endpoints each")

var scaleChurn = flag.Duration("scale-churn", 0, "TestServiceScale: for how long 20 EndpointSlices change a second "+
	"after that")

var scaleProfile = flag.String("scale-profile", "", "TestPolicyScale: a folder for profiles of each engine's second "+
	"agent: its processor while it starts, and its heap after")

// An agent programs what its node needs of a large cluster's policies, in each engine, and all of it is in the kernel:
// the agent after it has nothing to write. With -scale-pods 100000 it is make test-scale.
func TestPolicyScale(t *testing.T) {
	pods := *scalePods
	objects := generate.NewPolicyCluster(generate.PolicySize{Pods: pods, Namespaces: max(pods/4, 1), Here: 110,
		Cluster: 20}).Objects
	server := apiserver.New(objects...)
	for _, engine := range []string{"nftables", "iptables", "ebpf"} {
		t.Run(engine, func(t *testing.T) {
			ns, kubeconfig := scaleNode(t, "policies-"+engine, server)
			flags := []string{"--kubeconfig", kubeconfig, "--node", generate.PolicyNode, "--policy-mode", "Enforce",
				"--policy-engine", engine}
			enforced(t, ns, flags, "")
			s := enforced(t, ns, flags, *scaleProfile) // it reads what the first one has written
			for name, l := range s.Loops {
				if name != "flows" && l.Puts+l.Dels > 0 { // it follows connections, and has no fact of its own in the kernel
					t.Errorf("loop %s of the second agent puts %d facts and deletes %d: want what the first has written", name,
						l.Puts, l.Dels)
				}
			}
			for _, p := range s.Problems {
				if strings.HasPrefix(p.Reason, "Policy") || strings.Contains(p.Message, "limit") {
					t.Errorf("problem: %s", p.Message)
				}
			}
		})
	}
}

// enforced runs an agent until all policies are enforced, and returns its state then. It logs how long that lasted, and
// the memory after a while without a change. Profiles go into a folder, none if it is "".
func enforced(t *testing.T, ns *netns.Namespace, flags []string, profiles string) (s scaleState) {
	began := time.Now()
	if profiles != "" {
		flags = append(slices.Clone(flags), "--profiling")
	}
	a := runIn(t, ns, flags...)
	defer a.stop()
	profile := func(name, path string) {
		if profiles != "" {
			name = filepath.Join(profiles, strings.ReplaceAll(t.Name(), "/", "-")+"-"+name)
			if err := os.WriteFile(name, []byte(pageIn(ns, path)), 0o644); err != nil {
				t.Error(err)
			}
		}
	}
	if profiles != "" {
		within(t, 10*time.Second, "the agent has pages", func() bool { return pageIn(ns, "/livez") != "" })
		profile("cpu", "/debug/pprof/profile?seconds=10")
	}
	within(t, 5*time.Minute, "all policies are enforced", func() bool {
		select {
		case <-a.ended:
			t.Fatalf("the agent ended: %s", lastLines(a.log.String(), 5))
		default:
		}
		s = scaleState{}
		return json.Unmarshal([]byte(pageIn(ns, "/status")), &s) == nil && s.done()
	})
	elapsed := time.Since(began)
	used := a.used()
	_, peak := a.resident()
	time.Sleep(*scaleRest)
	now, _ := a.resident()
	t.Logf("enforced after %s, %s of processor time, %d facts; %d MiB resident, %d at most; %v",
		elapsed.Round(time.Millisecond), used, s.held(), now>>20, peak>>20, s.Policies.Parts)
	profile("heap", "/debug/pprof/heap?gc=1")
	return s
}

// An agent programs a large cluster's Services, follows what changes, and says how much memory it takes. With
// -scale-services 10000 and 30000 it is make test-scale.
func TestServiceScale(t *testing.T) {
	objects := generate.Cluster(*scaleServices, 10)
	server := &churning{Server: apiserver.New(objects...)}
	server.Encode() // no agent waits for it
	for _, o := range objects {
		if s, ok := o.(*discoveryv1.EndpointSlice); ok {
			server.slices = append(server.slices, s)
		}
	}
	for _, mode := range []string{"nftables", "ebpf"} {
		t.Run(mode, func(t *testing.T) {
			ns, kubeconfig := scaleNode(t, "services-"+mode, server.Server)
			began := time.Now()
			a := runIn(t, ns, "--kubeconfig", kubeconfig, "--node", "a", "--mode", mode)
			within(t, 5*time.Minute, "all is in the kernel", func() bool { return pageIn(ns, "/readyz") == "ok\n" })
			t.Logf("all is in the kernel after %s, %s of processor time", time.Since(began).Round(time.Millisecond), a.used())
			time.Sleep(*scaleRest)
			report := func() {
				now, peak := a.resident()
				t.Logf("%d MiB resident, %d at most, %s of processor time", now>>20, peak>>20, a.used())
			}
			report()
			before := server.passed
			server.churn(500, 10*time.Millisecond)
			report()
			for left := *scaleChurn; left > 0; left -= time.Minute {
				server.churn(1200, 50*time.Millisecond)
				report()
			}
			within(t, 20*time.Second, "all changes are in the kernel", func() bool {
				s := scaleState{}
				err := json.Unmarshal([]byte(pageIn(ns, "/status")), &s)
				l := s.Loops[mode]
				return err == nil && l.Puts >= *scaleServices+server.passed-before && l.Unsynced == 0
			})
		})
	}
}

// churning is an API server whose EndpointSlices change.
type churning struct {
	*apiserver.Server
	slices []*discoveryv1.EndpointSlice
	passed int // changes
}

// churn changes EndpointSlices in turn: each lacks another of its endpoints than before.
func (c *churning) churn(changes int, pause time.Duration) {
	for range changes {
		s := c.slices[c.passed%len(c.slices)].DeepCopy()
		k := c.passed / len(c.slices) % len(s.Endpoints)
		s.Endpoints = slices.Delete(s.Endpoints, k, k+1)
		c.Apply(source.Change{Key: source.KeyOf(s), Object: s})
		c.passed++
		time.Sleep(pause)
	}
}

// used returns the agent's processor time.
func (c *coldStart) used() time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.pid))
	if err != nil {
		c.t.Error(err)
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:])) // from the third on
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * 10 * time.Millisecond
}

// scaleState is what an agent's status page says.
type scaleState struct {
	Loops    map[string]struct{ Unsynced, Held, Puts, Dels int }
	Policies *struct {
		Enforced bool
		Parts    map[string]int
	}
	Problems []struct{ Reason, Message string }
}

// done reports whether all policies are in the kernel.
func (s scaleState) done() bool {
	for _, l := range s.Loops {
		if l.Unsynced > 0 {
			return false
		}
	}
	return s.Policies != nil && s.Policies.Enforced && len(s.Policies.Parts) > 3
}

func (s scaleState) held() (n int) {
	for _, l := range s.Loops {
		n += l.Held
	}
	return n
}

// scaleNode makes a node's network namespace, in which a server serves, and returns it and the client's configuration.
func scaleNode(t *testing.T, name string, server *apiserver.Server) (ns *netns.Namespace, kubeconfig string) {
	ns, err := netns.New(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ns.Do(removePins); err != nil {
			t.Error(err)
		}
		ns.Close()
		if err := netns.Delete(name); err != nil {
			t.Error(err)
		}
	})
	must(t, "ip", "-n", name, "link", "set", "lo", "up")
	must(t, "ip", "-n", name, "address", "add", "172.16.0.0/32", "dev", "lo")
	url, stop, err := server.Start(ns, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop() })
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, apiserver.Kubeconfig(url), 0o600); err != nil {
		t.Fatal(err)
	}
	return ns, kubeconfig
}

// removePins detaches what agents left that were stopped in mode or engine ebpf in the calling thread's network
// namespace.
func removePins() error {
	services, _, err := bpf.Folder()
	if err != nil {
		return err
	}
	policies, err := policy.Folder()
	return errors.Join(err, os.RemoveAll(services), os.RemoveAll(policies))
}

// runIn starts an agent in a namespace, and ends it with the test.
func runIn(t *testing.T, ns *netns.Namespace, flags ...string) *coldStart {
	a := &coldStart{t: t, cmd: exec.Command(fairlead, append([]string{"run"}, flags...)...), ended: make(chan struct{})}
	a.cmd.Stdout, a.cmd.Stderr = &a.log, &a.log
	if err := ns.Do(a.cmd.Start); err != nil {
		t.Fatal(err)
	}
	cmd := a.cmd
	a.pid = cmd.Process.Pid
	go func() { cmd.Wait(); close(a.ended) }()
	t.Cleanup(a.stop)
	return a
}
