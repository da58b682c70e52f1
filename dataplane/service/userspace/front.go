package userspace

import (
	"errors"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
)

// front is an entry that is served.
type front struct {
	plane   *Plane
	entry   model.Entry
	text    string
	pools   [2]uint64 // by side: inside, outside
	now     atomic.Pointer[sides]
	sockets []*socket
	claimed int64        // file descriptors of its connections and flows: bounds.mu guards it
	hungry  atomic.Int64 // when it last found no file descriptors, in nanoseconds since 1970; 0: not since it found some
}

// sides is what a front does with clients, as of now.
type sides struct {
	sources []netip.Prefix // nil: all
	pools   [2]*pool
	empty   [2]model.Action
}

// socket is one at which a front takes packets.
type socket struct {
	at        netip.AddrPort
	fd        int
	program   []unix.SockFilter
	listeners []*listener // one in each loop for TCP, one for UDP
}

// socket returns the one at an address, or nil.
func (f *front) socket(at netip.AddrPort) *socket {
	for _, s := range f.sockets {
		if s.at == at {
			return s
		}
	}
	return nil
}

// listener is a socket as a loop sees it.
type listener struct {
	loop    *loop
	front   *front
	fd      int
	watchID uint32
	at      netip.AddrPort
	starved time.Time                // since when it waits for file descriptors
	queued  bool                     // it waits for its next turn
	gone    bool                     // its socket is no longer watched
	flows   map[netip.AddrPort]*flow // UDP: by client
}

// poolOf returns the pool of a client's side, and what becomes of its packets where that is empty; nil where the
// client is not allowed.
func (f *front) poolOf(from netip.Addr) (*pool, model.Action) {
	s := f.now.Load()
	if s.sources != nil && !slices.ContainsFunc(s.sources, func(r netip.Prefix) bool { return r.Contains(from) }) {
		return nil, model.Drop
	}
	side := 1
	if f.plane.view.Load().internal(from) {
		side = 0
	}
	return s.pools[side], s.empty[side]
}

// decide returns the pool that serves a client, or nil and what becomes of its packets.
func (f *front) decide(from netip.Addr) (*pool, model.Action) {
	p, action := f.poolOf(from)
	if p == nil || p.empty() {
		return nil, action
	}
	return p, 0
}

// stays reports whether a client's flow stays with the endpoint at a.
func (f *front) stays(from netip.Addr, a netip.AddrPort) bool {
	p, _ := f.poolOf(from)
	return p != nil && p.serves(a)
}

// ready implements watcher.
func (li *listener) ready(uint32) {
	if li.front.entry.Protocol == model.UDP {
		li.datagrams()
	} else {
		li.accept()
	}
}

// greed is how many connections one listener may take before others have their turn.
const greed = 64

// accept takes connections that wait. Where file descriptors have run out it leaves them waiting, says so, and has the
// loop try again later.
func (li *listener) accept() {
	filtered := li.filtered()
	for range greed {
		if li.front.plane.crowded() && li.awaited() {
			li.starve()
			return
		}
		fd, peer, err := unix.Accept4(li.fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch {
		case err == nil:
			from := inet.AddrPort(peer)
			share, ok := li.front.plane.bounds.claim(li.front, from.Addr(), perConn, li.loop.now)
			if !ok {
				reset(fd)
				continue
			}
			if filtered {
				filter(fd, nil)
			}
			if err = li.loop.accepted(fd, from, li, share); starving(err) {
				li.starve()
				return
			}
			li.fed()
		case errors.Is(err, unix.EAGAIN):
			li.fed()
			return
		case starving(err):
			li.starve()
			return
		case errors.Is(err, unix.EBADF), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOTSOCK):
			return
		} // else it is the connection's error, which goes with it (accept(2))
	}
	if !li.queued {
		li.queued = true
		li.loop.again = append(li.loop.again, li)
	}
}

// resume implements waiting.
func (li *listener) resume() {
	if li.queued = false; !li.gone {
		li.accept()
	}
}

// awaited reports whether a connection waits to be taken.
func (li *listener) awaited() bool {
	n, _ := unix.Poll([]unix.PollFd{{Fd: int32(li.fd), Events: unix.POLLIN}}, 0)
	return n > 0
}

// filtered reports whether accepted sockets come with a filter.
func (li *listener) filtered() bool {
	s := li.front.now.Load()
	return s.sources != nil || s.empty[0] == model.Drop || s.empty[1] == model.Drop
}

func (li *listener) starve() {
	li.starved = li.loop.now
	li.loop.hungry[li] = struct{}{}
	li.front.starve()
}

func (li *listener) fed() {
	if !li.starved.IsZero() {
		li.starved = time.Time{}
		delete(li.loop.hungry, li)
	}
	li.front.fed()
}

// fed records that file descriptors were there.
func (f *front) fed() {
	if f.hungry.Load() != 0 {
		f.hungry.Store(0)
	}
}

// starve records that file descriptors have run out, and has that be seen.
func (f *front) starve() {
	if f.hungry.Swap(time.Now().UnixNano()) == 0 {
		f.plane.signal()
	}
}
