package device

import (
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
)

// AllowedSource is an allowed source range of a frontend.
type AllowedSource struct {
	Entry  service.Entry
	Client netip.Prefix
}

// entryBits is the length of an entry, with which the prefix of an allowed source range begins.
const entryBits = 8 * uint32(unsafe.Sizeof(service.Entry{}))

func (p AllowedSource) key() (k deviceAllowedSource) {
	k.Length = entryBits + uint32(p.Client.Bits()+128-p.Client.Addr().BitLen())
	k.Entry.Address.Word, k.Entry.Port, k.Entry.Protocol = p.Entry.Address.Word, p.Entry.Port, p.Entry.Protocol
	k.Client.Word = bpf.Words(p.Client.Masked().Addr())
	return k
}

// What happens to packets to a prefix that match no frontend.
const (
	UnmatchedReject = uint32(deviceUnmatchedActionUNMATCHED_REJECT)
	UnmatchedDrop   = uint32(deviceUnmatchedActionUNMATCHED_DROP)
)

// PutUnmatched sets what happens to packets to a prefix that match no frontend.
func (m *Maps) PutUnmatched(p netip.Prefix, action uint32, isNew bool) error {
	if isNew {
		m.enterNetwork(p)
	}
	if err := m.named[deviceMapFlUnmatched].Put(service.PrefixKey(p), action); err != nil {
		return fmt.Errorf("bpf: write prefix %s into map fl_unmatched: %w", p, err)
	}
	return nil
}

// DeleteUnmatched undoes PutUnmatched.
func (m *Maps) DeleteUnmatched(p netip.Prefix) error {
	err := m.named[deviceMapFlUnmatched].Delete(service.PrefixKey(p))
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("bpf: delete prefix %s from map fl_unmatched: %w", p, err)
	}
	m.exitNetwork(p)
	return nil
}

// Unmatched reads every prefix of PutUnmatched, and sets their bits.
func (m *Maps) Unmatched(yield func(netip.Prefix, uint32)) error {
	return service.EachPrefix(m.named[deviceMapFlUnmatched], func(p netip.Prefix, action uint32) {
		m.enterNetwork(p)
		yield(p, action)
	})
}

// PutAllowedSource adds an allowed source range.
func (m *Maps) PutAllowedSource(p AllowedSource) error {
	if err := m.named[deviceMapFlAllowedSrc].Put(p.key(), uint32(1)); err != nil {
		return fmt.Errorf("bpf: let %s in: %w", p.Client, err)
	}
	return nil
}

// DeleteAllowedSource removes one.
func (m *Maps) DeleteAllowedSource(p AllowedSource) error {
	if err := m.named[deviceMapFlAllowedSrc].Delete(p.key()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("bpf: let %s in no more: %w", p.Client, err)
	}
	return nil
}

// AllowedSources reads the allowed source ranges.
func (m *Maps) AllowedSources(yield func(AllowedSource)) error {
	var k deviceAllowedSource
	var v uint32
	i := m.named[deviceMapFlAllowedSrc].Iterate()
	for i.Next(&k, &v) {
		a := bpf.Addr(k.Client.Word)
		e := service.Entry{Port: k.Entry.Port, Protocol: k.Entry.Protocol}
		e.Address.Word = k.Entry.Address.Word
		yield(AllowedSource{e, netip.PrefixFrom(a, int(k.Length-entryBits)-128+a.BitLen())})
	}
	if err := i.Err(); err != nil {
		return fmt.Errorf("bpf: read permitted clients: %w", err)
	}
	return nil
}
