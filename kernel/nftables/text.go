package nftables

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// A chain can't be read back word for word: the kernel adds to rules what was not written. It is known by a digest,
// which the comment of each of its rules bears: "digest of n: i", i from 1.

// emptyChain is the digest of a chain without rules.
const emptyChain = "empty"

// Digest stands for a chain's hook and rules: "1f0c… of 3", or "empty".
func Digest(hook *Hook, rules [][]Expr) string {
	if len(rules) == 0 {
		return emptyChain
	}
	h := sha256.New()
	if hook != nil {
		fmt.Fprintln(h, *hook)
	}
	for _, r := range rules {
		for _, e := range r {
			h.Write(e)
		}
		h.Write([]byte{0})
	}
	return fmt.Sprintf("%s of %d", hex.EncodeToString(h.Sum(nil)[:6]), len(rules))
}

// AddRules adds a chain's rules, with comments by which DigestOf knows them again.
func (t *Tx) AddRules(table, chain, digest string, rules [][]Expr) {
	for i, r := range rules {
		t.AddRule(table, chain, Rule{Comment: ruleComment(digest, i+1), Exprs: r})
	}
}

func ruleComment(digest string, i int) string { return fmt.Sprintf("%s: %d", digest, i) }

// DigestOf returns a chain's digest from its rules' comments; of a chain that was tampered with it says so.
func DigestOf(comments []string) string {
	if len(comments) == 0 {
		return emptyChain
	}
	digest, _, _ := strings.Cut(comments[0], ": ")
	for i, c := range comments {
		if c != ruleComment(digest, i+1) {
			return fmt.Sprintf("rule %d altered", i+1)
		}
	}
	if !strings.HasSuffix(digest, fmt.Sprintf(" of %d", len(comments))) {
		return fmt.Sprintf("%d rules of %s", len(comments), digest)
	}
	return digest
}

// Digests reads the digest of every chain of a table, by name.
func (c *Conn) Digests(table string) (map[string]string, error) {
	names, err := c.Chains(table)
	if err != nil {
		return nil, err
	}
	rules, err := c.Rules(table)
	if err != nil {
		return nil, err
	}
	comments := map[string][]string{}
	for _, r := range rules {
		comments[r.Chain] = append(comments[r.Chain], r.Comment)
	}
	digests := map[string]string{}
	for _, n := range names {
		digests[n] = DigestOf(comments[n])
	}
	return digests, nil
}

const gotoText, jumpText = "goto ", "jump "

// String returns "drop", "accept", "return", "goto CHAIN" or "jump CHAIN", and of another verdict its number.
func (v Verdict) String() string {
	switch v {
	case DropIt:
		return "drop"
	case Accept:
		return "accept"
	case Return:
		return "return"
	case Goto(v.Chain):
		return gotoText + v.Chain
	case Jump(v.Chain):
		return jumpText + v.Chain
	}
	return fmt.Sprintf("verdict %d %s", v.Code, v.Chain)
}

// ParseVerdict reads what String gave.
func ParseVerdict(text string) (Verdict, error) {
	if chain, ok := strings.CutPrefix(text, gotoText); ok {
		return Goto(chain), nil
	}
	if chain, ok := strings.CutPrefix(text, jumpText); ok {
		return Jump(chain), nil
	}
	for _, v := range []Verdict{DropIt, Accept, Return} {
		if text == v.String() {
			return v, nil
		}
	}
	return Verdict{}, fmt.Errorf("nftables: %q is no verdict", text)
}
