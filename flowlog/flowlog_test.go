package flowlog

import (
	"bytes"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

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

func FuzzParse(f *testing.F) {
	f.Add(text(f, sample()))
	f.Fuzz(func(t *testing.T, s string) {
		got, err := Parse(strings.NewReader(s))
		if err != nil {
			return
		}
		written := text(t, got)
		again, err := Parse(strings.NewReader(written))
		if err != nil || text(t, again) != written {
			t.Errorf("%v: %q", err, written)
		}
	})
}
