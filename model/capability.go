package model

import "slices"

// Capabilities is what a service data plane supports on this kernel. What it doesn't is decided before it, in resolve:
// a scheduler has a stated substitute, a frontend that it can't serve is kept from it, and both are named as problems
// of their Service. The zero value supports everything.
type Capabilities struct {
	Name       string     // as --mode has it, such as nftables
	Schedulers Schedulers // Random is always among them; none: all
	Fallback   Schedulers // those of a fallback plane, for clients that this one can't serve; none: there is none

	Unserved  []Remark // frontends that it can't serve
	Long      []Remark // packets longer than the smallest MTU that may be late or lost, and replies to them
	Unmatched []Remark // packets that match no frontend and pass, where a ClusterIP rejects or a ServiceCIDR drops them
	Unsupported

	MasqueradesAll bool // backends never see the client's address, whatever Frontend.Masquerade says
	Ends           bool // its connections end with the agent, since they run through it
	Tracked        bool // it translates by the kernel's connection tracking, where stale flows must be cut
	PreDNAT        bool // policies' hooks see its packets to Services before their translation, too
	Accepts        bool // its rules accept what it forwards and packets to health checks, whatever a chain's policy

	Capacity
	Batch int // facts in one Write at most; 0 leaves it to the loop

	Remarks []Remark // what else a user should know before choosing it
}

// Unsupported is why a service data plane can't do what not all can; "": it can.
type Unsupported struct {
	NoIPVLAN string // serve pods that DeviceKind.IPVLAN connects
	NoDirect string // have backends' nodes reply to clients (Frontend.DSR)
	NoRemote string // serve node ports at other nodes' addresses (Frontend.Remote)
	NoLocal  string // serve host ports at 127.0.0.1
}

// Capacity is how much a service data plane can hold.
type Capacity struct {
	Frontends              int // how many fit, and as many pools and source ranges; 0: no bound of its own
	Slots                  int // how many pools and backends fit; 0: no bound of its own
	TableEntriesPerBackend int // entries of Maglev's table that it wants for each backend; 0: 100
	TableEntriesPerSlot    int // how many of those take as much memory as a backend; 0: one
}

// Remark is a sentence about packets.
type Remark struct {
	ID    string // stable, in kebab-case
	Text  string
	About *Packets // nil: none in particular
}

// Packets is a set of packets: those that fit every field that is set.
type Packets struct {
	Unmatched bool // those that match no frontend, and only Protocols counts beside; else only those that match one

	Protocols  []Protocol
	Family     uint8 // 4 or 6
	Port       uint16
	Addresses  bool   // those to frontends at one address, not node ports
	NodePorts  bool   // those to node ports
	Via        string // as Frontend.Via
	NotVia     string
	Origins    Origins
	Affinity   bool       // those to pools with session affinity
	Ranges     bool       // those to frontends with allowed source ranges
	Schedulers Schedulers // those to pools with one of these
	OwnAddress bool       // those to frontends at the address of one of their endpoints
}

// Has reports whether the set has packets of origin o to f; nil: packets over a protocol that match no frontend.
// Without an origin (AllOrigins), all that fit some origin count.
func (p *Packets) Has(f *Frontend, protocol Protocol, o Origins) bool {
	if p == nil || p.Unmatched != (f == nil) || p.Protocols != nil && !slices.Contains(p.Protocols, protocol) {
		return false
	}
	return f == nil || (p.Origins == 0 || p.Origins&o != 0) && p.entry(f) && p.pool(f, o)
}

// entry reports whether f's entry fits.
func (p *Packets) entry(f *Frontend) bool {
	family := uint8(4)
	if f.Entry.Addr.Is6() {
		family = 6
	}
	return (p.Family == 0 || p.Family == family) && (p.Port == 0 || p.Port == f.Entry.Port) &&
		(!p.Addresses || !f.Entry.AnyAddr()) && (!p.NodePorts || f.Entry.AnyAddr()) &&
		(p.Via == "" || p.Via == f.Via) && (p.NotVia == "" || p.NotVia != f.Via) && (!p.Ranges || len(f.Sources) > 0)
}

// pool reports whether a pool of f for some origin in o fits.
func (p *Packets) pool(f *Frontend, o Origins) bool {
	if !p.Affinity && p.Schedulers == 0 && !p.OwnAddress {
		return true
	}
	for _, x := range []Origin{FromNode, FromPod, FromExternal} {
		pool := f.Target(x).Pool
		own := func(b Backend) bool { return b.Addr.Addr() == f.Entry.Addr }
		if o.Has(x) && (!p.Affinity || pool.Affinity > 0) && (p.Schedulers == 0 || p.Schedulers.Has(pool.Scheduler)) &&
			(!p.OwnAddress || slices.ContainsFunc(pool.Backends, own)) {
			return true
		}
	}
	return false
}

// First returns the text of the first note about packets to f from anywhere; nil: about those over a protocol that
// match no frontend. It is "" where there is none.
func First(remarks []Remark, f *Frontend, protocol Protocol) string {
	for _, n := range remarks {
		if n.About.Has(f, protocol, AllOrigins) {
			return n.Text
		}
	}
	return ""
}

// WhyNot returns why f can't be served, or "".
func (c Capabilities) WhyNot(f *Frontend) string { return First(c.Unserved, f, f.Entry.Protocol) }

// About returns the remarks about packets of origin o to f.
func (c Capabilities) About(f *Frontend, o Origin) (texts []string) {
	for _, n := range c.Remarks {
		if n.About.Has(f, f.Entry.Protocol, OriginsOf(o)) {
			texts = append(texts, n.Text)
		}
	}
	return texts
}
