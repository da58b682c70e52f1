package reachability

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
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
		fmt.Fprintf(b, "  # %s\n  - %s:\n", r.comment(), peers)
		for _, p := range r.Peers {
			fmt.Fprintf(b, "    - %s\n", s.peer(p))
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

// comment returns what was recorded of a rule.
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
	return text
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
