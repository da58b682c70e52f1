package ebpf

import (
	"bytes"
	"context"
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

	"fairlead.dev/fairlead/kernel/bpf"
)

// Watch implements dataplane.Watcher: it signals when pins of hooks are removed, and when another plane writes (see
// announce). The kernel reports no other write into the maps.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	err := p.events.watch(p.folder, unix.IN_CREATE)
	if err == nil {
		err = p.events.watch(p.linksFolder(), unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_DELETE_SELF)
	}
	if err == nil && Packets() {
		err = p.events.watch(p.devices.links(), unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_DELETE_SELF)
	}
	signals := make(chan struct{}, 1)
	if errors.Is(err, fs.ErrNotExist) { // there will be one to watch when the hooks are there again
		defer close(signals)
		p.signal(signals, false)
		return signals, nil
	}
	if err != nil {
		return nil, err
	}
	if err := p.events.file.SetReadDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("ebpf: watch the hooks: %w", err)
	}
	ctx, end := context.WithCancel(ctx)
	followed, err := p.watchDevices(ctx, func(other bool) { p.signal(signals, other) })
	if err != nil {
		end()
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { p.events.file.SetReadDeadline(time.Now()) })
	go func() {
		defer close(signals)
		defer func() { end(); <-followed }()
		defer stop()
		p.events.mu.Lock()
		missed := p.events.missed
		p.events.mu.Unlock()
		p.signal(signals, missed)
		for b := make([]byte, 4096); ; {
			n, err := p.events.file.Read(b)
			if err != nil {
				return
			}
			gone, other := p.parseEvents(b[:n])
			p.signal(signals, other)
			if gone {
				return // watch the new folder
			}
		}
	}()
	return signals, nil
}

// events is an instance of inotify(7) for the folders of pins, made when first needed.
type events struct {
	mu     sync.Mutex
	file   *os.File
	missed bool // another plane may have announced a write since the last Read, unseen
}

// watch adds a folder: its events are read also by a Read of file that comes later.
func (e *events) watch(folder string, mask uint32) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.file == nil {
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if err != nil {
			return fmt.Errorf("ebpf: watch the hooks: %w; is fs.inotify.max_user_instances used up?", err)
		}
		e.file = os.NewFile(uintptr(fd), "inotify")
	}
	raw, err := e.file.SyscallConn()
	if err != nil {
		return err
	}
	var refused error
	err = raw.Control(func(fd uintptr) { _, refused = unix.InotifyAddWatch(int(fd), folder, mask) })
	if err = errors.Join(err, refused); err != nil {
		return fmt.Errorf("ebpf: watch %s: %w", folder, err)
	}
	return nil
}

func (e *events) close() {
	if e.file != nil {
		e.file.Close()
	}
}

// listen receives announcements of other planes from now on, so that none is missed between a Read, which it
// precedes, and Watch. Without inotify everything works but that: Watch reports the error.
func (p *Plane) listen() {
	err := p.events.watch(p.folder, unix.IN_CREATE)
	p.events.mu.Lock()
	defer p.events.mu.Unlock()
	p.events.missed = err != nil
}

// signal sends a signal if another plane wrote, or if the hooks or programs at devices are not as they were written
// and that is not our own doing.
func (p *Plane) signal(signals chan<- struct{}, other bool) {
	if !other && !p.devices.lost() {
		if !p.hooked.Load() {
			return
		}
		if digest, err := bpf.Attached(p.linksFolder(), nil); err == nil && digest == p.digest {
			return
		}
	}
	select {
	case signals <- struct{}{}:
	default:
	}
}

// parseEvents parses events (struct inotify_event of inotify(7)): whether the folder of links was removed, and
// whether another plane announced itself.
func (p *Plane) parseEvents(b []byte) (gone, other bool) {
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
		other = other || strings.HasPrefix(name, writer) && name != writer+p.id
	}
	return gone, other
}

// writer begins the name of a folder that a plane makes for a moment.
const writer = "writer-"

// announce informs other planes of this node that we write: what they have read may be stale.
func (p *Plane) announce() error {
	path := filepath.Join(p.folder, writer+p.id)
	err := os.Mkdir(path, 0o700)
	if err == nil || errors.Is(err, fs.ErrExist) {
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // without a folder, there is no other
		return fmt.Errorf("ebpf: announce a write: %w", err)
	}
	return nil
}
