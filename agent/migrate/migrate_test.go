package migrate

import (
	"strings"
	"testing"

	"fairlead.dev/fairlead/kernel/iptables"
)

const saved = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:CNI-HOSTPORT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SEP-A - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -j CNI-HOSTPORT
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SVC-A -j KUBE-SEP-A
-A KUBE-SEP-A -p tcp -j DNAT --to-destination 10.0.0.1:80
COMMIT
`

func parsed(t *testing.T, text string) *iptables.Table {
	t.Helper()
	tables, err := iptables.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return tables["nat"]
}

func TestRemoval(t *testing.T) {
	want := `*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SEP-A - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
-D PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-D POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-X KUBE-MARK-MASQ
-X KUBE-POSTROUTING
-X KUBE-SEP-A
-X KUBE-SERVICES
-X KUBE-SVC-A
COMMIT
`
	if is := removal("nat", parsed(t, saved)); is != want {
		t.Errorf("is:\n%s\nwant:\n%s", is, want)
	}
	if is := removal("nat", &iptables.Table{}); is != "" {
		t.Errorf("of nothing: %s", is)
	}
}

// TestChainsInUseArePreserved: a plugin that marks packets in kube-proxy's chain goes on having their source hidden.
func TestChainsInUseArePreserved(t *testing.T) {
	is := removal("nat", parsed(t, strings.Replace(saved, "COMMIT", "-A CNI-HOSTPORT -p tcp -j KUBE-MARK-MASQ\nCOMMIT",
		1)))
	for _, stays := range []string{"-X KUBE-MARK-MASQ", ":KUBE-MARK-MASQ", "-X KUBE-POSTROUTING", "-D POSTROUTING",
		"CNI-HOSTPORT", "KUBELET"} {
		if strings.Contains(is, stays) {
			t.Errorf("%q must not be in:\n%s", stays, is)
		}
	}
	if !strings.Contains(is, "-X KUBE-SERVICES") {
		t.Errorf("what nothing else uses stays:\n%s", is)
	}
}
