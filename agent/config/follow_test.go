package config

import (
	"bytes"
	"context"
	"errors"
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

// TestFollow: a mounted file that is replaced by a wrong one changes nothing, by one that comes to the same neither,
// and by another is given on.
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
	var reported []error
	next := f.Follow(ctx, in, Following{
		Log: slog.New(slog.NewTextHandler(log, nil)),
		Check: func(_ context.Context, c *Config) error {
			if c.Own.Mode == "iptables" {
				return errors.New("not in this kernel")
			}
			return nil
		},
		Report: func(err error) { reported = append(reported, err) },
		Stop:   func() { close(stopped) },
	})
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
	write(head + "mode: iptables")
	select {
	case line := <-log.lines:
		if !strings.Contains(line, "not in this kernel") || !strings.Contains(line, "last one stays") {
			t.Errorf("it says: %s", line)
		}
	case <-next:
		t.Fatal("a configuration that can't come into force was taken")
	case <-ctx.Done():
		t.Fatal("a configuration that can't come into force was not named")
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
	if len(reported) < 2 || reported[0] == nil || reported[1] == nil {
		t.Errorf("reported: %v", reported)
	}
}

// A configuration that could not be started is not tried again until the file changes, and its end is reported.
func TestFollowDespite(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.conf")
	load := func(text string) (*Flags, *Config) {
		t.Helper()
		f, fs := &Flags{}, pflag.NewFlagSet("", pflag.ContinueOnError)
		f.Add(fs)
		err := os.WriteFile(file, []byte(text), 0o600)
		if err == nil {
			err = fs.Parse([]string{"--config", file})
		}
		c, lerr := f.Load()
		if err = errors.Join(err, lerr); err != nil {
			t.Fatal(err)
		}
		return f, c
	}
	_, good := load(head)
	f, refused := load(head + "mode: ipvs")
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	reported := make(chan error)
	next := f.Follow(ctx, good.Despite(refused), Following{Log: slog.New(slog.DiscardHandler),
		Report: func(err error) { reported <- err }, Stop: stop})
	if err := os.WriteFile(file, []byte(head), 0o600); err != nil { // as it was before
		t.Fatal(err)
	}
	select {
	case err := <-reported:
		if err != nil {
			t.Errorf("reported: %v", err)
		}
	case c := <-next:
		t.Errorf("the refused configuration was taken again: %+v", c)
	case <-ctx.Done():
		t.Error("nothing was reported")
	}
}
