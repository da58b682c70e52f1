package nodes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Helm installs the chart by the command that `cluster up` prints, upgrades the image without a failed request, and
// uninstalls it: Services are served on, pods can be deleted, and `fairlead clean` leaves nothing on any node.
func TestChart(t *testing.T) {
	name := fmt.Sprintf("chart%d", os.Getpid())
	a := up(t, name, "--network", "none", "--image", built(t, "FAIRLEAD_IMAGE_1"), "--image", built(t, "FAIRLEAD_IMAGE_2"))
	install := regexp.MustCompile(`helm (install .*)`).FindStringSubmatch(a.printed)
	if install == nil || strings.Contains(a.printed, "DNS ready") {
		t.Fatal("without a network `cluster up` must print the chart's installation, and not that DNS is ready")
	}
	a.helm(t, install[1]+" --set policy.mode=Enforce --set image.tag=test-1 --set mode="+*mode)
	a.rolledOut(t, "fairlead:test-1")
	a.kubectl(t, "rollout status -n kube-system deployment/coredns --timeout 60s")
	a.serve(t)
	watch := a.watch(t)
	a.helm(t, "upgrade fairlead deploy/chart -n kube-system --reuse-values --set image.tag=test-2")
	a.rolledOut(t, "fairlead:test-2")
	watch(t, "during the upgrade")
	a.uninstall(t)
	down(t, name)
	if left := leftovers(t, name); len(left) > 0 {
		t.Errorf("cluster down left %q", left)
	}
}

// helm runs Helm itself with this cluster's kubeconfig and returns what it prints.
func (a api) helm(t *testing.T, line string) string {
	t.Helper()
	return a.operate(t, "HELM", line)
}

// rolledOut waits until the agents of both nodes are ready and of an image.
func (a api) rolledOut(t *testing.T, image string) {
	t.Helper()
	a.kubectl(t, "rollout status -n kube-system daemonset/fairlead --timeout 60s")
	until(t, "both agents run "+image, func(context.Context) error {
		got := a.kubectl(t, "get pods -n kube-system -l app.kubernetes.io/name=fairlead -o "+
			"jsonpath={.items[*].status.containerStatuses[*].image}")
		if want := "docker.io/library/" + image; got != want+" "+want {
			return errors.New(got)
		}
		return nil
	})
}

// uninstall uninstalls the chart, deletes all pods and cleans the nodes, and checks what is left after each.
func (a api) uninstall(t *testing.T) {
	t.Helper()
	watch := a.watch(t)
	a.helm(t, "uninstall fairlead -n kube-system")
	until(t, "nothing of the chart is left", func(context.Context) error {
		left := a.kubectl(t, "get daemonsets,pods,configmaps,secrets,serviceaccounts,clusterroles,clusterrolebindings -A "+
			"-o name -l app.kubernetes.io/instance=fairlead") + a.helm(t, "list -A -q")
		if strings.Contains(left, "fairlead") {
			return errors.New(left)
		}
		return nil
	})
	a.lines(t, "clients reach the pods without an agent", func(recent []string) bool {
		return !contains(recent, "failed")
	})
	watch(t, "while the chart was uninstalled")
	a.kubectl(t, "delete deployments,daemonsets --all -A --cascade=foreground --timeout 60s")
	for _, node := range []string{"a", "b"} {
		out := a.on(t, node, fairlead(t), "clean", "--network")
		if tables := a.on(t, node, "nft", "list", "tables"); strings.Contains(tables, "fairlead") {
			t.Errorf("node %s: clean left %q of nf_tables: it printed %q", node, tables, out)
		}
		if links := a.on(t, node, "ip", "-brief", "link"); podDevice.MatchString(links) {
			t.Errorf("node %s: clean left devices: %s", node, links)
		}
		found, err := filepath.Glob(filepath.Join(a.files(node), "etc/cni/net.d/*"))
		if check(t, err); len(found) > 0 {
			t.Errorf("node %s: clean left %q", node, found)
		}
	}
}

// podDevice is what the names of devices of the pod network are like.
var podDevice = regexp.MustCompile(`\bfl(-|[0-9a-f]{10})`)

// files returns the folder of a node's files.
func (a api) files(node string) string {
	return filepath.Join("/var/lib/fairlead/clusters", a.name, "node-"+node)
}

// on runs a command in all namespaces of a node, and returns what it prints.
func (a api) on(t *testing.T, node string, command ...string) string {
	t.Helper()
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	check(t, err)
	own, err := os.Readlink("/proc/self/ns/mnt")
	check(t, err)
	for _, p := range processes {
		text, err := os.ReadFile(p)
		namespace, gone := os.Readlink(filepath.Join(filepath.Dir(p), "ns/mnt"))
		if errors.Join(err, gone) != nil || namespace == own || !strings.Contains(string(text), a.files(node)+`"`) {
			continue // the machine's first process has that folder among its arguments
		}
		enter := []string{"-a", "-t", filepath.Base(filepath.Dir(p)), "--"}
		out, err := exec.Command("nsenter", append(enter, command...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("node %s: %q: %v: %s", node, command, err, out)
		}
		return string(out)
	}
	t.Fatalf("no process is the machine of node %s", node)
	return ""
}
