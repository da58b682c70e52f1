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

// Following is what becomes of a configuration file's changes.
type Following struct {
	Log *slog.Logger
	// returns why a valid configuration can't come into force here; nil: each can
	Check  func(context.Context, *Config) error
	Report func(error) // is called with why the file's content is not in force, nil once it is; nil: it is logged alone
	Stop   func()      // is called once another configuration is to come into force
}

// Follow watches the file of a configuration that is in force. When it comes to hold another that is valid and can come
// into force, Follow calls Stop. The channel receives that one, or nil once ctx has ended without. A file that is
// wrong, or gone, is logged and reported, and changes nothing.
func (f *Flags) Follow(ctx context.Context, in *Config, o Following) <-chan *Config {
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
		o.Log.Warn("watching the configuration file failed; changes apply at the next start", "file", f.File, "error", err)
		close(next)
		return next
	}
	go func() {
		defer close(next)
		defer w.Close()
		if c := f.changed(ctx, w, in, o); c != nil {
			next <- c
			o.Stop()
		}
	}()
	return next
}

// changed waits for another configuration that can come into force; nil when ctx has ended before.
func (f *Flags) changed(ctx context.Context, w *fsnotify.Watcher, in *Config, o Following) *Config {
	known := in.text
	settled := time.After(settle) // it may have changed before it was watched
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.Events:
			settled = time.After(settle)
			continue
		case err := <-w.Errors:
			o.Log.Warn("watching the configuration file failed", "file", f.File, "error", err)
			continue
		case <-settled:
		}
		settled = nil
		now, err := os.ReadFile(f.File)
		if err == nil && bytes.Equal(now, known) {
			continue
		}
		known = now
		c, err := f.Load()
		if err == nil && !c.Equal(in) {
			if o.Check != nil {
				err = o.Check(ctx, c)
			}
			if ctx.Err() != nil {
				return nil
			}
			if err == nil {
				return c
			}
		}
		if err != nil {
			o.Log.Error("the changed configuration file was rejected; the last one stays in force", "error", err)
		}
		if o.Report != nil {
			o.Report(err)
		}
	}
}

// Despite returns c as it is in force although the file holds refused: that is not read again until it changes.
func (c *Config) Despite(refused *Config) *Config {
	merged := *c
	merged.text = refused.text
	return &merged
}
