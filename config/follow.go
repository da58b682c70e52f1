package config

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settle is how long a file must be left alone before it is read: a mounted ConfigMap changes in several steps.
const settle = 100 * time.Millisecond

// Follow watches the file of a configuration that is in force. When it comes to hold another valid one, Follow calls stop. The
// channel gives that one, or nil once ctx has ended without. A file that is wrong, or gone, is logged and changes nothing.
func (f *Flags) Follow(ctx context.Context, in *Config, log *slog.Logger, stop func()) <-chan *Config {
	next := make(chan *Config, 1)
	if f.File == "" {
		close(next)
		return next
	}
	w, err := fsnotify.NewWatcher()
	if err == nil {
		err = w.Add(filepath.Dir(f.File)) // the folder: editors and mounts put another file in its place
	}
	if err != nil {
		log.Warn("the configuration file can't be watched: its changes are taken up at the next start", "file", f.File, "error", err)
		close(next)
		return next
	}
	go func() {
		defer close(next)
		defer w.Close()
		if c := f.changed(ctx, w, in, log); c != nil {
			next <- c
			stop()
		}
	}()
	return next
}

// changed waits for another valid configuration; nil when ctx has ended before.
func (f *Flags) changed(ctx context.Context, w *fsnotify.Watcher, in *Config, log *slog.Logger) *Config {
	known := in.text
	look := time.After(settle) // it may have changed before it was watched
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.Events:
			look = time.After(settle)
			continue
		case err := <-w.Errors:
			log.Warn("watching the configuration file", "file", f.File, "error", err)
			continue
		case <-look:
		}
		look = nil
		now, err := os.ReadFile(f.File)
		if err == nil && bytes.Equal(now, known) {
			continue
		}
		known = now
		c, err := f.Load()
		switch {
		case err != nil:
			log.Error("the configuration file changed and can't be taken; the last one stays in force", "error", err)
		case !c.Equal(in):
			return c
		}
	}
}
