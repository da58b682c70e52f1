// Package xt is what planes on iptables share: the input of iptables-restore, rules of others that lead to a plane's
// chains, and how a list of addresses is halved by a prefix.
package xt

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Restore collects one table's part of the input of iptables-restore --noflush: chains are declared, which empties
// them, rules that lead to them are removed, rules are added, then what leads to them, and chains that go are removed
// last.
type Restore struct{ declared, removed, added, led, gone bytes.Buffer }

// Finish appends the table's part to b, if there is anything.
func (r *Restore) Finish(b *bytes.Buffer, table string) {
	if r.declared.Len()+r.removed.Len()+r.led.Len() == 0 {
		return
	}
	fmt.Fprintf(b, "*%s\n", table)
	for _, part := range []*bytes.Buffer{&r.declared, &r.removed, &r.added, &r.led, &r.gone} {
		b.Write(part.Bytes())
	}
	b.WriteString("COMMIT\n")
}

// declare makes a chain, or empties it.
func (r *Restore) declare(chain string) { fmt.Fprintf(&r.declared, ":%s - [0:0]\n", chain) }

// Body writes a chain anew.
func (r *Restore) Body(chain string, rules []string) {
	r.declare(chain)
	for _, rule := range rules {
		fmt.Fprintf(&r.added, "-A %s %s\n", chain, rule)
	}
}

// Remove removes a chain.
func (r *Restore) Remove(chain string) {
	r.declare(chain)
	fmt.Fprintf(&r.gone, "-X %s\n", chain)
}

// PolicyPrefix begins the names of the chains of the policy engine. What leads to them comes before all other rules:
// accepting rules of a service plane must not decide first.
const PolicyPrefix = "FLPOLICY-"

// Leading is held while a plane changes what leads from built-in chains to its own: between reading where the rules of
// a policy engine end and putting rules behind them, none may come.
var Leading sync.Mutex

// Lead puts rules before all others of a built-in chain, but for the first ones, in place of those that were there.
func (r *Restore) Lead(chain string, first int, was, now []string) {
	for _, rule := range was {
		fmt.Fprintf(&r.removed, "-D %s %s\n", chain, rule)
	}
	for _, rule := range slices.Backward(now) {
		fmt.Fprintf(&r.led, "-I %s %d %s\n", chain, first+1, rule)
	}
}

// Leads reports whether a rule, as iptables-save prints it, leads to a chain whose name begins with a prefix.
func Leads(rule, prefix string) bool {
	said := unquoted(rule)
	return strings.Contains(said, "-j "+prefix) || strings.Contains(said, "-g "+prefix)
}

// unquoted returns a rule without its quoted texts, such as comments of others that speak of our chains.
func unquoted(rule string) string {
	if !strings.Contains(rule, `"`) {
		return rule
	}
	var b strings.Builder
	for i, quoted := 0, false; i < len(rule); i++ {
		switch c := rule[i]; {
		case c == '"':
			quoted = !quoted
		case quoted && c == '\\':
			i++ // what comes is meant as it stands
		case !quoted:
			b.WriteByte(c)
		}
	}
	return b.String()
}
