package ebpf

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/dataplane/maglev"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/model"
)

// maxBackends and maxChoices are the bounds of a 16-bit index.
const (
	maxBackends = 1<<16 - 1
	maxChoices  = 1 << 16
)

// choicesPerSlot is how many choices a slot holds.
const choicesPerSlot = len(service.Slot{}) / 2

// extent is a pool's layout in slots: its scheduler, and the choices that this needs.
type extent struct {
	*model.Pool
	scheduler uint8
	choices   []uint16
}

// newExtent returns a pool's layout.
func newExtent(p *model.Pool) (e extent, err error) {
	if len(p.Backends) > maxBackends {
		return e, fmt.Errorf("ebpf: a pool of %d backends: %d at most", len(p.Backends), maxBackends)
	}
	e = extent{Pool: p}
	switch p.Scheduler {
	case model.Random:
		e.scheduler = service.Random
	case model.RoundRobin:
		e.scheduler = service.RoundRobin
	case model.WeightedRoundRobin:
		e.scheduler, e.choices = service.RoundRobin, roundRobinSlots(p.Backends)
	case model.SourceHash:
		e.scheduler = service.SourceHash
	case model.DestinationHash:
		e.scheduler = service.DestinationHash
	case model.Maglev:
		e.scheduler, e.choices = service.SourceHash, maglev.Table(p.Backends, entries(p))
	case model.LeastConnections:
		e.scheduler = service.LeastConn
	case model.WeightedLeastConnections:
		e.scheduler, e.choices = service.WeightedLeastConn, roundRobinSlots(p.Backends)
	case model.ShortestExpectedDelay:
		e.scheduler, e.choices = service.ShortestDelay, roundRobinSlots(p.Backends)
	default:
		return e, fmt.Errorf("ebpf: scheduler %s is none of %s", p.Scheduler, schedulers)
	}
	return e, nil
}

