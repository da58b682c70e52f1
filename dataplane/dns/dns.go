// Package dns is the data plane that hands the DNS messages of some pods to the agent: one nf_tables table of the inet
// family, for policies that name domain names. Queries are seen where they leave for a resolver, or come in where that
// is on the node itself; answers where they leave for the pod, with every mode of Services and every policy engine.
//
// For each family (4 and 6) there is
//
//	pod        address                        of the pods
//	resolver   address · port                 of the resolvers
//	name       address · digest of the name   with the name as comment, and its time to live as timeout
//
// and for both the chains input (queries) and postrouting (queries and answers), over UDP and TCP. Each message goes to
// the queue Queue, by the target NFQUEUE of x_tables, and waits until the agent lets it go on; where no agent listens,
// it passes. Where the kernel has no NFQUEUE it is copied to the group LogGroup of nflog instead.
//
// The sets name4 and name6 are the agent's records of what it has learned, which outlive it. Like the table of the
// policy engine nftables, this one belongs to the process that writes it and outlives it too (Linux 6.9).
package dns

import (
	"context"
	"crypto/sha256"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/nft"
	"fairlead.dev/fairlead/kernel/nftables"
)

// Table is the name of the plane's table.
const Table = "fairlead-dns"

// Queue is the queue of netfilter that messages go to, and LogGroup the group of nflog.
const (
	Queue    = 4272
	LogGroup = 4272
)

// copied is how many bytes of a message are copied where it isn't held.
const copied = 4096

// Part is what the table is about: the address of a pod, or the address and port of a resolver.
type Part struct {
	Addr netip.Addr
	Port uint16 // 0: of a pod
}

// Key and Fact are those of the table.
type (
	Key  = nft.Key
	Fact = nft.Fact[Key]
)

// Plane writes facts into one network namespace. It implements dataplane.Plane[Part, Key, string], dataplane.Watcher
// and dataplane.Cleaner.
type Plane struct {
	conn  *nftables.Conn
	table *nft.Table[Key]
	held  bool
}

var (
	_ dataplane.Plane[Part, Key, string] = (*Plane)(nil)
	_ dataplane.Watcher                  = (*Plane)(nil)
	_ dataplane.Cleaner                  = (*Plane)(nil)
)

// New opens the plane of the calling thread's network namespace.
func New() (*Plane, error) {
	conn, err := nftables.Open()
	if err != nil {
		return nil, err
	}
	p := &Plane{conn: conn, table: &nft.Table[Key]{Name: Table, Layout: "layout 1", Sets: sets, Hooks: hooks,
		Comment: "DNS messages for policies that name domain names", Of: func(k Key) Key { return k },
		Private: func(name string) bool { return name == records(nft.IPv4) || name == records(nft.IPv6) }}}
	const owned = nftables.Owned | nftables.Persistent
	supported, err := conn.Supports(owned)
	if err == nil {
		p.held, err = conn.SupportsRule(*hooks[chainOut], nftables.Exprs(nftables.Queue(Queue)))
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	if supported {
		p.table.Flags = owned
	}
	return p, nil
}

// Held reports whether messages wait in Queue; else they are copied to LogGroup.
func (p *Plane) Held() bool { return p.held }

// Copy has messages copied to LogGroup, also where the kernel can hold them. It comes before Render.
func (p *Plane) Copy() { p.held = false }

// Close closes the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error { return p.conn.Close() }

const (
	chainIn  = "input"
	chainOut = "postrouting"
)

// hooks are before NAT changes the source of a query, and before policies and IPVS see what comes in.
var hooks = map[string]*nftables.Hook{
	chainIn:  {Type: "filter", Number: unix.NF_INET_LOCAL_IN, Priority: -150},
	chainOut: {Type: "filter", Number: unix.NF_INET_POST_ROUTING, Priority: -150},
}

var families = []*nft.Family{nft.IPv4, nft.IPv6}

func pods(f *nft.Family) string      { return "pod" + f.Name }
func resolvers(f *nft.Family) string { return "resolver" + f.Name }
func records(f *nft.Family) string   { return "name" + f.Name }

var sets = func() map[string]nftables.Set {
	m := map[string]nftables.Set{}
	for _, f := range families {
		m[pods(f)] = nftables.Set{Name: pods(f), Key: []nftables.Type{f.Type}}
		m[resolvers(f)] = nftables.Set{Name: resolvers(f), Key: []nftables.Type{f.Type, nftables.Port}}
		m[records(f)] = nftables.Set{Name: records(f), Key: []nftables.Type{f.Type, nftables.Mark}, Timeout: time.Minute}
	}
	return m
}()

// familyOf returns an address's family.
func familyOf(a netip.Addr) *nft.Family {
	if a.Is4() {
		return nft.IPv4
	}
	return nft.IPv6
}

// messages returns the rules for queries (from a pod to a resolver) or answers, over UDP and TCP.
func (p *Plane) messages(answers bool) (rules [][]nftables.Expr) {
	pass := nftables.Queue(Queue)
	if !p.held {
		pass = nftables.Log(LogGroup, "dns", copied)
	}
	for _, f := range families {
		pod, resolver, at := f.Src, f.Dst, uint32(2)
		if answers {
			pod, resolver, at = f.Dst, f.Src, 0
		}
		for _, protocol := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			rules = append(rules, nftables.Join(f.Is(), nftables.Exprs(
				nftables.Meta(nftables.MetaL4Proto, nftables.R(0)), nftables.Cmp(nftables.Eq, nftables.R(0), []byte{protocol}),
				f.Address(pod, 0), nftables.Member(pods(f), nftables.R(0)),
				f.Address(resolver, 0), nftables.Payload(nftables.TransportHeader, at, 2, nftables.R(f.Words)),
				nftables.Member(resolvers(f), nftables.R(0)), pass)))
		}
	}
	return rules
}

