package load

import (
	"errors"
	"io"

	"golang.org/x/sys/unix"
)

// connect waits for the connection. Go's runtime interrupts long-running goroutines with a signal; a second connect()
// on the same socket then goes on waiting for the first.
func connect(fd int, to unix.Sockaddr) error {
	err := unix.Connect(fd, to)
	for err == unix.EINTR {
		if err = unix.Connect(fd, to); err == unix.EISCONN {
			return nil
		}
	}
	return err
}

func writeAll(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(fd, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func readAll(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := unix.Read(fd, b)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return err
		case n == 0:
			return io.ErrUnexpectedEOF
		}
		b = b[n:]
	}
	return nil
}

// errMore reports that a server sent more than its answer.
var errMore = errors.New("more bytes than the answer has")

// readEnd waits for the other side's FIN.
func readEnd(fd int) error {
	var b [1]byte
	for {
		n, err := unix.Read(fd, b[:])
		switch {
		case err == unix.EINTR:
		case err != nil:
			return err
		case n > 0:
			return errMore
		default:
			return nil
		}
	}
}

// errTimeout is an operation that the open loop gave up.
var errTimeout = errors.New("no answer in time")

// errBusy is an operation that the open loop could not begin, too many being under way.
var errBusy = errors.New("too many connections under way")

// kinds are the classes of errors.
var kinds = []struct {
	name string
	of   []error
}{
	{"timeout", []error{unix.EAGAIN, unix.EINPROGRESS, unix.EALREADY, unix.ETIMEDOUT, errTimeout}},
	{"refused", []error{unix.ECONNREFUSED}},
	{"reset", []error{unix.ECONNRESET, unix.EPIPE, unix.ECONNABORTED}},
	{"unreachable", []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EPERM, unix.ENETDOWN}},
	{"cut short", []error{io.ErrUnexpectedEOF}},
	{"overload", []error{unix.EADDRNOTAVAIL, unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, errBusy}},
}

// Kind sorts an operation's error into few classes: "timeout", "refused", "reset", "unreachable", "cut short" (the
// server's FIN came before its answer was complete), "overload" (no local port, descriptor or room: the measurement's
// own fault), else the error's own words.
func Kind(err error) string {
	for _, k := range kinds {
		for _, e := range k.of {
			if errors.Is(err, e) {
				return k.name
			}
		}
	}
	return err.Error()
}
