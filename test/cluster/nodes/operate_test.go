package nodes

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// kubectl runs kubectl itself with this cluster's kubeconfig and returns what it prints.
func (a api) kubectl(t *testing.T, line string) string {
	t.Helper()
	return a.operate(t, "KUBECTL", line)
}

// operate runs a program of an operator's with this cluster's kubeconfig, in the repository's folder, and returns what
// it prints. A variable has its path.
func (a api) operate(t *testing.T, variable, line string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), built(t, variable), strings.Fields(line)...)
	cmd.Dir = "../../.."
	cmd.Env = append(os.Environ(), "KUBECONFIG="+a.kubeconfig, "HOME="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", cmd, err, out)
	}
	return string(out)
}

// web returns the pods that serve and are ready, by node.
func (a api) web(t *testing.T) map[string]pod {
	t.Helper()
	all, err := a.pods(t.Context(), "web")
	check(t, err)
	ready := map[string]pod{}
	for _, p := range all {
		if p.ready() {
			ready[p.Spec.NodeName] = p
		}
	}
	return ready
}

// hostPorts checks that each pod's host port leads to it by TCP and UDP, from a process and from a pod of the other
// node.
func (a api) hostPorts(t *testing.T) {
	t.Helper()
	self, err := os.Executable()
	check(t, err)
	web := a.web(t)
	clients, err := a.pods(t.Context(), "client")
	check(t, err)
	for _, c := range clients {
		for node, p := range web {
			if node == c.Spec.NodeName {
				continue
			}
			at := p.Status.HostIP + ":8081"
			want := fmt.Sprintf("tcp %[1]s <nil>\nudp %[1]s <nil>\n", p.Metadata.Name)
			out, err := exec.Command(fairlead(t), "sandbox", "exec", "--name", a.name, c.Spec.NodeName, "--", self, "get",
				at).CombinedOutput()
			check(t, err)
			if string(out) != want {
				t.Errorf("host port %s from node %s: %q, want %q", at, c.Spec.NodeName, out, want)
			}
			if got := a.kubectl(t, "exec "+c.Metadata.Name+" -- /test get "+at); got != want {
				t.Errorf("host port %s from pod %s: %q, want %q", at, c.Metadata.Name, got, want)
			}
		}
	}
}

// drain drains the node that DNS is not on, as kubectl does, and has it back: no request fails.
func (a api) drain(t *testing.T) {
	t.Helper()
	dns, err := a.labelled(t.Context(), "kube-system", "k8s-app%3Dkube-dns")
	check(t, err)
	drained, stays := "", pod{}
	for node, p := range a.web(t) {
		if node == dns[0].Spec.NodeName {
			stays = p
		} else {
			drained = node
		}
	}
	watch := a.watch(t)
	a.kubectl(t, "drain "+drained+" --ignore-daemonsets --timeout 60s")
	a.lines(t, "the pod on the other node answers alone", func(recent []string) bool {
		return len(recent) == 10 && !contains(recent, "failed") && len(distinct(recent)) == 1 &&
			recent[0] == "ok "+stays.Metadata.Name
	})
	a.kubectl(t, "uncordon "+drained)
	until(t, "a pod is ready on the node again", func(context.Context) error {
		if web := a.web(t); len(web) != 2 {
			return fmt.Errorf("ready are %v", web)
		}
		return nil
	})
	watch(t, "while a node was drained")
}

// distinct returns lines without repeats.
func distinct(lines []string) map[string]bool {
	set := map[string]bool{}
	for _, l := range lines {
		set[l] = true
	}
	return set
}

// watch returns a function that checks that no request of a client has failed since.
func (a api) watch(t *testing.T) (done func(t *testing.T, while string)) {
	t.Helper()
	before := a.logs(t)
	return func(t *testing.T, while string) {
		t.Helper()
		for client, lines := range a.logs(t) {
			since := lines[len(before[client]):]
			failed := 0
			for _, l := range since {
				if !strings.HasPrefix(l, "ok ") {
					failed++
					t.Errorf("client %s: %s", client, l)
				}
			}
			t.Logf("client %s: %d requests %s, %d failed", client, len(since), while, failed)
		}
	}
}

// logs returns the whole lines that each client has printed.
func (a api) logs(t *testing.T) map[string][]string {
	t.Helper()
	clients, err := a.pods(t.Context(), "client")
	check(t, err)
	all := map[string][]string{}
	for _, c := range clients {
		text, err := a.call(t.Context(), "GET", "/api/v1/namespaces/default/pods/"+c.Metadata.Name+"/log", "")
		check(t, err)
		lines := strings.Split(string(text), "\n")
		all[c.Metadata.Name] = lines[:len(lines)-1]
	}
	return all
}
