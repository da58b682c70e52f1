package reachability

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// WriteYAML writes the policies as YAML documents, with comments.
func (s *Suggestion) WriteYAML(w io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# Allows the connections that were recorded on the nodes %s\n", strings.Join(s.Log.Nodes(), ", "))
	for _, h := range s.Log.Headers {
		fmt.Fprintf(&b, "#   %s: from %s to %s\n", h.Node, h.Start.Format(time.RFC3339), h.End.Format(time.RFC3339))
	}
	for _, n := range s.Remarks {
		fmt.Fprintf(&b, "# %s.\n", n)
	}
	for _, p := range s.Policies {
		fmt.Fprintf(&b, "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata:\n")
		fmt.Fprintf(&b, "  namespace: %s\n  name: %s\n", quoted(p.Namespace), quoted("suggested-"+p.Name))
		fmt.Fprintf(&b, "spec:\n  podSelector: %s\n  policyTypes: [Ingress, Egress]\n", quoted(p.Selector()))
		p.list(&b, "ingress", "from", p.Ingress)
		p.list(&b, "egress", "to", p.Egress)
		if len(p.Nodes) > 0 {
			p.cluster(&b)
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// quoted returns a value as JSON, which YAML holds.
func quoted(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings and selectors can be written
	}
	return string(b)
}

// list writes the rules of one direction.
func (s Suggested) list(b *bytes.Buffer, direction, peers string, rules []SuggestedRule) {
	if len(rules) == 0 {
		return
	}
	fmt.Fprintf(b, "  %s:\n", direction)
	for _, r := range rules {
		fmt.Fprintf(b, "%s  - %s:\n", r.comment(), peers)
		for _, p := range r.Peers {
			text := s.peer(p)
			if of := r.Blocks[p.Block]; of != "" {
				text += " # " + of
			}
			fmt.Fprintf(b, "    - %s\n", text)
		}
		if len(r.Peers) == 0 {
			b.WriteString("    - namespaceSelector: {}\n")
		}
		b.WriteString("    ports:\n")
		for _, k := range r.Ports {
			protocol := strings.ToUpper(k.protocol.String())
			if k.number == 0 {
				fmt.Fprintf(b, "    - {protocol: %s}\n", protocol)
			} else {
				fmt.Fprintf(b, "    - {port: %d, protocol: %s}\n", k.number, protocol)
			}
		}
	}
}

// cluster writes the ClusterNetworkPolicy that allows what s has to every node.
func (s Suggested) cluster(b *bytes.Buffer) {
	fmt.Fprintf(b, "---\napiVersion: %s\nkind: ClusterNetworkPolicy\nmetadata:\n", cnpv1.GroupVersion)
	fmt.Fprintf(b, "  name: %s\nspec:\n  tier: Admin\n  priority: 1000\n  subject:\n    pods:\n",
		quoted("suggested-"+s.Namespace+"."+s.Name))
	fmt.Fprintf(b, "      namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %s}}\n      podSelector: %s\n",
		quoted(s.Namespace), quoted(s.Selector()))
	b.WriteString("  egress:\n")
	for _, r := range s.Nodes {
		fmt.Fprintf(b, "%s  - action: Accept\n    to:\n    - nodes: {}\n    protocols:\n", r.comment())
		for _, k := range r.Ports {
			port := fmt.Sprintf("number: %d", k.number)
			if k.number == 0 {
				port = "range: {start: 1, end: 65535}"
			}
			fmt.Fprintf(b, "    - %s: {destinationPort: {%s}}\n", k.protocol, port)
		}
	}
}

// comment returns what was recorded of a rule, in lines of comments.
func (r SuggestedRule) comment() string {
	text := fmt.Sprintf("%d connections", r.Count)
	if r.Count == 0 {
		text = "DNS; none was recorded"
	}
	blocks := 0
	for _, p := range r.Peers {
		if p.Workload == nil {
			blocks++
		}
	}
	if r.External > blocks {
		text += fmt.Sprintf("; %d addresses were joined to %d CIDRs", r.External, blocks)
	}
	return "  # " + strings.Join(append([]string{text}, r.Comments...), "\n  #   ") + "\n"
}

// peer returns a peer of a rule of s.
func (s Suggested) peer(p Peer) string {
	if p.Workload == nil {
		return fmt.Sprintf("ipBlock: {cidr: %s}", quoted(p.Block))
	}
	text := "podSelector: " + quoted(p.Selector())
	if p.Namespace != s.Namespace {
		const own = "\n      namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %s}}"
		text += fmt.Sprintf(own, quoted(p.Namespace))
	}
	return text
}
