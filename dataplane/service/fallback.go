package service

import "fairlead.dev/fairlead/model"

// Within returns a part as a plane is told it that can do some schedulers only: where another is asked for, with what
// stands in for it. resolve names that as a problem of the Service.
func Within(s model.Schedulers, p model.ServicePart) model.ServicePart {
	switch v := p.(type) {
	case *model.Pool:
		return within(s, v)
	case *model.ServiceNode:
		if len(v.ServiceRanges) == 0 {
			return v
		}
		n := *v
		n.ServiceRanges = nil // the first plane serves most addresses
		return &n
	case *model.Frontend:
		internal, external := within(s, v.Internal.Pool), within(s, v.External.Pool)
		if internal == v.Internal.Pool && external == v.External.Pool {
			return v
		}
		if v.Internal.Pool == v.External.Pool {
			external = internal
		}
		f := *v
		f.Internal.Pool, f.External.Pool = internal, external
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
