package manifest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// What the kernel is asked to tell of a folder (inotify(7)). fsnotify leaves out the one event that matters most here,
// IN_CLOSE_WRITE: without it a file that is being written looks like one that has been.
const (
	nameEvents  = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO // names in it come and go
	writeEvents = unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_ATTRIB | unix.IN_EXCL_UNLINK
	selfEvents  = unix.IN_DELETE_SELF | unix.IN_MOVE_SELF // it goes itself
)

// An event is something that happened in a watched folder, or, with an empty name, to it.
type event struct {
	watch  int32
	mask   uint32
	cookie uint32 // the same for both sides of a move
	name   string
}

// A notifier receives events.
type notifier struct {
	file *os.File
	conn syscall.RawConn
	buf  [64 << 10]byte
}

func newNotifier() (*notifier, error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if errors.Is(err, unix.EMFILE) {
		return nil,
			fmt.Errorf("start inotify: %w: raise the sysctl fs.inotify.max_user_instances, or the limit of open files", err)
	} else if err != nil {
		return nil, fmt.Errorf("start inotify: %w", err)
	}
	n := &notifier{file: os.NewFile(uintptr(fd), "inotify")}
	n.conn, err = n.file.SyscallConn()
	return n, err
}

// add watches the folder dir for the events in mask, besides those that it is watched for already.
func (n *notifier) add(dir string, mask uint32) (watch int32, err error) {
	cerr := n.conn.Control(func(fd uintptr) {
		var wd int
		wd, err = unix.InotifyAddWatch(int(fd), dir, mask|unix.IN_ONLYDIR|unix.IN_MASK_ADD)
		watch = int32(wd)
	})
	if errors.Is(err, unix.ENOSPC) {
		err = fmt.Errorf("%w: raise the sysctl fs.inotify.max_user_watches", err)
	}
	return watch, errors.Join(cerr, err)
}

func (n *notifier) remove(watch int32) {
	_ = n.conn.Control(func(fd uintptr) { _, _ = unix.InotifyRmWatch(int(fd), uint32(watch)) }) // it may be gone by itself
}

// read returns the events that are there. If there are none it waits for some, until the time given (zero: without end)
// or until ctx ends.
func (n *notifier) read(ctx context.Context, until time.Time) ([]event, error) {
	if err := n.file.SetReadDeadline(until); err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = n.file.SetReadDeadline(time.Unix(1, 0)) })()
	if ctx.Err() != nil {
		return nil, nil
	}
	return n.receive(true)
}

// pending returns the events that are there, without waiting.
func (n *notifier) pending() ([]event, error) {
	if err := n.file.SetReadDeadline(time.Time{}); err != nil {
		return nil, err
	}
	return n.receive(false)
}

func (n *notifier) receive(wait bool) ([]event, error) {
	var size int
	var err error
	rerr := n.conn.Read(func(fd uintptr) bool {
		size, err = unix.Read(int(fd), n.buf[:])
		return !wait || !errors.Is(err, unix.EAGAIN)
	})
	switch {
	case errors.Is(rerr, os.ErrDeadlineExceeded), rerr == nil &&
		(errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR)):
		return nil, nil
	case rerr != nil || err != nil:
		return nil, fmt.Errorf("read inotify events: %w", errors.Join(rerr, err))
	}
	return parse(n.buf[:size]), nil
}

// parse takes struct inotify_event one by one.
func parse(b []byte) (out []event) {
	for len(b) >= unix.SizeofInotifyEvent {
		end := min(unix.SizeofInotifyEvent+int(binary.NativeEndian.Uint32(b[12:])), len(b))
		name, _, _ := bytes.Cut(b[unix.SizeofInotifyEvent:end], []byte{0})
		out = append(out, event{
			watch: int32(binary.NativeEndian.Uint32(b)), mask: binary.NativeEndian.Uint32(b[4:]),
			cookie: binary.NativeEndian.Uint32(b[8:]), name: string(name),
		})
		b = b[end:]
	}
	return out
}

func (n *notifier) close() { _ = n.file.Close() }
