package nftables

import (
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/kernel/netlink"
)

// decoded returns the elements that a transaction's messages hold, message by message.
func decoded(t *testing.T, tx *Tx) (es []Element, messages int) {
	t.Helper()
	for i := range tx.batch.Len() {
		messages++
		list := netlink.Find(tx.batch.Body(i)[header:], 3)
		whole := 0
		for _, v := range netlink.Attributes(list) {
			es = append(es, element(v))
			whole += 4 + len(v)
		}
		if whole != len(list) {
			t.Errorf("%d bytes of attributes in %d", whole, len(list))
		}
	}
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
		if g.Key != w.Key || g.End != w.End || g.Data != w.Data || (g.Verdict == nil) != (w.Verdict == nil) ||
			w.Verdict != nil && *g.Verdict != *w.Verdict {
			t.Errorf("%d: %+v, want %+v", i, g, w)
		}
	}
}

func TestRangesInOneFieldAreReadAsWritten(t *testing.T) {
	s := Set{Name: "s", Key: []Type{IntegerOf(2)}, Data: []Type{Mark}, Interval: true}
	for _, ranges := range [][]string{{"\x00\x00\xff\xff"}, {"\x00\x00\x00\x00"}, {"\xff\xff\xff\xff"},
		{"\x00\x01\x00\xff", "\x01\x00\x01\x00", "\x01\x02\xff\xfe"}, {"\x02\x00\x03\xff", "\x04\x00\xff\xff"}, nil} {
		var want []Element
		for i, r := range ranges {
			want = append(want, s.Element(r, string([]byte{byte(i), 0, 0, 0})))
		}
		var tx Tx
		tx.AddElements("t", "s", want)
		got, _ := decoded(t, &tx)
		slices.Reverse(got)
		if got = s.join(got); !slices.Equal(got, want) {
			t.Errorf("%+v, want %+v", got, want)
		}
		var del Tx
		del.DelElements("t", "s", want)
		if parts, _ := decoded(t, &del); slices.ContainsFunc(parts, func(e Element) bool { return e.Data != "" }) {
			t.Errorf("deletions have data: %+v", parts)
		}
	}
}

func TestManyElementsNeedSeveralMessages(t *testing.T) {
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

func FuzzReplies(f *testing.F) {
	var tx Tx
	to := Goto("x")
	tx.AddElements("t", "s", []Element{{Key: "abcd", Data: "12"}, {Key: "a", Verdict: &to}})
	f.Add(netlink.Marker(1, tx.batch.Body(0)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		for m := range netlink.Messages(b) {
			concerns(m, "t")
			for _, v := range m.Attributes(header) {
				for _, v := range netlink.Attributes(v) {
					element(v)
				}
				commentOf(v)
				netlink.Text(v)
				number(v)
			}
			_ = m.Err()
		}
	})
}
