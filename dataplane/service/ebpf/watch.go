package ebpf

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Watch implements dataplane.Watcher for the hooks: it tells when links' pins are removed. What others write into maps, the
// kernel tells nobody.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("ebpf: watch the hooks: %w", err)
	}
	events := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, p.linksFolder(), unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_DELETE_SELF); err != nil {
		events.Close()
		return nil, fmt.Errorf("ebpf: watch %s: %w", p.linksFolder(), err)
	}
	signals := make(chan struct{}, 1)
	stop := context.AfterFunc(ctx, func() { events.Close() })
	go func() {
		defer stop()
		defer events.Close()
		defer close(signals)
		p.tell(signals)
		for b := make([]byte, 4096); ; {
			n, err := events.Read(b)
			if err != nil {
				return
			}
			p.tell(signals)
			if n >= 8 && lost(b[:n]) {
				return // the folder is gone: watch the new one
			}
		}
	}()
	return signals, nil
}

// tell sends a signal if the hooks are not as they were written, and that is not our own doing.
func (p *Plane) tell(signals chan<- struct{}) {
	if !p.hooked.Load() {
		return
	}
	if digest, err := bpf.Attached(p.linksFolder(), nil); err == nil && digest == p.digest {
		return
	}
	select {
	case signals <- struct{}{}:
	default:
	}
}

// lost says whether some event is that the folder itself was removed (struct inotify_event of inotify(7)).
func lost(b []byte) bool {
	for len(b) >= unix.SizeofInotifyEvent {
		mask := uint32(b[4]) | uint32(b[5])<<8 | uint32(b[6])<<16 | uint32(b[7])<<24
		if mask&(unix.IN_DELETE_SELF|unix.IN_IGNORED) != 0 {
			return true
		}
		length := uint32(b[12]) | uint32(b[13])<<8
		b = b[min(len(b), unix.SizeofInotifyEvent+int(length)):]
	}
	return false
}
