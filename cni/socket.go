package cni

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// errAway is the error that the agent's socket can't be reached.
var errAway = errors.New("no agent at its socket")

// answerWait is how long a request may last once the agent has it: longer than the agent waits for a kernel.
const answerWait = 60 * time.Second

// retry is how long to wait between two tries to reach the agent.
const retry = 50 * time.Millisecond

// Send sends a request to the agent at a socket, and with it a file, if there is one. It waits so long for an agent to
// listen there; the connection is made again where the agent ended before it replied.
func Send(socket string, r Request, file *os.File, wait time.Duration) (*Response, error) {
	line, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	var rights []byte
	if file != nil {
		rights = syscall.UnixRights(int(file.Fd()))
	}
	for end := time.Now().Add(wait); ; time.Sleep(retry) {
		response, err := exchange(socket, append(line, '\n'), rights)
		if err == nil {
			return response, nil
		}
		if !time.Now().Before(end) {
			return nil, fmt.Errorf("%w: %w", errAway, err)
		}
	}
}

func exchange(socket string, line, rights []byte) (*Response, error) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(answerWait)); err != nil {
		return nil, err
	}
	n, _, err := c.WriteMsgUnix(line, rights, nil)
	if err == nil && n < len(line) {
		_, err = c.Write(line[n:])
	}
	if err != nil {
		return nil, err
	}
	var r Response
	if err := json.NewDecoder(c).Decode(&r); err != nil {
		return nil, fmt.Errorf("read the agent's reply: %w", err)
	}
	return &r, nil
}

// Listen opens the socket at a path, in place of one that a process before has left, for root alone.
func Listen(path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("listen at a socket for root: %w", err)
	}
	fresh := fmt.Sprintf("%s.%d", path, os.Getpid())
	os.Remove(fresh)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fresh, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen at a socket for root: %w", err)
	}
	l.SetUnlinkOnClose(false) // the next process may listen there already
	if err := errors.Join(os.Chmod(fresh, 0o600), os.Rename(fresh, path)); err != nil {
		return nil, errors.Join(fmt.Errorf("listen at a socket for root: %w", err), l.Close())
	}
	return l, nil
}

// mostRequest is how many bytes a request may have.
const mostRequest = 4 << 20

// Receive reads a request from a connection of a plugin, and the file that came with it, nil if none did. The peer must
// be root.
func Receive(c *net.UnixConn) (r Request, file *os.File, err error) {
	in := &receiver{conn: c}
	line, err := bufio.NewReader(io.LimitReader(in, mostRequest)).ReadBytes('\n')
	if refused := CheckRoot(c); refused != nil { // told once the request is read, or its sender would fail to write it
		in.file.Close()
		return r, nil, refused
	}
	if err == nil {
		err = json.Unmarshal(line, &r)
	}
	if err == nil {
		err = r.check()
	}
	if err != nil {
		in.file.Close()
		return r, nil, Errorf(CodeDecode, "read the plugin's request: %s", err)
	}
	return r, in.file, nil
}

// CheckRoot returns an error unless the peer is root.
func CheckRoot(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var peer *syscall.Ucred
	failed := raw.Control(func(fd uintptr) {
		peer, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err = errors.Join(failed, err); err != nil {
		return err
	}
	if peer.Uid != 0 {
		return Errorf(CodeFailed, "user %d may not use this socket: run as root", peer.Uid)
	}
	return nil
}

// receiver reads from a connection and holds the first file that comes.
type receiver struct {
	conn *net.UnixConn
	file *os.File
}

// Read implements io.Reader.
func (r *receiver) Read(b []byte) (int, error) {
	control := make([]byte, 256)
	n, nc, _, _, err := r.conn.ReadMsgUnix(b, control)
	if err != nil {
		return n, err
	}
	messages, err := syscall.ParseSocketControlMessage(control[:nc])
	if err != nil {
		return n, err
	}
	for _, m := range messages {
		files, err := syscall.ParseUnixRights(&m)
		if err != nil {
			continue
		}
		for _, fd := range files {
			if r.file == nil {
				syscall.CloseOnExec(fd)
				r.file = os.NewFile(uintptr(fd), "network namespace")
			} else {
				syscall.Close(fd)
			}
		}
	}
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// Reply sends a response.
func Reply(c *net.UnixConn, r Response) error { return json.NewEncoder(c).Encode(r) }
