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
	PeerName  = servicePeerName
	Endpoint  = serviceEndpoint
	Load      = serviceLoad
	Tuple     = deviceTuple
	NatEntry  = deviceNatEntry
)

// What they hold.
const (
	Pods       = uint32(servicePrefixFlagPREFIX_PODS)
	NodePorts  = uint32(servicePrefixFlagPREFIX_NODE_PORTS)
	Nodes      = uint32(servicePrefixFlagPREFIX_NODES)
	BehindNode = uint32(servicePrefixFlagPREFIX_BEHIND_NODE)

	// Local is set in a backend's weight where it runs on the node, Remote where it runs on another.
	Local  = uint16(1 << 15)
	Remote = uint16(1 << 14)

	// HashPort and Unselected are flags of a header.
	HashPort   = uint8(serviceHeaderFlagHASH_PORT)
	Unselected = uint8(serviceHeaderFlagUNSELECTED)

	Random          = uint8(serviceSchedulerRANDOM)
	RoundRobin      = uint8(serviceSchedulerROUND_ROBIN)
	SourceHash      = uint8(serviceSchedulerSOURCE_HASH)
	DestinationHash = uint8(serviceSchedulerDESTINATION_HASH)

	LeastConn         = uint8(serviceSchedulerLEAST_CONN)
	WeightedLeastConn = uint8(serviceSchedulerWEIGHTED_LEAST_CONN)
	ShortestDelay     = uint8(serviceSchedulerSHORTEST_DELAY)
)

// Lead points a pool to an extent, and returns the extent before. fast is the number of its backends where nothing but
// their weights counts, else 0.
func (p *Pool) Lead(extent, fast uint32) (was uint32) {
	var b [8]byte
	binary.NativeEndian.PutUint32(b[:], extent)
	binary.NativeEndian.PutUint32(b[4:], fast)
	v := atomic.SwapUint64((*uint64)(unsafe.Pointer(&p.Extent)), binary.NativeEndian.Uint64(b[:]))
	binary.NativeEndian.PutUint64(b[:], v)
	return binary.NativeEndian.Uint32(b[:])
}

// Words returns an address as the programs read it: 16 bytes of either family, IPv4 as ::ffff:a.b.c.d.
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

// Port converts a port to network byte order, or back.
func Port(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}
