package names

import (
	"net/netip"
	"slices"
	"time"
)

// Bounds of the queries that wait for their answers.
const (
	maxQueries = 256              // of one pod
	patience   = 10 * time.Second // for an answer
)

// query is a query that was seen.
type query struct {
	port uint16 // of the pod
	id   uint16
	question
	at time.Time
}

// queries are those that wait for their answers, by pod, in the order in which they came.
type queries map[netip.Addr][]query

// add remembers a query of a pod. The oldest of too many goes.
func (q queries) add(pod netip.Addr, x query) {
	l := slices.DeleteFunc(q[pod], func(o query) bool {
		return x.at.Sub(o.at) > patience || o.port == x.port && o.id == x.id && o.question == x.question
	})
	if len(l) >= maxQueries {
		l = slices.Delete(l, 0, len(l)-maxQueries+1)
	}
	q[pod] = append(l, x)
}

// awaited reports whether a query waits for that answer, and forgets it.
func (q queries) awaited(pod netip.Addr, answer query) bool {
	l := q[pod]
	i := slices.IndexFunc(l, func(o query) bool {
		return o.port == answer.port && o.id == answer.id && o.question == answer.question &&
			answer.at.Sub(o.at) <= patience
	})
	if i < 0 {
		return false
	}
	if l = slices.Delete(l, i, i+1); len(l) == 0 {
		delete(q, pod)
	} else {
		q[pod] = l
	}
	return true
}
