package config

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// said is a log that tells of each line.
type said struct {
	text  bytes.Buffer
	lines chan string
}

func (s *said) Write(b []byte) (int, error) {
	s.lines <- string(b)
	return s.text.Write(b)
}

// TestFollow: a mounted file that is replaced by a wrong one changes nothing, by one that comes to the same neither, and by
// another is given on.
func TestFollow(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "config.conf")
	write := func(text string) {
		t.Helper()
		next := filepath.Join(dir, "next")
		if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, file); err != nil {
			t.Fatal(err)
		}
	}
	write(head)
	f, fs := &Flags{}, pflag.NewFlagSet("", pflag.ContinueOnError)
	f.Add(fs)
	if err := fs.Parse([]string{"--config", file}); err != nil {
		t.Fatal(err)
	}
	in, err := f.Load()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	log := &said{lines: make(chan string, 10)}
	stopped := make(chan struct{})
	next := f.Follow(ctx, in, slog.New(slog.NewTextHandler(log, nil)), func() { close(stopped) })
	write(head + "oomScoreAdj: 5000")
	select {
	case line := <-log.lines:
		if !strings.Contains(line, "oomScoreAdj") || !strings.Contains(line, "last one stays") {
			t.Errorf("it says: %s", line)
		}
	case <-next:
		t.Fatal("a wrong file was taken")
	case <-ctx.Done():
		t.Fatal("a wrong file was not named")
	}
	write(head + "# the same\n")
	write(head + "mode: ipvs")
	select {
	case c := <-next:
		if c == nil || c.Own.Mode != "ipvs" {
			t.Fatalf("%+v", c)
		}
	case <-ctx.Done():
		t.Fatal("another file was not taken")
	}
	<-stopped
}
