package service

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/model"
)

const (
	// SchedulerAnnotation, on a Service, names its scheduler, as model.ParseScheduler reads it. After a comma, "port" has
	// one that hashes the client's address hash its port too: "maglev,port".
	SchedulerAnnotation = "fairlead.dev/scheduler"
	// WeightAnnotation, on an EndpointSlice, is the weight of each of its endpoints against those of the Service's other
	// slices: 1, which is the default, to model.MaxWeight.
	WeightAnnotation = "fairlead.dev/weight"
)

// readScheduler takes the scheduler that the Service asks for, or else the default.
func (r *reading) readScheduler() {
	r.out.scheduler = r.set.granted(r.set.Scheduler)
	text, ok := r.svc.Annotations[SchedulerAnnotation]
	if !ok {
		return
	}
	field := "metadata.annotations[" + SchedulerAnnotation + "]"
	name, flag, flagged := strings.Cut(strings.ReplaceAll(text, " ", ""), ",")
	requested, err := model.ParseScheduler(name)
	if err == nil && flagged && (flag != "port" || !requested.Hashes()) {
		err = fmt.Errorf("%q takes no %q: only a scheduler that hashes has an option, port", name, flag)
	}
	if err != nil {
		r.add(field, "UnknownScheduler", "%v: served by %s; correct it", err, r.out.scheduler)
		return
	}
	r.out.scheduler, r.out.ports = r.set.granted(requested), flagged
	if r.out.scheduler != requested {
		r.add(field, "SchedulerNotAvailable", "the data plane %s can't do %s: served by %s; choose one of %s, or another "+
			"data plane",
			r.set.Capabilities.Name, requested, r.out.scheduler, r.set.Capabilities.Schedulers)
	}
	if b := r.set.Capabilities.Fallback; b != 0 && !b.Has(r.out.scheduler) {
		r.add(field, "SchedulerNotAvailable", "the data plane %s can do %s for clients on the node alone: others are served "+
			"by %s; choose one of %s for all, or another data plane",
			r.set.Capabilities.Name, r.out.scheduler, b.Instead(r.out.scheduler), r.set.Capabilities.Schedulers&b)
	}
}

// granted returns a scheduler, or what stands in for it where the data plane can't do it.
func (s *settings) granted(requested model.Scheduler) model.Scheduler {
	if s.Capabilities.Schedulers == 0 {
		return requested
	}
	return s.Capabilities.Schedulers.Instead(requested)
}

// readWeight reads a slice's weight.
func readWeight(annotations map[string]string, rep *report) uint16 {
	text, ok := annotations[WeightAnnotation]
	if !ok {
		return 1
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n < 1 || n > model.MaxWeight {
		rep.add("metadata.annotations["+WeightAnnotation+"]", "InvalidWeight",
			"%q is not a whole number from 1 to %d: 1 is used; correct it", text, model.MaxWeight)
		return 1
	}
	return uint16(n)
}

// reduce takes from weights what all have in common: equal ones become 0, which stands for "no matter".
func reduce(list []model.Backend) {
	divisor := 0
	for _, b := range list {
		divisor = gcd(divisor, b.Share())
	}
	equal := !slices.ContainsFunc(list, func(b model.Backend) bool { return b.Share() != list[0].Share() })
	for i := range list {
		if equal {
			list[i].Weight = 0
		} else {
			list[i].Weight = uint16(list[i].Share() / divisor)
		}
	}
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
