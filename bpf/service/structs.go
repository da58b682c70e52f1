package service

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// The structs of service.h.
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
	Prefix    = servicePrefix
)

// What they hold.
const (
	Pods            = uint32(servicePrefixFlagPREFIX_PODS)
	NodePorts       = uint32(servicePrefixFlagPREFIX_NODE_PORTS)
	RemoteNodePorts = uint32(servicePrefixFlagPREFIX_REMOTE_NODE_PORTS)
	Nodes           = uint32(servicePrefixFlagPREFIX_NODES)
	BehindNode      = uint32(servicePrefixFlagPREFIX_BEHIND_NODE)

	// Local is set in a backend's weight where it runs on the node, Remote where it runs on another.
	Local  = uint16(1 << 15)
	Remote = uint16(1 << 14)

	// NodePort is set in a frontend's NodePort where it is one, NodePortRemote where it is one at other nodes, too, and
	// NodeAddress where it is at an address of the node.
	NodePort       = uint8(serviceNodePortNODE_PORT)
	NodePortRemote = uint8(serviceNodePortNODE_PORT_REMOTE)
	NodeAddress    = uint8(serviceNodePortNODE_ADDRESS)

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
