package userspace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// inLoops has each loop call f, one after the other, if there is need.
func (p *Plane) inLoops(need bool, f func(*loop)) {
	for _, l := range p.loops {
		if need {
			l.do(func() { f(l) })
		}
	}
}

// cut ends flows whose endpoint serves no more, and those of clients that are no longer allowed.
func (li *listener) cut() {
	for _, f := range li.flows {
		if !li.front.stays(f.client.Addr(), f.backend.addr) {
			f.close()
		}
	}
}

// want returns where a front takes packets, and the program that keeps some out.
func (p *Plane) want(f *front) (at []netip.AddrPort, dropFilter []unix.SockFilter, err error) {
	if p.fronts[f.entry] != f {
		return nil, nil, nil
	}
	s := f.now.Load()
	var lets [2]model.Action
	open := s.sources != nil
	for i, pool := range s.pools {
		if pool.empty() {
			lets[i] = s.empty[i]
			open = open || lets[i] == model.Drop || pool.drains()
		} else {
			open = true
		}
	}
	if !open {
		return nil, nil, nil // the kernel refuses in our place
	}
	if f.entry.Protocol == model.TCP {
		dropFilter, err = program(f.entry.Addr.Is6(), s.sources, p.view.Load().origins(), lets[0], lets[1])
	}
	if !f.entry.AnyAddr() {
		return []netip.AddrPort{netip.AddrPortFrom(f.entry.Addr, f.entry.Port)}, dropFilter, err
	}
	for a := range p.acceptors() {
		exact := model.Entry{Addr: a, Port: f.entry.Port, Protocol: f.entry.Protocol}
		if a.Is6() == f.entry.Addr.Is6() && p.fronts[exact] == nil {
			at = append(at, netip.AddrPortFrom(a, f.entry.Port))
		}
	}
	return at, dropFilter, err
}

// acceptors returns the node's own addresses that take node ports. No kernel lets packets from ::1 leave, nor is a
// link's address one without the link.
func (p *Plane) acceptors() map[netip.Addr]bool {
	l := map[netip.Addr]bool{}
	for a := range p.view.Load().own {
		if !a.IsLinkLocalUnicast() && a != netip.IPv6Loopback() &&
			slices.ContainsFunc(p.nodeModel.NodePorts, func(r model.Range) bool { return r.Contains(a) }) {
			l[a] = true
		}
	}
	return l
}

// opening is a socket that is to be.
type opening struct {
	front   *front
	at      netip.AddrPort
	program []unix.SockFilter
}

// settle closes sockets that should not be, then opens those that should.
func (p *Plane) settle(fronts []*front) error {
	var closing []*socket
	var errs []error
	openings := make([]opening, 0, len(fronts))
	for _, f := range fronts {
		want, program, err := p.want(f)
		errs = append(errs, err)
		f.sockets = slices.DeleteFunc(f.sockets, func(s *socket) bool {
			if !slices.Contains(want, s.at) {
				closing = append(closing, s)
				return true
			}
			if !slices.Equal(s.program, program) {
				errs = append(errs, filter(s.fd, program))
				s.program = program
			}
			return false
		})
		for _, at := range want {
			if f.socket(at) == nil {
				openings = append(openings, opening{f, at, program})
			}
		}
	}
	p.shut(closing)
	if len(openings) > 0 && p.privateNetns == nil {
		errs = append(errs, errors.New("userspace: frontends without the network namespace that they need"))
	} else if len(openings) > 0 {
		errs = append(errs, p.privateNetns.ns.Do(func() error { return p.listen(openings) }))
	}
	return errors.Join(errs...)
}

// shut closes sockets. Connections that came by them go on; flows end.
func (p *Plane) shut(sockets []*socket) {
	p.inLoops(len(sockets) > 0, func(l *loop) {
		for _, s := range sockets {
			for _, li := range s.listeners {
				if li.loop == l {
					l.forget(li.fd, li.watchID)
					delete(l.hungry, li)
					li.gone = true
					for _, f := range li.flows {
						f.close()
					}
				}
			}
		}
	})
	for _, s := range sockets {
		unix.Close(s.fd)
	}
	p.steady.Add(-int64(len(sockets)))
}

// listen opens sockets in the calling thread's network namespace and has loops watch them.
func (p *Plane) listen(openings []opening) error {
	var errs []error
	var opened []*socket
	for _, o := range openings {
		fd, err := listen(o.at, o.front.entry.Protocol, o.program)
		if err != nil {
			errs = append(errs, fmt.Errorf("userspace: %w", err))
			continue
		}
		s := &socket{at: o.at, fd: fd, program: o.program}
		loops := p.loops
		if o.front.entry.Protocol == model.UDP {
			p.roundRobin++
			loops = p.loops[p.roundRobin%len(p.loops):][:1]
		}
		for _, l := range loops {
			s.listeners = append(s.listeners, &listener{loop: l, front: o.front, fd: fd, at: o.at})
		}
		o.front.sockets = append(o.front.sockets, s)
		opened = append(opened, s)
	}
	p.steady.Add(int64(len(opened)))
	p.inLoops(len(opened) > 0, func(l *loop) {
		for _, s := range opened {
			for _, li := range s.listeners {
				if li.loop == l {
					errs = append(errs, li.listen())
				}
			}
		}
	})
	return errors.Join(errs...)
}

// listen has the loop watch the socket.
func (li *listener) listen() (err error) {
	events := uint32(unix.EPOLLIN)
	if li.front.entry.Protocol == model.TCP {
		events |= unix.EPOLLET | unix.EPOLLEXCLUSIVE // one loop alone takes each connection
	}
	if li.watchID, err = li.loop.watch(li.fd, events, li); err != nil {
		return fmt.Errorf("userspace: watch the socket at %s: %w", li.at, err)
	}
	return nil
}
