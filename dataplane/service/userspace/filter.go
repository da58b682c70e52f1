package userspace

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// Classic BPF (linux/filter.h), a socket's own filter: it needs neither netfilter nor eBPF.
const (
	bpfLoad   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	bpfAnd    = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
	bpfEqual  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	bpfJump   = unix.BPF_JMP | unix.BPF_JA
	bpfReturn = unix.BPF_RET | unix.BPF_K

	netOffset = 0xfff00000 // SKF_NET_OFF: from the IP header on
	letIn     = 1<<32 - 1  // bytes of the packet that the filter lets in
	longest   = 4096       // BPF_MAXINSNS
)

// program keeps out of a TCP listener, in silence, all but permitted sources (nil: all are) and the sides that drop.
// Origins tell inside from outside. It is nil where it would let everybody in.
func program(six bool, sources []netip.Prefix, origins []origin, internal,
	external model.Action) ([]unix.SockFilter, error) {
	if sources == nil && internal == model.Reject && external == model.Reject {
		return nil, nil
	}
	var b []unix.SockFilter
	var jumps []int
	for _, s := range sources {
		b = match(b, six, s)
		jumps = append(jumps, len(b))
		b = append(b, unix.SockFilter{Code: bpfJump})
	}
	if sources != nil {
		b = append(b, unix.SockFilter{Code: bpfReturn})
	}
	for _, j := range jumps {
		b[j].K = uint32(len(b) - j - 1)
	}
	if internal != external {
		for _, o := range origins {
			if o.Addr().Is6() != six {
				continue
			}
			b = match(b, six, o.Prefix)
			if o.internal {
				b = append(b, verdict(internal))
			} else {
				b = append(b, verdict(external))
			}
		}
	}
	if b = append(b, verdict(external)); len(b) > longest {
		return nil, fmt.Errorf("userspace: %d sources make a socket filter of %d instructions, and the kernel takes %d: "+
			"name fewer or larger ranges", len(sources), len(b), longest)
	}
	return b, nil
}

func verdict(a model.Action) unix.SockFilter {
	if a == model.Drop {
		return unix.SockFilter{Code: bpfReturn}
	}
	return unix.SockFilter{Code: bpfReturn, K: letIn}
}

// match adds what skips the one next instruction unless the packet's source is in r.
func match(b []unix.SockFilter, six bool, r netip.Prefix) []unix.SockFilter {
	source := uint32(12)
	if six {
		source = 8
	}
	first := len(b)
	address := r.Masked().Addr().AsSlice()
	for bits := r.Bits(); bits > 0; bits -= 32 {
		b = append(b, unix.SockFilter{Code: bpfLoad, K: netOffset + source})
		if bits < 32 {
			b = append(b, unix.SockFilter{Code: bpfAnd, K: ^uint32(0) << (32 - bits)})
		}
		b = append(b, unix.SockFilter{Code: bpfEqual, K: binary.BigEndian.Uint32(address)})
		source, address = source+4, address[4:]
	}
	for i := first; i < len(b); i++ {
		if b[i].Code == bpfEqual {
			b[i].Jf = uint8(len(b) - i)
		}
	}
	return b
}
