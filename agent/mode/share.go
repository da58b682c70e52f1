package mode

import (
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// Share is what a plane is given that serves some frontends only: those, their pools while one of them leads there, and
// the node while there are any. So a plane that has nothing to serve has nothing in the kernel.
type Share struct {
	Serves func(*model.Frontend) bool // nil: all

	node  *model.ServiceNode
	count int // frontends served
	used  map[*model.Pool]int
}

// Of returns a change's share. It is given every change, in their order.
func (s *Share) Of(put, del []model.ServicePart) (puts, dels []model.ServicePart) {
	if s.Serves == nil {
		return put, del
	}
	if s.used == nil {
		s.used = map[*model.Pool]int{}
	}
	had, node, before := s.count > 0, s.node, map[*model.Pool]bool{}
	dels, puts = s.frontends(del, -1, before), s.frontends(put, 1, before)
	for _, p := range put {
		if n, ok := p.(*model.ServiceNode); ok {
			s.node = n
		}
	}
	for pool, was := range before {
		switch is := s.used[pool] > 0; {
		case is && !was:
			puts = append(puts, pool)
		case was && !is:
			dels = append(dels, pool)
		}
		if s.used[pool] == 0 {
			delete(s.used, pool)
		}
	}
	has := s.count > 0
	if has && s.node != nil && (!had || node != s.node) {
		puts = append(puts, s.node)
	}
	if had && node != nil && (!has || node != s.node) {
		dels = append(dels, node)
	}
	return puts, dels
}

// frontends returns the plane's frontends among parts, and counts n for each and for its pools. In before it records
// which of those were in use.
func (s *Share) frontends(parts []model.ServicePart, n int, before map[*model.Pool]bool) (l []model.ServicePart) {
	for _, p := range parts {
		f, ok := p.(*model.Frontend)
		if !ok || !s.Serves(f) {
			continue
		}
		l = append(l, f)
		s.count += n
		for _, pool := range []*model.Pool{f.Internal.Pool, f.External.Pool} {
			if _, seen := before[pool]; !seen {
				before[pool] = s.used[pool] > 0
			}
			s.used[pool] += n
		}
	}
	return l
}

// partial is a loop that is given its share alone.
type partial struct {
	reconcile.Runner[model.ServicePart]
	Share
	begun bool
}

// Change implements reconcile.Runner. The first begins it, though its share be nothing: what is left of another run
// must go.
func (p *partial) Change(put, del []model.ServicePart) {
	if put, del = p.Of(put, del); len(put)+len(del) > 0 || !p.begun {
		p.begun = true
		p.Runner.Change(put, del)
	}
}
