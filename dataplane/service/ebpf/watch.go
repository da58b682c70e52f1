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

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Watch implements dataplane.Watcher: it tells when pins of hooks are removed, and when another plane writes (see announce).
// Of what others write into maps past this package, the kernel tells nobody.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("ebpf: watch the hooks: %w", err)
	}
	events := os.NewFile(uintptr(fd), "inotify")
	signals := make(chan struct{}, 1)
	_, err = unix.InotifyAddWatch(fd, p.folder, unix.IN_CREATE)
	if err == nil {
		_, err = unix.InotifyAddWatch(fd, p.linksFolder(), unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_DELETE_SELF)
	}
	if err == nil && Packets() {
		_, err = unix.InotifyAddWatch(fd, p.devices.links(), unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_DELETE_SELF)
	}
	if errors.Is(err, unix.ENOENT) { // there will be one to watch when the hooks are there again
		defer close(signals)
		p.tell(signals, false)
		return signals, events.Close()
	}
	if err != nil {
		events.Close()
		return nil, fmt.Errorf("ebpf: watch %s: %w", p.linksFolder(), err)
	}
	ctx, end := context.WithCancel(ctx)
	followed, err := p.watchDevices(ctx, func() { p.tell(signals, true) })
	if err != nil {
		end()
		events.Close()
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { events.Close() })
	go func() {
		defer close(signals)
		defer func() { end(); <-followed }()
		defer stop()
		defer events.Close()
		p.tell(signals, false)
		for b := make([]byte, 4096); ; {
			n, err := events.Read(b)
			if err != nil {
				return
			}
			gone, other := p.heard(b[:n])
			failed := p.devices.follow() != nil
			p.tell(signals, other || failed)
			if gone {
				return // watch the new folder
			}
		}
	}()
	return signals, nil
}

// tell sends a signal if another wrote, or the hooks or programs at devices are not as they were written and that is not our own
// doing.
func (p *Plane) tell(signals chan<- struct{}, other bool) {
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

// heard reads events (struct inotify_event of inotify(7)): whether the folder of links was removed, and whether another plane
// announced itself.
func (p *Plane) heard(b []byte) (gone, other bool) {
	for len(b) >= unix.SizeofInotifyEvent {
		mask, length := binary.NativeEndian.Uint32(b[4:]), int(binary.NativeEndian.Uint32(b[12:]))
		b = b[unix.SizeofInotifyEvent:]
		if length > len(b) {
			return gone, other
		}
		name := string(bytes.TrimRight(b[:length], "\x00"))
		b = b[length:]
		gone = gone || mask&(unix.IN_DELETE_SELF|unix.IN_IGNORED) != 0
		other = other || strings.HasPrefix(name, writer) && name != writer+p.id
	}
	return gone, other
}

// writer begins the name of a folder that a plane makes for a moment.
const writer = "writer-"

// announce lets other planes of this node know that we write, once after each Read: theirs may be stale from now on.
func (p *Plane) announce(*writes) error {
	if p.announced || p.maps == nil {
		return nil
	}
	path := filepath.Join(p.folder, writer+p.id)
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("ebpf: announce a write: %w", err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("ebpf: announce a write: %w", err)
	}
	p.announced = true
	return nil
}
