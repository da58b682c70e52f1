package bpf

import (
	"encoding/binary"
	"net/netip"
	"sync/atomic"
	"unsafe"
)

// The structs of bpf/service.h.
type (
	Entry     = serviceEntry
	Frontend  = serviceFrontend
	Pool      = servicePool
	Header    = serviceHeader
	Backend   = serviceBackend
	Connected = serviceConnected
	Name      = serviceName
	Endpoint  = serviceEndpoint
	Load      = serviceLoad
	Tuple     = packetsTuple
	Way       = packetsWay
)

// What they hold.
const (
	Pods      = uint32(servicePlacePODS)
	NodePorts = uint32(servicePlaceNODE_PORTS)
	Nodes     = uint32(servicePlaceNODES)
	Behind    = uint32(servicePlaceBEHIND)

	// Local is set in a backend's weight where it runs on the node, Away where it runs on another.
	Local = uint16(1 << 15)
	Away  = uint16(1 << 14)

	// ByPort and Unselected are flags of a header.
	ByPort     = uint8(serviceHeaderFlagBY_PORT)
	Unselected = uint8(serviceHeaderFlagUNSELECTED)

	Random      = uint8(serviceSchedulerRANDOM)
	Turns       = uint8(serviceSchedulerTURNS)
	Source      = uint8(serviceSchedulerSOURCE)
	Destination = uint8(serviceSchedulerDESTINATION)

	Least         = uint8(serviceSchedulerLEAST)
	WeightedLeast = uint8(serviceSchedulerWEIGHTED_LEAST)
	Delay         = uint8(serviceSchedulerDELAY)
)

// Lead has a pool lead to an extent, of so many backends where the programs need look at nothing but those, else 0; and gives the extent that it led to.
func (p *Pool) Lead(extent, quick uint32) (was uint32) {
	var b [8]byte
	binary.NativeEndian.PutUint32(b[:], extent)
	binary.NativeEndian.PutUint32(b[4:], quick)
	v := atomic.SwapUint64((*uint64)(unsafe.Pointer(&p.Extent)), binary.NativeEndian.Uint64(b[:]))
	binary.NativeEndian.PutUint64(b[:], v)
	return binary.NativeEndian.Uint32(b[:])
}

// Words gives an address as the programs know it: 16 bytes of either family, IPv4 as ::ffff:a.b.c.d.
func Words(a netip.Addr) (w [4]uint32) {
	b := a.As16()
	for i := range w {
		w[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return w
}

// Addr is the inverse of Words.
func Addr(w [4]uint32) netip.Addr {
	var b [16]byte
	for i := range w {
		binary.NativeEndian.PutUint32(b[4*i:], w[i])
	}
	return netip.AddrFrom16(b).Unmap()
}

// Port gives a port in network byte order, or back.
func Port(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}