// Render implements dataplane.Plane.
func (p *Plane) Render(x Part) []Fact {
	set, key := pods(familyOf(x.Addr)), x.Addr.AsSlice()
	if x.Port != 0 {
		set, key = resolvers(familyOf(x.Addr)), nftables.PortWord(key, x.Port)
	}
	queries := p.messages(false)
	return append(p.table.Frame(), p.table.Chain(chainIn, queries),
		p.table.Chain(chainOut, append(queries, p.messages(true)...)), p.table.Element(set, key, ""))
}

// Read implements dataplane.Plane.
func (p *Plane) Read(context.Context) ([]Fact, error) {
	if err := p.conn.Mark(); err != nil {
		return nil, err
	}
	return p.table.Read(p.conn, nil)
}

// Write implements dataplane.Plane: one transaction.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	return p.table.Write(p.conn, put, del)
}

// Watch implements dataplane.Watcher.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	return p.table.Watch(ctx, p.conn)
}

// Clean implements dataplane.Cleaner.
func (p *Plane) Clean(context.Context) error { return p.table.Clean(p.conn) }

// Record is an address that a domain name has, and for how long.
type Record struct {
	Name string
	Addr netip.Addr
	TTL  time.Duration
}

// Records returns what SetRecords wrote and has not gone by itself; none where there is no table.
func (p *Plane) Records() (l []Record, err error) {
	for _, f := range families {
		es, err := p.conn.Timed(Table, records(f))
		if err != nil {
			return nil, err
		}
		for _, e := range es {
			if a, ok := netip.AddrFromSlice([]byte(e.Key[:min(len(e.Key), 4*f.Words)])); ok && e.Comment != "" {
				l = append(l, Record{e.Comment, a, e.Timeout})
			}
		}
	}
	return l, nil
}

// SetRecords writes records in place of all that there are. The table must be there.
func (p *Plane) SetRecords(l []Record) error {
	var tx nftables.Tx
	for _, f := range families {
		seen := map[string]bool{}
		var es []nftables.Element
		for _, r := range l {
			sum := sha256.Sum256([]byte(r.Name))
			key := string(r.Addr.AsSlice()) + string(sum[:4])
			if f.Has(r.Addr) && !seen[key] {
				seen[key] = true
				es = append(es, nftables.Element{Key: key, Timeout: max(r.TTL, time.Millisecond), Comment: r.Name})
			}
		}
		tx.FlushSet(Table, records(f))
		tx.AddElements(Table, records(f), es)
	}
	return p.conn.Commit(&tx)
}
