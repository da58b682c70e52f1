package vm

import (
	"encoding/binary"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What of the host's files a guest keeps in its memory: those that were opened, up to so many bytes each, and together.
const (
	cacheEach  = 4 << 20
	cacheTotal = 256 << 20
)

// pageCache copies the host's files into the guest's memory when they are opened. To open, flush and release one of the
// host's takes a message there and back each, and so do a program's capabilities: small programs spent nine tenths of
// their time on that. A file that can't be kept stays as it is.
type pageCache struct {
	fanotify int
	begun    unix.Timespec
	left     int64 // bytes
}

// cacheOpened starts a keeper for the root directory's file system, which is an overlay.
func cacheOpened() error {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_CLOEXEC, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_LARGEFILE)
	if err != nil {
		return os.NewSyscallError("fanotify_init", err)
	}
	if err := unix.FanotifyMark(fd, unix.FAN_MARK_ADD|unix.FAN_MARK_FILESYSTEM, unix.FAN_OPEN, unix.AT_FDCWD,
		"/"); err != nil {
		unix.Close(fd)
		return os.NewSyscallError("fanotify_mark", err)
	}
	k := &pageCache{fanotify: fd, begun: unix.NsecToTimespec(time.Now().UnixNano()), left: cacheTotal}
	go k.run()
	return nil
}

// run lives as long as there is room.
func (k *pageCache) run() {
	defer unix.Close(k.fanotify)
	const size = int(unsafe.Sizeof(unix.FanotifyEventMetadata{}))
	for b := make([]byte, 64*size); k.left > 0; {
		n, err := unix.Read(k.fanotify, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return
		}
		for e := b[:n]; len(e) >= size; e = e[size:] {
			fd := int(int32(binary.NativeEndian.Uint32(e[unsafe.Offsetof(unix.FanotifyEventMetadata{}.Fd):])))
			if fd >= 0 { // no descriptor: events were lost
				k.opened(fd)
				unix.Close(fd)
			}
		}
	}
}

// opened keeps a file, unless it is large or the guest's own, and wants to hear no more of it.
func (k *pageCache) opened(fd int) {
	var s unix.Stat_t
	if err := unix.Fstat(fd, &s); err != nil || s.Mode&unix.S_IFMT != unix.S_IFREG {
		return
	}
	path := fmt.Sprintf("/proc/self/fd/%d", fd)
	hosts := s.Ctim.Nano() < k.begun.Nano()
	if hosts && s.Size <= min(cacheEach, k.left) {
		same := []unix.Timespec{s.Atim, {Nsec: unix.UTIME_OMIT}}
		if unix.UtimesNanoAt(unix.AT_FDCWD, path, same, 0) == nil { // a change, for which an overlay copies the file
			k.left -= s.Size
		}
	}
	_ = unix.FanotifyMark(k.fanotify, unix.FAN_MARK_ADD|unix.FAN_MARK_IGNORED_MASK|unix.FAN_MARK_IGNORED_SURV_MODIFY,
		unix.FAN_OPEN, unix.AT_FDCWD, path)
}