// roundRobinSlots returns a round in which each backend occurs in proportion to its weight, spread evenly; none where
// all weigh the same.
func roundRobinSlots(backends []model.Backend) []uint16 {
	total := 0
	for _, b := range backends {
		total += b.Share()
	}
	if total == len(backends) {
		return nil
	}
	scale := min(1, float64(maxChoices-len(backends))/float64(total))
	type slot struct {
		at  float64
		who uint16
	}
	round := make([]slot, 0, min(total, maxChoices))
	for i, b := range backends {
		n := max(1, int(float64(b.Share())*scale))
		for k := range n {
			round = append(round, slot{(float64(k) + 0.5) / float64(n), uint16(i)})
		}
	}
	slices.SortStableFunc(round, func(a, b slot) int {
		if a.at < b.at {
			return -1
		}
		return 1 - b2i(a.at == b.at)
	})
	who := make([]uint16, len(round))
	for i, t := range round {
		who[i] = t.who
	}
	return who
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// fast is the number of backends where nothing but their weights counts, else 0.
func (e extent) fast() uint32 {
	if e.scheduler != service.Random || len(e.choices) > 0 || e.Affinity > 0 {
		return 0
	}
	return uint32(len(e.Backends))
}

// size is the number of slots of the extent.
func (e extent) size() uint32 {
	n := selectedSize(uint64(len(e.Backends)), uint64(len(e.choices)))
	if len(e.Unselected) > 0 {
		n += uint64(1 + len(e.Unselected))
	}
	return uint32(n)
}

// selectedSize returns the number of slots of a header, backends and choices.
func selectedSize(backends, choices uint64) uint64 {
	return 1 + backends + (choices+uint64(choicesPerSlot)-1)/uint64(choicesPerSlot)
}

// write writes the extent into slots that no program reads.
func (e extent) write(id uint64, to []service.Slot) {
	*to[0].Header() = service.Header{
		Count:     uint32(len(e.Backends)),
		Choices:   uint32(len(e.choices)),
		Affinity:  uint32(e.Affinity / time.Second),
		Scheduler: e.scheduler,
		Model:     uint8(e.Pool.Scheduler),
		Protocol:  uint8(e.Protocol),
		Flags:     e.flags(),
		Id:        id,
	}
	own, other := e.aliases()
	for i, b := range e.Backends {
		s := heldBackend(b)
		s.Threshold, s.Alias = own[i], other[i]
		*to[1+i].Backend() = s
	}
	for i, c := range e.choices {
		to[1+len(e.Backends)+i/choicesPerSlot].Choices()[i%choicesPerSlot] = c
	}
	if len(e.Unselected) == 0 {
		return
	}
	to = to[selectedSize(uint64(len(e.Backends)), uint64(len(e.choices))):]
	*to[0].Header() = service.Header{Count: uint32(len(e.Unselected))}
	for i, b := range e.Unselected {
		*to[1+i].Backend() = heldBackend(b)
	}
}

// flags returns the flags of the extent's header.
func (e extent) flags() (f uint8) {
	if e.Ports {
		f |= service.HashPort
	}
	if len(e.Unselected) > 0 {
		f |= service.Unselected
	}
	return f
}

// heldBackend returns a backend as the kernel holds it, but for threshold and alias.
func heldBackend(b model.Backend) service.Backend {
	s := service.Backend{Port: bpf.Port(b.Addr.Port()), Weight: heldWeight(b)}
	s.Address.Word = bpf.Words(b.Addr.Addr())
	return s
}

// extentSize returns the size of the extent whose header is the first of slots, or 0 where it is invalid.
func extentSize(s []service.Slot) uint32 {
	h := s[0].Header()
	size := selectedSize(uint64(h.Count), uint64(h.Choices))
	if h.Flags&service.Unselected != 0 {
		if size >= uint64(len(s)) {
			return 0
		}
		size += 1 + uint64(s[size].Header().Count)
	}
	if size > uint64(len(s)) {
		return 0
	}
	return uint32(size)
}

// readExtent reads the value of a pool's fact back from slots that begin with its header, or "" where they are
// invalid.
func readExtent(s []service.Slot) (value string, size uint32) {
	if size = extentSize(s); size == 0 {
		return "", 0
	}
	h := s[0].Header()
	p := &model.Pool{
		Protocol:  model.Protocol(h.Protocol),
		Scheduler: model.Scheduler(h.Model),
		Ports:     h.Flags&service.HashPort != 0,
		Affinity:  time.Duration(h.Affinity) * time.Second,
		Entries:   int(h.Choices),
		Backends:  readBackends(s[1 : 1+h.Count]),
	}
	if n := selectedSize(uint64(h.Count), uint64(h.Choices)); n < uint64(size) {
		p.Unselected = readBackends(s[n+1 : size])
	}
	return poolValue(p), size
}

// readBackends is the inverse of heldBackend for several.
func readBackends(s []service.Slot) []model.Backend {
	l := make([]model.Backend, len(s))
	for i := range s {
		b := s[i].Backend()
		l[i] = backend(netip.AddrPortFrom(bpf.Addr(b.Address.Word), bpf.Port(b.Port)), b.Weight)
	}
	return l
}

// aliases is aliases of the backends, or, where the scheduler ignores weights, of as many equal ones.
func (e extent) aliases() (own, other []uint16) {
	if e.Scheduler == model.LeastConnections {
		return aliases(make([]model.Backend, len(e.Backends)))
	}
	return aliases(e.Backends)
}

// aliases returns for each backend the threshold and the alias of Walker's method, so that each is selected by its
// weight (Vose, "A linear algorithm for generating random numbers with a given distribution", 1991).
func aliases(backends []model.Backend) (own, other []uint16) {
	n := len(backends)
	own, other = make([]uint16, n), make([]uint16, n)
	total := 0
	for i, b := range backends {
		own[i], other[i] = math.MaxUint16, uint16(i)
		total += b.Share()
	}
	if total == n {
		return own, other
	}
	share := make([]float64, n) // of what is even
	var small, large []int
	for i, b := range backends {
		if share[i] = float64(b.Share()) * float64(n) / float64(total); share[i] < 1 {
			small = append(small, i)
		} else {
			large = append(large, i)
		}
	}
	for len(small) > 0 && len(large) > 0 {
		s, l := small[len(small)-1], large[len(large)-1]
		small = small[:len(small)-1]
		own[s], other[s] = uint16(max(0, math.Round(share[s]*65536)-1)), uint16(l)
		if share[l] -= 1 - share[s]; share[l] < 1 {
			large, small = large[:len(large)-1], append(small, l)
		}
	}
	return own, other
}
