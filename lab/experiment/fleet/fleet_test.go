package fleet

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"fairlead.dev/fairlead/lab/labtest"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source/kube"
)

func TestDesign(t *testing.T) {
	for _, p := range []profile{quick, full} {
		r := &trial{profile: p, bed: &testbed.Testbed{Rand: rand.New(rand.NewPCG(1, 1))}}
		d := r.Design()
		labtest.AimsAreOfCells(t, d)
		if len(d.Aims) != 2*len(arms) {
			t.Errorf("%d aims", len(d.Aims))
		}
		lives := 0
		for _, s := range r.Steps(nil) {
			if s.Planned <= 0 {
				t.Errorf("%s is planned to take %v", s.Title, s.Planned)
			}
			if strings.Contains(s.Title, " agents, ") {
				lives++
			}
		}
		if want := p.Rounds * len(arms) * len(p.Agents); lives != want {
			t.Errorf("%d starts of agents, want %d", lives, want)
		}
	}
}

// Without a program there is nothing to measure, and the error says which to give.
func TestNoProgram(t *testing.T) {
	if err := (&trial{profile: quick}).serve(t.Context()); err == nil || !strings.Contains(err.Error(),
		"--subject control-plane=PATH") {
		t.Errorf("error %v", err)
	}
}

// Each message of a watch counts once, however its bytes come.
func TestMessagesAreCounted(t *testing.T) {
	var text []byte
	for _, n := range []int{1, 0, 300, 7} {
		text = append(binary.BigEndian.AppendUint32(text, uint32(n)), make([]byte, n)...)
	}
	for name, r := range map[string]io.Reader{"whole": bytes.NewReader(text),
		"by byte": iotest.OneByteReader(bytes.NewReader(text)), "in halves": iotest.HalfReader(bytes.NewReader(text))} {
		c := &traffic{bodies: map[string]int64{}, messages: map[string]int64{}}
		b := &body{ReadCloser: io.NopCloser(r), counts: c, of: "pods", framed: true}
		if _, err := io.Copy(io.Discard, b); err != nil {
			t.Fatal(err)
		}
		if c.messages["pods"] != 4 || c.bodies["pods"] != int64(len(text)) {
			t.Errorf("%s: %d messages, %d bytes of %d", name, c.messages["pods"], c.bodies["pods"], len(text))
		}
	}
}

// Agents are in sync with all objects of a cluster, and each has a connection of its own.
func TestAgentsStart(t *testing.T) {
	f := generate.Fleet{Nodes: 2, Pods: 15, Images: 2}
	s := apiserver.New(slices.Concat(f.Spaces(), f.Objects())...)
	url, stop, err := s.Start(here{}, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	}()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, apiserver.Kubeconfig(url), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, arm := range arms {
		a, err := start(t.Context(), 3, func(f func() error) error { return f() },
			func(i int) kube.Options { return options(arm, file, f.NodeName(0)) })
		if err != nil {
			t.Fatal(err)
		}
		if err := a.stop(); err != nil {
			t.Errorf("%s: %v", arm, err)
		}
		for i, c := range a.first {
			pods := 0
			if arm == armPolicies {
				pods = f.Nodes * f.Pods
			}
			if got := int(c.messages["pods"]); got < pods || pods == 0 && got > 0 || c.received == 0 || c.sent == 0 {
				t.Errorf("%s, agent %d: %+v", arm, i, c)
			}
			if c.refused+c.failed > 0 {
				t.Errorf("%s, agent %d: %d refused, %d failed", arm, i, c.refused, c.failed)
			}
		}
	}
}

// here is this process's own network namespace.
type here struct{}

// Do calls f.
func (here) Do(f func() error) error { return f() }

func TestMain(m *testing.M) { labtest.Main(m) }
