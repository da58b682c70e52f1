package bpf

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Writers lets processes that write into the maps of one folder learn of each other, and of pins that are removed: the
// kernel reports no write into a map. It is an instance of inotify(7), made when first needed.
type Writers struct {
	folder    string
	id        string // of this writer
	announced bool   // the others know that this one writes

	mu     sync.Mutex
	file   *os.File
	missed bool // another may have announced a write since Listen, unseen
}

// NewWriters returns a writer into the maps of a folder.
func NewWriters(folder string) *Writers { return &Writers{folder: folder, id: rand.Text()} }

// Close closes it.
func (w *Writers) Close() {
	if w.file != nil {
		w.file.Close()
	}
}

// watch adds a folder: its events are read also by a Read of file that comes later.
func (w *Writers) watch(folder string, mask uint32) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file == nil {
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if err != nil {
			return fmt.Errorf("bpf: watch pins: %w; is fs.inotify.max_user_instances used up?", err)
		}
		w.file = os.NewFile(uintptr(fd), "inotify")
	}
	raw, err := w.file.SyscallConn()
	if err != nil {
		return err
	}
	var refused error
	err = raw.Control(func(fd uintptr) { _, refused = unix.InotifyAddWatch(int(fd), folder, mask) })
	if err = errors.Join(err, refused); err != nil {
		return fmt.Errorf("bpf: watch %s: %w", folder, err)
	}
	return nil
}

// Listen receives announcements of others from now on, so that none is missed between a reading of the maps, which it
// precedes, and Watch. Without inotify everything works but that: Watch returns the error. The next Write is announced.
func (w *Writers) Listen() {
	err := w.watch(w.folder, unix.IN_CREATE)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.missed, w.announced = err != nil, false
}

// Write calls write. The others are informed of the first time after each Listen: before, since this process may be
// killed, and after, since they may have read in between.
func (w *Writers) Write(write func() error) error {
	if w.announced {
		return write()
	}
	if err := w.announce(); err != nil {
		return err
	}
	err := write()
	w.announced = err == nil
	return errors.Join(err, w.announce())
}

// writer begins the name of a folder that a writer makes for a moment.
const writer = "writer-"

// announce informs the others: what they have read may be stale.
func (w *Writers) announce() error {
	path := filepath.Join(w.folder, writer+w.id)
	err := os.Mkdir(path, 0o700)
	if err == nil || errors.Is(err, fs.ErrExist) {
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // without a folder, there is no other
		return fmt.Errorf("bpf: announce a write: %w", err)
	}
	return nil
}

// Watch calls changed when others write, and when pins in the folders of links are removed, until ctx ends or one of
// those folders is removed; then it closes the channel. Without a folder the error is fs.ErrNotExist.
func (w *Writers) Watch(ctx context.Context, links []string, changed func(other bool)) (<-chan struct{}, error) {
	err := w.watch(w.folder, unix.IN_CREATE)
	for _, folder := range links {
		if err == nil {
			err = w.watch(folder, unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_DELETE_SELF)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := w.file.SetReadDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("bpf: watch pins: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { w.file.SetReadDeadline(time.Now()) })
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer stop()
		w.mu.Lock()
		missed := w.missed
		w.mu.Unlock()
		changed(missed)
		for b := make([]byte, 4096); ; {
			n, err := w.file.Read(b)
			if err != nil {
				return
			}
			gone, other := w.parse(b[:n])
			changed(other)
			if gone {
				return // watch the new folder
			}
		}
	}()
	return ended, nil
}

// parse parses events (struct inotify_event of inotify(7)): whether a folder of links was removed, and whether another
// writer announced itself.
func (w *Writers) parse(b []byte) (gone, other bool) {
	for len(b) >= unix.SizeofInotifyEvent {
		mask, length := binary.NativeEndian.Uint32(b[4:]), int(binary.NativeEndian.Uint32(b[12:]))
		b = b[unix.SizeofInotifyEvent:]
		if length > len(b) {
			return gone, other
		}
		name := string(bytes.TrimRight(b[:length], "\x00"))
		b = b[length:]
		gone = gone || mask&(unix.IN_DELETE_SELF|unix.IN_IGNORED) != 0
		other = other || mask&unix.IN_Q_OVERFLOW != 0
		other = other || strings.HasPrefix(name, writer) && name != writer+w.id
	}
	return gone, other
}
