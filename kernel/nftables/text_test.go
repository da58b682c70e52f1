package nftables

import "testing"

func TestVerdictsAsText(t *testing.T) {
	for _, v := range []Verdict{DropIt, Accept, Return, Goto("a"), Jump("b c")} {
		if got, err := ParseVerdict(v.String()); got != v || err != nil {
			t.Errorf("%q is read as %v, %v", v, got, err)
		}
	}
	for _, text := range []string{"", "go", "verdict 7 x"} {
		if v, err := ParseVerdict(text); err == nil {
			t.Errorf("%q is read as %v", text, v)
		}
	}
}

func TestDigestShowsTampering(t *testing.T) {
	rules := [][]Expr{{Do(DropIt)}, {Do(Accept)}}
	digest := Digest(nil, rules)
	whole := []string{ruleComment(digest, 1), ruleComment(digest, 2)}
	if got := DigestOf(whole); got != digest {
		t.Errorf("%q is read as %q", digest, got)
	}
	if other := Digest(&Hook{Priority: 1}, rules); other == digest {
		t.Error("the hook is not part of the digest")
	}
	for _, comments := range [][]string{whole[:1], {whole[1], whole[0]}, {whole[0], "x"}, nil} {
		if got := DigestOf(comments); got == digest {
			t.Errorf("rules %q are read as whole", comments)
		}
	}
	if Digest(nil, nil) != DigestOf(nil) {
		t.Error("a chain without rules is read as something else")
	}
}
