package flowlog

import (
	"bytes"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"fairlead.dev/fairlead/model"
)

func flow(client, server End, port uint16, count uint64) Flow {
	return Flow{Client: client, Server: server, Protocol: model.TCP, Port: port, Count: count}
}

func end(addr, pod string) End { return End{netip.MustParseAddr(addr), pod} }

func sample() *File {
	at := time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)
	return &File{Header: Header{Kind: Kind, Version: Version, Node: "a", Start: at, End: at.Add(time.Minute), Lost: 3},
		Pods: map[string]Pod{"shop/web-1": {"shop/web-1", "a", map[string]string{"app": "web"}}, "shop/db-0": {"shop/db-0",
			"b", nil}},
		Flows: []Flow{flow(end("10.0.0.1", "shop/web-1"), end("10.0.1.1", "shop/db-0"), 5432, 7),
			flow(end("2001:db8::9", ""), end("fd00::1", "shop/web-1"), 80, 1)}}
}

func text(t testing.TB, f *File) string {
	var b bytes.Buffer
	if err := f.Write(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestReadsWhatIsWritten(t *testing.T) {
	f := sample()
	written := text(t, f)
	got, err := Parse(strings.NewReader(written))
	if err != nil {
		t.Fatal(err)
	}
	if again := text(t, got); again != written || len(got.Flows) != 2 || !reflect.DeepEqual(got.Header, f.Header) ||
		!reflect.DeepEqual(got.Pods, f.Pods) {
		t.Errorf("written:\n%sread and written again:\n%s", written, again)
	}
}

func TestErrorsNameTheLine(t *testing.T) {
	head, rest, _ := strings.Cut(text(t, sample()), "\n")
	for name, c := range map[string]struct{ text, want string }{
		"empty":         {"", "the file is empty"},
		"other file":    {"apiVersion: v1\n", "line 1: no recorded flows"},
		"other version": {`{"kind":"fairlead-flows","version":2}`, "line 1: version 2 of the format"},
		"cut off":       {head + "\n" + rest[:len(rest)-20], "line 5: unexpected end of JSON input"},
		"unknown pod":   {head + "\n" + rest[strings.Index(rest, `{"from"`):], "line 2: pod \"shop/web-1\" of a flow"},
		"no port": {head + `
{"from":{"ip":"10.0.0.1"},"to":{"ip":"10.0.0.2"},"protocol":6,"connections":1}`, "line 2: invalid flow"},
		"too many": {head + `
{"from":{"ip":"10.0.0.1"},"to":{"ip":"10.0.0.2"},"protocol":6,"port":1,"connections":18446744073709551615}`,
			"line 2: invalid flow"},
		"too many lost": {strings.Replace(head, `"lost":3`, `"lost":18446744073709551615`, 1), "line 1: invalid header"},
		"a node's name": {strings.Replace(head, `"node":"a"`, `"node":"\u001b[2J"`, 1), "line 1: invalid header"},
		"two families": {head + `
{"from":{"ip":"10.0.0.1"},"to":{"ip":"::2"},"protocol":6,"port":1,"connections":1}`, "line 2: invalid flow"},
		"unknown field": {head + `
{"pod":"a/b","node":"a","lables":{}}`, `line 2: json: unknown field "lables"`},
		"control characters": {head + `
{"pod":"a/b\n# c","node":"a"}`, "line 2: invalid pod"},
		"long line": {head + "\n" + strings.Repeat(" ", maxLine), "line 2: bufio.Scanner: token too long"},
	} {
		if _, err := Parse(strings.NewReader(c.text)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
	}
}

func TestMergeCountsAConnectionOnce(t *testing.T) {
	a, b, later := sample(), sample(), sample()
	b.Node = "b"
	b.Flows[0].Count = 5
	l := Merge(a, b, later)
	for _, f := range l.Flows {
		if want := 2 * map[uint16]uint64{5432: 7, 80: 1}[f.Port]; f.Count != want || len(f.Nodes) != 2 {
			t.Errorf("%s: %d connections on %v, want %d", f.Key(), f.Count, f.Nodes, want)
		}
	}
	if lost, _, _ := l.Missing(); len(l.Flows) != 2 || lost != 9 || len(l.Nodes()) != 2 {
		t.Errorf("%+v", l)
	}
}

// FuzzParse has what was read be valid, no longer than its text lets it be, the same once it is written and read again,
// and counted whole where it is merged.
func FuzzParse(f *testing.F) {
	written := text(f, sample())
	f.Add(written)
	head, _, _ := strings.Cut(written, "\n")
	f.Add(head + `
{"pod":"a/b","node":"n","labels":{"k":""}}
{"from":{"ip":"::ffff:10.0.0.1","pod":"a/b"},"to":{"ip":"10.0.0.2"},"protocol":1,"connections":1}
{"from":{"ip":"10.0.0.1","pod":"a/b"},"to":{"ip":"10.0.0.2"},"protocol":132,"port":7,"denied":18446744073709551615}
{"from":{"ip":"10.0.0.1","pod":"a/b"},"to":{"ip":"10.0.0.2"},"protocol":132,"port":7,"connections":5}
{"from":{"ip":"10.0.0.1","pod":"a/b"},"to":{"ip":"10.0.0.2"},"protocol":132,"port":7,"connections":18446744073709551615}
`)
	f.Fuzz(func(t *testing.T, s string) {
		got, err := Parse(strings.NewReader(s))
		if err != nil {
			return
		}
		for _, x := range got.Flows {
			for _, e := range []End{x.Client, x.Server} {
				if _, known := got.Pods[e.Pod]; !e.Addr.IsValid() || e.Addr.Is4In6() || e.Addr.Zone() != "" ||
					!known && e.Pod != "" {
					t.Errorf("%+v", e)
				}
			}
		}
		written := text(t, got)
		const escape, line = 6, 256 // bytes of an escaped one, and of all fields' names
		if most := escape*len(s) + line*(strings.Count(s, "\n")+1); len(written) > most {
			t.Errorf("%d bytes of %d, at most %d", len(written), len(s), most)
		}
		if strings.ContainsFunc(written, func(r rune) bool { return unicode.IsControl(r) && r != '\n' }) {
			t.Errorf("control characters in %q", written)
		}
		again, err := Parse(strings.NewReader(written))
		if err != nil || text(t, again) != written {
			t.Fatalf("%v: %q", err, written)
		}
		for _, l := range []*Log{Merge(got), Merge(got, again)} {
			for _, x := range got.Flows {
				i, there := slices.BinarySearchFunc(l.Flows, x.Key(), func(s Seen, k Key) int { return s.Key().Compare(k) })
				if there != (x.Count > 0) && !hasCount(got, x.Key()) || there && (l.Flows[i].Count < x.Count ||
					!slices.Equal(l.Flows[i].Nodes, []string{got.Node})) {
					t.Errorf("%+v is merged to %+v", x, l.Flows)
				}
			}
		}
	})
}

// hasCount reports whether a file has connections of a flow, in any of its lines.
func hasCount(f *File, k Key) bool {
	return slices.ContainsFunc(f.Flows, func(x Flow) bool { return x.Key() == k && x.Count > 0 })
}
