// Package local has the agent of a network namespace reply to the commands of root there: by what it decides, and what
// it has decided.
//
// The agent listens at a socket in its run folder, whose name is the inode number of the network namespace: agents may
// share a folder, and a command finds that of its own namespace. A name in the abstract namespace needs no folder, but
// each pod with the node's network could bind it before the agent does, and what is read there names files that root
// opens.
package local

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/kernel/netns"
)

// ErrNoAgent is the error that no agent listens.
var ErrNoAgent = errors.New("no agent runs in this network namespace")

// What commands request: a line, in reply to which the agent sends all it has to say.
const (
	Configuration = "configuration" // by which it decides
	Decided       = "decided"       // for its node
)

// Replies writes the reply to each request.
type Replies map[string]func(io.Writer) error

const (
	patience = 20 * time.Second // how long a reply may last
	most     = 8                // requests that are replied to at once
	longest  = 64               // bytes of a request
)

// pathIn returns the path of the socket for the calling thread's network namespace.
func pathIn(folder string) (string, error) {
	inode, err := netns.Inode()
	return filepath.Join(folder, fmt.Sprintf("%d.sock", inode)), err
}

// Server replies to commands.
type Server struct {
	listener *net.UnixListener
	path     string
	socket   fs.FileInfo // at path
	stop     func()      // ends replies
	ended    sync.WaitGroup
}

// Serve replies to each command of root in the calling thread's network namespace, until Close, in place of an agent
// that did so before.
func Serve(folder string, replies Replies) (*Server, error) {
	path, err := pathIn(folder)
	if err != nil {
		return nil, err
	}
	l, err := cni.Listen(path)
	if err != nil {
		return nil, err
	}
	s := &Server{listener: l, path: path}
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	if s.socket, err = os.Lstat(path); err != nil {
		stop()
		return nil, errors.Join(err, l.Close())
	}
	s.ended.Go(func() { s.serve(ctx, replies) })
	return s, nil
}

// serve replies until the listener is closed.
func (s *Server) serve(ctx context.Context, replies Replies) {
	free := make(chan struct{}, most)
	for {
		c, err := s.listener.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // too many open files, or no memory
			time.Sleep(time.Second)
			continue
		}
		free <- struct{}{}
		s.ended.Go(func() {
			defer func() { c.Close(); <-free }()
			defer context.AfterFunc(ctx, func() { c.Close() })()
			if cni.CheckRoot(c) == nil {
				c.SetDeadline(time.Now().Add(patience))
				reply(c, replies)
			}
		})
	}
}

// reply replies to the request that comes by c. An error is a reply too, with another
// first byte.
func reply(c io.ReadWriter, replies Replies) {
	request, err := bufio.NewReader(io.LimitReader(c, longest)).ReadString('\n')
	if err != nil {
		return
	}
	write := replies[strings.TrimSuffix(request, "\n")]
	if write == nil {
		fmt.Fprintf(c, "%cthe agent knows no request %q: the command is another version's", refused, request)
		return
	}
	out := &begun{w: c}
	if err := write(out); err != nil && !out.is {
		fmt.Fprintf(c, "%c%v", refused, err)
	}
}

// What a reply begins with.
const (
	replied = '+'
	refused = '-'
)

// begun writes replied before all else.
type begun struct {
	w  io.Writer
	is bool
}

func (b *begun) Write(p []byte) (int, error) {
	if !b.is {
		b.is = true
		if _, err := b.w.Write([]byte{replied}); err != nil {
			return 0, err
		}
	}
	return b.w.Write(p)
}

// Close ends the replies, and removes the socket unless another agent has it. Close of nil does nothing.
func (s *Server) Close() error {
	if s == nil {
		return nil
	}
	err := s.listener.Close()
	s.stop()
	s.ended.Wait()
	if now, serr := os.Lstat(s.path); serr == nil && os.SameFile(now, s.socket) {
		err = errors.Join(err, os.Remove(s.path))
	}
	return err
}

// Read calls read with the reply of the agent of the calling thread's network namespace to a request. Without an agent
// the error is ErrNoAgent.
func Read(folder, request string, read func(io.Reader) error) error {
	path, err := pathIn(folder)
	if err != nil {
		return err
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EINVAL): // too long a path
		return fmt.Errorf("%w: %w", ErrNoAgent, err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("ask the agent of this node what it decides by: %w: run as root", err)
	case err != nil:
		return fmt.Errorf("ask the agent of this node what it decides by: %w", err)
	}
	defer c.Close()
	err = errors.Join(cni.CheckRoot(c), c.SetDeadline(time.Now().Add(patience)))
	if err == nil {
		err = receive(c, request, read)
	}
	if err != nil {
		return fmt.Errorf("ask the agent at %s for its %s: %w; or decide by flags, such as --config", path, request, err)
	}
	return nil
}

// receive sends a request by c and calls read with the reply.
func receive(c io.ReadWriter, request string, read func(io.Reader) error) error {
	if _, err := io.WriteString(c, request+"\n"); err != nil {
		return err
	}
	in := bufio.NewReader(c)
	first, err := in.ReadByte()
	if err != nil {
		return io.ErrUnexpectedEOF
	}
	if first == replied {
		return read(in)
	}
	why, err := io.ReadAll(io.LimitReader(in, 4096))
	return errors.Join(errors.New(string(why)), err)
}
