// Package network is what the data planes of the pod network share: batches of rtnetlink requests whose refusals are
// those of facts.
package network

import (
	"fmt"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/netlink"
)

// Batch is rtnetlink requests of facts. The zero value has none.
type Batch[K dataplane.Key] struct {
	requests netlink.Batch
	owners   []K // by request
	refused  map[K]error
}

// portion is how many bytes of requests are sent at once: refusals of all of them fit in a socket's usual buffer.
const portion = 8 << 10

// Add adds the requests that f adds, as those of fact k.
func (b *Batch[K]) Add(k K, f func(*netlink.Batch)) {
	b.requests.Portion = portion
	f(&b.requests)
	for len(b.owners) < b.requests.Len() {
		b.owners = append(b.owners, k)
	}
}

// Refuse records that a fact can't be written.
func (b *Batch[K]) Refuse(k K, err error) {
	if b.refused == nil {
		b.refused = map[K]error{}
	}
	if b.refused[k] == nil {
		b.refused[k] = err
	}
}

// Run sends the requests and forgets them. The error is dataplane.Refused with the facts of which the kernel refused
// some, and those of Refuse.
func (b *Batch[K]) Run(s *netlink.Socket) error {
	err := s.Run(&b.requests, func(i int, err error) {
		b.Refuse(b.owners[i], fmt.Errorf("%s: %w", b.requests.Said(i), err))
	})
	refused := b.refused
	*b = Batch[K]{}
	if err == nil && refused != nil {
		err = &dataplane.Refused[K]{Facts: refused}
	}
	return err
}
