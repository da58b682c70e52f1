package classic

import "context"

// kubelet are the rules of a node's kubelet, which drop what comes to its loopback addresses from elsewhere, and the
// chains that it makes to see whether others remove them.
const kubelet = `*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*filter
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
COMMIT
`

// listed are the empty chains that a list of the rules leaves, as by iptables -L.
const listed = `*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
COMMIT
`

// Kubelet writes into the calling thread's network namespace what a node has whose kubelet works by iptables-nft, and
// on which the rules of both variants were listed.
func Kubelet(ctx context.Context) error {
	for _, r := range []struct {
		by   Variant
		text string
	}{{NFT, kubelet}, {NFT, listed}, {Legacy, listed}} {
		if err := IPTables.Restore(ctx, r.by, r.text); err != nil {
			return err
		}
	}
	return nil
}
