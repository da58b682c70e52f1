package flowlog

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"unicode"
)

// The bounds of what is read.
const (
	maxLine  = 64 << 10 // bytes
	maxLines = 2 << 20
	maxCount = 1 << 40 // of connections, so that no sum overflows
)

// Read reads a file. Errors name it and the line.
func Read(name string) (*File, error) {
	r, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	f, err := Parse(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return f, nil
}

// Parse reads what Write has written.
func Parse(r io.Reader) (*File, error) {
	f := &File{Pods: map[string]Pod{}}
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 4<<10), maxLine)
	n := 0
	for s.Scan() {
		if n++; n > maxLines {
			return nil, fmt.Errorf("line %d: more than %d lines: record for a shorter time", n, maxLines)
		}
		read := f.line
		if n == 1 {
			read = f.header
		}
		if err := read(s.Bytes()); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w: at most %d bytes are read", n+1, err, maxLine)
	}
	if n == 0 {
		return nil, errors.New("the file is empty: name one that `fairlead flows record` wrote")
	}
	return f, nil
}

// decode reads a JSON object whole, of no field that v lacks.
func decode(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one JSON object")
	}
	return nil
}

func (f *File) header(b []byte) error {
	var version struct {
		Kind    string `json:"kind"`
		Version int    `json:"version"`
	}
	if err := json.Unmarshal(b, &version); err != nil || version.Kind != Kind {
		return fmt.Errorf("no recorded flows: a file begins with {\"kind\":%q,…}", Kind)
	}
	if version.Version != Version {
		return fmt.Errorf("version %d of the format: this program reads version %d", version.Version, Version)
	}
	if err := decode(b, &f.Header); err != nil {
		return err
	}
	if n := max(f.Lost, f.Beyond, f.Unclear); n > maxCount || !printable(f.Node) {
		return fmt.Errorf("invalid header: node %q, %d connections missing", f.Node, n)
	}
	return nil
}

// line reads a pod or a flow.
func (f *File) line(b []byte) error {
	var kind struct {
		From json.RawMessage `json:"from"`
	}
	if err := json.Unmarshal(b, &kind); err != nil {
		return err
	}
	if kind.From == nil {
		var p Pod
		if err := decode(b, &p); err != nil {
			return err
		}
		if err := p.check(); err != nil {
			return err
		}
		f.Pods[p.Name] = p
		return nil
	}
	var flow Flow
	if err := decode(b, &flow); err != nil {
		return err
	}
	for _, e := range []*End{&flow.Client, &flow.Server} {
		if err := f.check(e); err != nil {
			return err
		}
	}
	n := max(flow.Count, flow.Denied)
	if n == 0 || n > maxCount || flow.Protocol == 0 || flow.Client.Addr.Is4() != flow.Server.Addr.Is4() ||
		HasPorts(flow.Protocol) != (flow.Port > 0) {
		return fmt.Errorf("invalid flow %s of %d connections", flow.Key(), n)
	}
	f.Flows = append(f.Flows, flow)
	return nil
}

// check checks an end, and returns its address to the form that addresses are compared in.
func (f *File) check(e *End) error {
	if !e.Addr.IsValid() || e.Addr.Zone() != "" {
		return fmt.Errorf("invalid address %q of a flow", e.Addr)
	}
	e.Addr = netip.Addr.Unmap(e.Addr)
	if _, known := f.Pods[e.Pod]; !known && e.Pod != "" {
		return fmt.Errorf("pod %q of a flow: no line before describes it", e.Pod)
	}
	return nil
}

// check checks the texts of a pod: they are printed.
func (p Pod) check() error {
	namespace, name, cut := strings.Cut(p.Name, "/")
	if !cut || namespace == "" || name == "" || !printable(p.Name) || !printable(p.Node) {
		return fmt.Errorf("invalid pod %q on node %q: use namespace/name", p.Name, p.Node)
	}
	for k, v := range p.Labels {
		if k == "" || !printable(k) || !printable(v) {
			return fmt.Errorf("invalid label %q: %q of pod %s", k, v, p.Name)
		}
	}
	return nil
}

// printable reports whether a text has no space and no control character, and is no longer than names and labels are.
func printable(s string) bool {
	bad := func(r rune) bool { return !unicode.IsPrint(r) || unicode.IsSpace(r) }
	return len(s) <= 512 && strings.IndexFunc(s, bad) < 0
}
