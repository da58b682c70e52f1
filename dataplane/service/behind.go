package service

import "fairlead.dev/fairlead/model"

// Within gives a part as a plane is told it that can do some schedulers only: where another is asked for, with what stands
// in for it. resolve names that as a problem of the Service.
func Within(s model.Schedulers, p model.Part) model.Part {
	switch v := p.(type) {
	case *model.Pool:
		return within(s, v)
	case *model.Node:
		if len(v.ServiceRanges) == 0 {
			return v
		}
		n := *v
		n.ServiceRanges = nil // the first plane serves most addresses
		return &n
	case *model.Frontend:
		inside, outside := within(s, v.Inside.Pool), within(s, v.Outside.Pool)
		if inside == v.Inside.Pool && outside == v.Outside.Pool {
			return v
		}
		if v.Inside.Pool == v.Outside.Pool {
			outside = inside
		}
		f := *v
		f.Inside.Pool, f.Outside.Pool = inside, outside
		return &f
	}
	return p
}

func within(s model.Schedulers, p *model.Pool) *model.Pool {
	by := s.Instead(p.Scheduler)
	if by == p.Scheduler {
		return p
	}
	q := *p
	q.Scheduler = by
	return &q
}
