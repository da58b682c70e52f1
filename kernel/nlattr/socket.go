package nlattr

import (
	"errors"

	"golang.org/x/sys/unix"
)

// SetBuffers sets a socket's send and receive buffers to size bytes. Without CAP_NET_ADMIN in the first user
// namespace they are as large as net.core.wmem_max and rmem_max allow.
func SetBuffers(fd, size int) error {
	set := func(force, plain int) error {
		err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size)
		if errors.Is(err, unix.EPERM) {
			err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, plain, size)
		}
		return err
	}
	return errors.Join(set(unix.SO_SNDBUFFORCE, unix.SO_SNDBUF), set(unix.SO_RCVBUFFORCE, unix.SO_RCVBUF))
}
