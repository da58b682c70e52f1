package agent

import "fairlead.dev/fairlead/model"

// share is what is told to a plane that serves some frontends only: those, their pools while one of them leads there, and the
// node while there are any. So a plane that has nothing to serve has nothing in the kernel.
type share struct {
	takes func(*model.Frontend) bool // nil: all

	node  *model.Node
	count int // frontends taken
	used  map[*model.Pool]int
}

// of gives a change's share. It is told of every change, in their order.
func (s *share) of(put, del []model.Part) (puts, dels []model.Part) {
	if s.takes == nil {
		return put, del
	}
	if s.used == nil {
		s.used = map[*model.Pool]int{}
	}
	had, node, before := s.count > 0, s.node, map[*model.Pool]bool{}
	take := func(parts []model.Part, n int) (l []model.Part) {
		for _, p := range parts {
			f, ok := p.(*model.Frontend)
			if !ok || !s.takes(f) {
				continue
			}
			l = append(l, f)
			s.count += n
			for _, pool := range []*model.Pool{f.Inside.Pool, f.Outside.Pool} {
				if _, seen := before[pool]; !seen {
					before[pool] = s.used[pool] > 0
				}
				s.used[pool] += n
			}
		}
		return l
	}
	dels, puts = take(del, -1), take(put, 1)
	for _, p := range put {
		if n, ok := p.(*model.Node); ok {
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

// partial is a loop that is told of its share alone.
type partial struct {
	loop
	share
	begun bool
}

// Change implements loop. The first begins it, though its share be nothing: what is left of another run must go.
func (p *partial) Change(put, del []model.Part) {
	if put, del = p.of(put, del); len(put)+len(del) > 0 || !p.begun {
		p.begun = true
		p.loop.Change(put, del)
	}
}
