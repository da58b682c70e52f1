package test_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const denyCart = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {namespace: shop, name: cart-from-web}
spec:
  podSelector: {matchLabels: {app: cart}}
  policyTypes: [Ingress]
  ingress:
    - from: [{podSelector: {matchLabels: {app: web}}}]
      ports: [{port: grpc}]
`

// connects reports whether the cart answers a client.
func connects(name, from string) bool {
	_, err := try(fairlead, "sandbox", "ask", "--name", name, from, "shop/cart:7000")
	return err == nil
}

// A policy that is saved has packets dropped, those of others pass, and nothing is left of it once it is gone.
func TestPolicyDropsPackets(t *testing.T) {
	name, dir := box(t)
	if !connects(name, "shop/client") {
		t.Fatal("the cart doesn't answer without any policy")
	}
	file := filepath.Join(dir, "deny.yaml")
	os.WriteFile(file, []byte(denyCart), 0o644)
	eventually(t, "the policy is in the kernel", func() bool {
		out, _ := try("ip", "netns", "exec", name+"-node-b", "nft", "list", "tables")
		return strings.Contains(out, "fairlead-policy")
	})
	if connects(name, "shop/client") {
		t.Error("the cart answers a pod that the policy doesn't allow")
	}
	if !connects(name, "shop/web-1") {
		t.Error("the cart doesn't answer a pod that the policy allows")
	}
	os.Remove(file)
	eventually(t, "the policy is gone", func() bool {
		out, _ := try("ip", "netns", "exec", name+"-node-b", "nft", "list", "tables")
		return !strings.Contains(out, "fairlead-policy")
	})
	if !connects(name, "shop/client") {
		t.Error("the cart doesn't answer once the policy is gone")
	}
}
