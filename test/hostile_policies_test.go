package test_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// bankChanges is how many changes of its policies the bank makes.
const bankChanges = 20

// NetworkPolicies that come to much more than what they say leave the agent within its memory, and have other tenants'
// policies in force at once. Pods whose policies are beyond their namespace's share are closed, and problems name them.
func TestHostilePolicies(t *testing.T) {
	pods, policies := nestedPorts()
	vault := podOfB("bank", "vault", 100)
	bank := []source.Object{vault, podOfB("bank", "client", 101)}
	for _, engine := range []string{"nftables", "ebpf", "iptables"} {
		t.Run(engine, func(t *testing.T) {
			c := newColdStart(t, "nftables", nil, slices.Concat(bank, pods)...)
			c.flags = []string{"--policy-mode", "Enforce", "--policy-engine", engine}
			c.start()
			alone := c.changePolicies(vault)
			c.write("evil-policies.yaml", documents(t, policies))
			beside := c.changePolicies(vault)
			t.Logf("policies were in force after %s alone, %s beside hostile ones, at most", alone, beside)
			if most := alone + servedWithin; beside > most {
				t.Errorf("a policy was in force after %s beside hostile ones: want %s at most", beside, most)
			}
			c.closed(pods)
			c.memory()
			c.stop()
			c.start()
			c.closed(pods)
			c.memory()
		})
	}
}

// podOfB returns a pod of node b that serves port 9000.
func podOfB(namespace, name string, n int) *corev1.Pod {
	p := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": name}}}
	p.Spec = corev1.PodSpec{NodeName: "b", Containers: []corev1.Container{{Name: "c",
		Ports: []corev1.ContainerPort{{ContainerPort: 9000}}}}}
	p.Status.Phase, p.Status.PodIP = corev1.PodRunning, fmt.Sprint("10.128.2.", n)
	p.Status.PodIPs = []corev1.PodIP{{IP: p.Status.PodIP}}
	return p
}

// nestedPorts returns pods of node b, and for each a policy of rules whose ranges of ports nest: any of them would let
// the bank connect to port 9000.
func nestedPorts() (pods, policies []source.Object) {
	i := slices.IndexFunc(generate.HostileShapes, func(s generate.HostileShape) bool { return s.Name == "nested ports" })
	for _, o := range generate.HostileShapes[i].Objects(0) {
		if p, is := o.(*corev1.Pod); is {
			pods = append(pods, podOfB(p.Namespace, p.Name, 200+len(pods)))
		} else {
			policies = append(policies, o)
		}
	}
	return pods, policies
}

const vaultYAML = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {namespace: bank, name: vault}
spec: {podSelector: {matchLabels: {app: vault}}, policyTypes: [%s]}
`

// changePolicies closes the vault and opens it, several times, and returns how long it took at most until that was in
// force.
func (c *coldStart) changePolicies(vault source.Object) (most time.Duration) {
	for i := range bankChanges {
		open, direction := i%2 > 0, "Ingress"
		if open {
			direction = "Egress"
		}
		began, tried := time.Now(), time.Time{}
		c.write("vault.yaml", fmt.Sprintf(vaultYAML, direction))
		eventually(c.t, fmt.Sprintf("the vault is open: %t", open), func() bool {
			tried = time.Now()
			return open == c.opens(vault, hostilePace)
		})
		most = max(most, tried.Sub(began))
	}
	return most
}

// opens reports whether a pod answers the bank's client.
func (c *coldStart) opens(o source.Object, patience time.Duration) bool {
	q := query{from: "bank/client", proto: model.TCP, to: o.(*corev1.Pod).Status.PodIP + ":9000"}
	by, err := c.probe(c.t.Context(), q, patience)
	return err == nil && by == o.GetNamespace()+"/"+o.GetName()
}

// closed wants those of hostile pods to drop everything that problems name, and only those: some, and not all.
func (c *coldStart) closed(pods []source.Object) {
	c.t.Helper()
	var problems string
	closed, named := make([]bool, len(pods)), make([]bool, len(pods))
	eventually(c.t, "problems name the pods that are closed", func() bool {
		problems = c.closures()
		var wg sync.WaitGroup
		for i, o := range pods {
			wg.Go(func() {
				named[i] = strings.Contains(problems, "pod "+o.GetNamespace()+"/"+o.GetName()+":")
				closed[i] = !c.opens(o, time.Second)
			})
		}
		wg.Wait()
		return slices.Contains(named, true) && slices.Equal(named, closed)
	})
	if !slices.Contains(closed, false) {
		c.t.Errorf("all of the hostile pods are closed: want the oldest policies in force:\n%s", problems)
	}
}

// closures returns the problems of NetworkPolicies.
func (c *coldStart) closures() string {
	var out strings.Builder
	s, _ := c.status()
	for _, p := range s.Problems {
		if p.Object.Kind == source.NetworkPolicy {
			fmt.Fprintln(&out, p.Message)
		}
	}
	return out.String()
}
