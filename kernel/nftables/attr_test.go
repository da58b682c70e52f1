package nftables

import (
	"strings"
	"testing"

	"fairlead.dev/fairlead/kernel/nlattr"
)

// decoded gives the elements that a transaction's messages hold, message by message.
func decoded(t *testing.T, tx *Tx) (es []Element, messages int) {
	t.Helper()
	eachMessage(tx.b, func(_, _ uint16, _ uint32, body []byte) {
		messages++
		if err := nlattr.Each(nlattr.Find(body[4:], 3), func(_ uint16, v []byte) { es = append(es, element(v)) }); err != nil {
			t.Error(err)
		}
	})
	return es, messages
}

func TestElementsAreReadAsWritten(t *testing.T) {
	to := Goto("pick4-10")
	want := []Element{
		{Key: "abcd"},
		{Key: "abcdef", Data: "12345"}, // lengths that need padding
		{Key: "a", End: "b"},
		{Key: "abcd", Verdict: &to},
		{Key: "abcd", Verdict: &DropIt},
	}
	var tx Tx
	tx.AddElements("t", "s", want)
	got, _ := decoded(t, &tx)
	if len(got) != len(want) {
		t.Fatalf("%d elements, want %d", len(got), len(want))
	}
	for i, w := range want {
		g := got[i]
		if g.Key != w.Key || g.End != w.End || g.Data != w.Data || (g.Verdict == nil) != (w.Verdict == nil) || w.Verdict != nil && *g.Verdict != *w.Verdict {
			t.Errorf("%d: %+v, want %+v", i, g, w)
		}
	}
}

func TestManyElementsTakeSeveralMessages(t *testing.T) {
	es := make([]Element, 10_000)
	for i := range es {
		es[i].Key = strings.Repeat("k", 28)
	}
	var tx Tx
	tx.AddElements("t", "s", es)
	got, messages := decoded(t, &tx)
	if len(got) != len(es) {
		t.Errorf("%d elements arrive of %d: a list is longer than its length can say", len(got), len(es))
	}
	if least := len(es) * 40 / (1 << 16); messages < least {
		t.Errorf("%d messages, want at least %d", messages, least)
	}
}

func TestCommentsAreReadAsWritten(t *testing.T) {
	for _, s := range []string{"", "0a1b2c3d4e5f of 3: 1", strings.Repeat("x", 127)} {
		if got := commentOf(comment(s)); got != s {
			t.Errorf("%q is read as %q", s, got)
		}
	}
}

func FuzzAnswers(f *testing.F) {
	var tx Tx
	to := Goto("x")
	tx.AddElements("t", "s", []Element{{Key: "abcd", Data: "12"}, {Key: "a", Verdict: &to}})
	f.Add([]byte(tx.b))
	f.Fuzz(func(t *testing.T, b []byte) {
		eachMessage(b, func(_, _ uint16, _ uint32, body []byte) {
			if len(body) < 4 {
				return
			}
			nlattr.Each(body[4:], func(_ uint16, v []byte) {
				nlattr.Each(v, func(_ uint16, v []byte) { element(v) })
				commentOf(v)
				nlattr.Text(v)
				number(v)
			})
			(&Tx{}).refused(0, 1, body)
		})
		concerns(b, "t")
	})
}
