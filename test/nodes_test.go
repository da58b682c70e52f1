package test_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
)

// TestNetworkOf5000Nodes has an agent write the way to the pods of 4,999 other nodes, by VXLAN, and logs how long it
// takes from the agent's start and what the agent's live heap has more than beside one other node. The agent after it
// has nothing to write.
func TestNetworkOf5000Nodes(t *testing.T) {
	few, _ := networkOf(t, 2)
	many, flags := networkOf(t, 5000)
	t.Logf("5,000 nodes: %d facts in the kernel after %s; %.1f MiB of live heap, and %.1f with two nodes", many.held,
		many.after.Round(time.Millisecond), many.heap, few.heap)
	if want := 3 * 4999; many.held < want {
		t.Errorf("%d facts, want at least %d: a route, a neighbour and a forwarding entry of each node", many.held, want)
	}
	if again := flags.run(t); again.written > 0 {
		t.Errorf("the second agent wrote %d facts that the first one had written", again.written)
	}
}

// networkAgent is what an agent with a pod network is started with.
type networkAgent struct {
	*attaching
	flags []string
}

// networkState is what an agent has done for its pod network.
type networkState struct {
	held, written int // facts
	after         time.Duration
	heap          float64 // MiB
}

// networkOf makes a node in a cluster of so many nodes, each on a link of its own, and runs an agent there.
func networkOf(t *testing.T, nodes int) (networkState, networkAgent) {
	a := newAttaching(t)
	objects := make([]source.Object, 0, nodes)
	for i := range nodes {
		name, address := fmt.Sprint("n", i), fmt.Sprintf("172.16.%d.%d", i/250, i%250+1)
		if i == 0 {
			name, address = "a", "192.168.0.1"
		}
		objects = append(objects, &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       corev1.NodeSpec{PodCIDRs: []string{fmt.Sprintf("10.%d.%d.0/24", 1+i>>8, i&255)}},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP,
				Address: address}}}})
	}
	must(t, "ip", "-n", a.node.Name, "link", "set", "lo", "up")
	url, stop, err := apiserver.New(objects...).Start(a.node, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop() })
	kubeconfig := filepath.Join(a.folder, "kubeconfig")
	if err := os.WriteFile(kubeconfig, apiserver.Kubeconfig(url), 0o600); err != nil {
		t.Fatal(err)
	}
	n := networkAgent{a, []string{"--kubeconfig", kubeconfig, "--node", "a", "--mode", "nftables", "--profiling",
		"--network-mode", "Own", "--network-cni-folder", a.folder, "--network-run-folder", a.folder}}
	return n.run(t), n
}

var liveHeap = regexp.MustCompile(`# HeapAlloc = (\d+)`)

// run runs an agent until all of the pod network is in the kernel, and ends it.
func (n networkAgent) run(t *testing.T) (s networkState) {
	t.Helper()
	began := time.Now()
	a := runIn(t, n.node, n.flags...)
	defer a.stop()
	within(t, time.Minute, "the pod network is in the kernel", func() bool {
		select {
		case <-a.ended:
			t.Fatalf("the agent ended: %s", lastLines(a.log.String(), 5))
		default:
		}
		var state scaleState
		if json.Unmarshal([]byte(pageIn(n.node, "/status")), &state) != nil {
			return false
		}
		l := state.Loops["network-route"]
		s.held, s.written = l.Held, l.Puts+l.Dels
		_, err := os.Stat(filepath.Join(n.folder, "10-fairlead.conflist"))
		return err == nil && l.Held > 0 && l.Unsynced == 0
	})
	s.after = time.Since(began)
	for range 5 { // what is garbage by then isn't live
		m := liveHeap.FindStringSubmatch(pageIn(n.node, "/debug/pprof/heap?gc=1&debug=1"))
		if m == nil {
			t.Fatal("the agent doesn't tell its live heap")
		}
		bytes, _ := strconv.Atoi(m[1])
		if heap := float64(bytes) / (1 << 20); s.heap == 0 || heap < s.heap {
			s.heap = heap
		}
	}
	os.Remove(filepath.Join(n.folder, "10-fairlead.conflist"))
	return s
}
