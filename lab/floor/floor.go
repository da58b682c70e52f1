// Package floor attaches eBPF programs of a few instructions where Fairlead's own are attached: what a connection costs
// with them is the least that any program there can cost.
package floor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
)

// Program is what the programs do.
type Program uint8

// The programs.
const (
	Empty  Program = iota // nothing
	Lookup                // look up the destination's address in a hash table, and nothing else
)

// Entries is how many addresses the hash table has, of which the first is First.
const Entries = 10000

// Device is a network device, which may be the loopback device, where only egress has a program.
type Device struct {
	Index    int
	Loopback bool
}

// What the programs return: that all goes on as without them.
const (
	proceed = 1  // connect()
	next    = -1 // to the next program at a device (TCX_NEXT)
)

// Offsets of the kernel's contexts (uapi/linux/bpf.h) and of IPv4's destination behind Ethernet's header.
const (
	userIP4     = 4  // struct bpf_sock_addr
	data        = 76 // struct __sk_buff
	dataEnd     = 80
	headers     = 34
	destination = 30
)

// attachments are closed together.
type attachments []io.Closer

// Close detaches all.
func (a attachments) Close() error {
	var errs []error
	for _, c := range a {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// Attach attaches a program at connect() of a cgroup's processes and at devices of the calling thread's network
// namespace, until it is closed. The hash table has Entries addresses from first on.
func Attach(p Program, cgroup string, first netip.Addr, devices ...Device) (_ io.Closer, err error) {
	var all attachments
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("attach a program as a floor: %w", err), all.Close())
		}
	}()
	var table *ebpf.Map
	if p == Lookup {
		if table, err = newTable(first); err != nil {
			return nil, err
		}
		defer table.Close() // the programs hold it
	}
	load := func(name string, t ebpf.ProgramType, at ebpf.AttachType, code asm.Instructions) (*ebpf.Program, error) {
		return ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: t, AttachType: at, License: "GPL", Instructions: code})
	}
	connect, err := load("fl_connect", ebpf.CGroupSockAddr, ebpf.AttachCGroupInet4Connect, atConnect(table))
	if err != nil {
		return nil, err
	}
	defer connect.Close()
	packet, err := load("fl_packet", ebpf.SchedCLS, ebpf.AttachNone, atDevice(table))
	if err != nil {
		return nil, err
	}
	defer packet.Close()
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: ebpf.AttachCGroupInet4Connect, Program: connect})
	if err != nil {
		return nil, err
	}
	all = append(all, l)
	for _, d := range devices {
		for _, at := range []ebpf.AttachType{ebpf.AttachTCXEgress, ebpf.AttachTCXIngress} {
			if d.Loopback && at == ebpf.AttachTCXIngress {
				continue
			}
			l, err := link.AttachTCX(link.TCXOptions{Interface: d.Index, Program: packet, Attach: at})
			if err != nil {
				return nil, err
			}
			all = append(all, l)
		}
	}
	return all, nil
}

// newTable returns a hash table of addresses.
func newTable(first netip.Addr) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "fl_floor", Type: ebpf.Hash, KeySize: 4, ValueSize: 8, MaxEntries: Entries})
	if err != nil {
		return nil, err
	}
	for a, n := first, uint64(0); n < Entries; a, n = a.Next(), n+1 {
		key := a.As4()
		if err := m.Put(key[:], binary.NativeEndian.AppendUint64(nil, n)); err != nil {
			return nil, errors.Join(err, m.Close())
		}
	}
	return m, nil
}

// lookup looks up the four bytes in R2, unless there is no table.
func lookup(table *ebpf.Map) asm.Instructions {
	if table == nil {
		return nil
	}
	return asm.Instructions{
		asm.StoreMem(asm.RFP, -4, asm.R2, asm.Word),
		asm.LoadMapPtr(asm.R1, table.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
	}
}

// atConnect returns the program at connect().
func atConnect(table *ebpf.Map) (code asm.Instructions) {
	if table != nil {
		code = append(code, asm.LoadMem(asm.R2, asm.R1, userIP4, asm.Word))
	}
	return append(append(code, lookup(table)...), asm.Mov.Imm(asm.R0, proceed), asm.Return())
}

// atDevice returns the program at devices.
func atDevice(table *ebpf.Map) (code asm.Instructions) {
	if table != nil {
		code = asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, data, asm.Word),
			asm.LoadMem(asm.R3, asm.R1, dataEnd, asm.Word),
			asm.Mov.Reg(asm.R4, asm.R2),
			asm.Add.Imm(asm.R4, headers),
			asm.JGT.Reg(asm.R4, asm.R3, "out"),
			asm.LoadMem(asm.R2, asm.R2, destination, asm.Word),
		}
	}
	return append(append(code, lookup(table)...), asm.Mov.Imm(asm.R0, next).WithSymbol("out"), asm.Return())
}
