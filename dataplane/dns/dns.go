// Package dns is the data plane that queues the DNS messages of some pods to the agent: one nf_tables table of the inet
// family, for policies that name domain names. It sees queries where they are forwarded to a resolver, or come in where
// that is on the node itself, and answers where they are forwarded to the pod, or go out by a socket of the node; with
// every mode of Services, and behind every policy engine.
//
// For each family (4 and 6) there is
//
//	pod        address                        of the pods
//	resolver   address · port                 of the resolvers
//	name       address · digest of the name   with the name as comment, and its time to live as timeout
//	held       address                        of pods, with the messages of late that were held
//	copied     address                        of pods, with those that were copied
//	query      chain: what becomes of a pod's queries
//	forwarded  chain: which answers that are forwarded count
//	answer     chain: what becomes of those
//
// and for both the chains input (queries), forward (queries and answers) and output (answers), over UDP and TCP.
//
// An answer that is forwarded counts if a route back to its source leads to the device that it came in by: a pod's own
// where the resolver is a pod of the node, else the uplink or an overlay. So no pod can send one in a resolver's place.
// A forged one passes, and is counted.
//
// A message goes to the queue Queue, by the target NFQUEUE of x_tables, and waits until the agent lets it go on; where
// no agent listens, it passes. Beyond a pod's share of the queue, and where the kernel has no NFQUEUE, it is copied to
// the group LogGroup of nflog and passes at once, and beyond a share of that too, uncopied and counted. So no pod takes
// up the queue, the socket or the agent's time, and no message is dropped.
//
// The sets name4 and name6 are the agent's records of what it has learned, which outlive it. Like the table of the
// policy engine nftables, this one belongs to the process that writes it and outlives it too (Linux 6.9).
package dns

import (
	"context"
	"crypto/sha256"
	"net/netip"
	"slices"
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

// Copied is how many bytes of a message are copied where it isn't held.
const Copied = 4096

// A pod's share, in each family: so many queries and answers are held in a second, and a burst of more; and copied
// beyond.
const (
	shareRate  = 200
	shareBurst = 1000
)

// QueueLength is how many messages may wait: the bursts of 16 pods at once.
const QueueLength = 16 * shareBurst

// idle is how long a pod's share is remembered without a message: it is whole again sooner.
const idle = time.Minute

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
	// answers count whatever device they came in by
	anyDevice bool
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
	p := &Plane{conn: conn, table: &nft.Table[Key]{Name: Table, Layout: "layout 2", Sets: sets, Hooks: hooks,
		Comment: "DNS messages for policies that name domain names", Of: func(k Key) Key { return k },
		Private: func(name string) bool { return name == records(nft.IPv4) || name == records(nft.IPv6) }}}
	const owned = nftables.Owned | nftables.Persistent
	supported, err := conn.Supports(owned)
	if err == nil {
		p.held, err = conn.SupportsRule(*hooks[chainForward], nftables.Exprs(nftables.Queue(Queue)))
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

// AnyDevice has answers count whatever device they came in by, as where routes are asymmetric. It comes before Render.
func (p *Plane) AnyDevice() { p.anyDevice = true }

// Close closes the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error { return p.conn.Close() }

const (
	chainIn      = "input"
	chainForward = "forward"
	chainOut     = "output"
)

// priority is behind policies (0 to 49), and before IPVS (98) and what translates sources (100).
const priority = 60

var hooks = map[string]*nftables.Hook{
	chainIn:      {Type: "filter", Number: unix.NF_INET_LOCAL_IN, Priority: priority},
	chainForward: {Type: "filter", Number: unix.NF_INET_FORWARD, Priority: priority},
	chainOut:     {Type: "filter", Number: unix.NF_INET_LOCAL_OUT, Priority: priority},
}

var families = []*nft.Family{nft.IPv4, nft.IPv6}

func pods(f *nft.Family) string      { return "pod" + f.Name }
func resolvers(f *nft.Family) string { return "resolver" + f.Name }
func records(f *nft.Family) string   { return "name" + f.Name }
func held(f *nft.Family) string      { return "held" + f.Name }
func logged(f *nft.Family) string    { return "copied" + f.Name }
func queries(f *nft.Family) string   { return "query" + f.Name }
func answers(f *nft.Family) string   { return "answer" + f.Name }
func forwarded(f *nft.Family) string { return "forwarded" + f.Name }

var sets = func() map[string]nftables.Set {
	m := map[string]nftables.Set{}
	for _, f := range families {
		m[pods(f)] = nftables.Set{Name: pods(f), Key: []nftables.Type{f.Type}}
		m[resolvers(f)] = nftables.Set{Name: resolvers(f), Key: []nftables.Type{f.Type, nftables.Port}}
		m[records(f)] = nftables.Set{Name: records(f), Key: []nftables.Type{f.Type, nftables.Mark}, Timeout: time.Minute}
		for _, name := range []string{held(f), logged(f)} {
			m[name] = nftables.Set{Name: name, Key: []nftables.Type{f.Type}, Dynamic: true, Size: 1 << 16}
		}
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

// messages returns the rules that do then with queries (from a pod to a resolver) or answers, over UDP and TCP.
func messages(isAnswer bool, then func(*nft.Family) []nftables.Expr) (rules [][]nftables.Expr) {
	for _, f := range families {
		pod, resolver, port := f.Src, f.Dst, uint32(2)
		if isAnswer {
			pod, resolver, port = f.Dst, f.Src, 0
		}
		for _, protocol := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			rules = append(rules, nftables.Join(f.Is(), nftables.Exprs(
				nftables.Meta(nftables.MetaL4Proto, nftables.R(0)), nftables.Cmp(nftables.Eq, nftables.R(0), []byte{protocol}),
				f.Address(pod, 0), nftables.Member(pods(f), nftables.R(0)),
				f.Address(resolver, 0), nftables.Payload(nftables.TransportHeader, port, 2, nftables.R(f.Words)),
				nftables.Member(resolvers(f), nftables.R(0))), then(f)))
		}
	}
	return rules
}

// to returns what leads to a chain of the family.
func to(chain func(*nft.Family) string) func(*nft.Family) []nftables.Expr {
	return func(f *nft.Family) []nftables.Expr { return nftables.Exprs(nftables.Do(nftables.Goto(chain(f)))) }
}

// own leads to the answers what a socket of the node has sent: not what IPVS sends on there.
func own(f *nft.Family) []nftables.Expr {
	return nftables.Join(nftables.Exprs(nftables.OwnSocket(nftables.R(0))), to(answers)(f))
}

// forwards returns the rules for answers that are forwarded: what came in by another device than leads back to the
// resolver is counted, and passes.
func (p *Plane) forwards(f *nft.Family) [][]nftables.Expr {
	if p.anyDevice {
		return [][]nftables.Expr{to(answers)(f)}
	}
	return [][]nftables.Expr{nftables.Join(nftables.FibReverse(nftables.R(0)), to(answers)(f)),
		nftables.Exprs(nftables.Counter())}
}

// shares returns the rules for messages of the pod whose address is at an offset of the header: what is in its share is
// held, then copied; the rest is counted and passes.
func (p *Plane) shares(f *nft.Family, pod uint32) (rules [][]nftables.Expr) {
	within := func(set string) []nftables.Expr {
		return nftables.Exprs(f.Address(pod, 0),
			nftables.Meter(set, nftables.R(0), idle, nftables.Limit(shareRate, shareBurst)))
	}
	if p.held {
		rules = append(rules, nftables.Join(within(held(f)), nftables.Exprs(nftables.Queue(Queue))))
	}
	return append(rules, nftables.Join(within(logged(f)), nftables.Exprs(nftables.Log(LogGroup, "dns", Copied),
		nftables.Do(nftables.Return))), nftables.Exprs(nftables.Counter()))
}

// frame returns the facts that every part needs.
func (p *Plane) frame() []Fact {
	facts := p.table.Frame()
	for _, f := range families {
		facts = append(facts, p.table.Chain(queries(f), p.shares(f, f.Src)), p.table.Chain(answers(f), p.shares(f, f.Dst)),
			p.table.Chain(forwarded(f), p.forwards(f)))
	}
	fromPods := messages(false, to(queries))
	return append(facts, p.table.Chain(chainIn, fromPods), p.table.Chain(chainOut, messages(true, own)),
		p.table.Chain(chainForward, slices.Concat(fromPods, messages(true, to(forwarded)))))
}

// Render implements dataplane.Plane.
func (p *Plane) Render(x Part) []Fact {
	set, key := pods(familyOf(x.Addr)), x.Addr.AsSlice()
	if x.Port != 0 {
		set, key = resolvers(familyOf(x.Addr)), nftables.PortWord(key, x.Port)
	}
	return append(p.frame(), p.table.Element(set, key, ""))
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

// Counts is how many messages were neither held nor copied since the table was made.
type Counts struct {
	Unread uint64 // beyond their pod's share
	Forged uint64 // answers by another device than their resolver's
}

// Counts returns them; none where there is no table.
func (p *Plane) Counts() (c Counts, err error) {
	n, err := p.conn.Counters(Table)
	for _, f := range families {
		c.Unread += n[queries(f)] + n[answers(f)]
		c.Forged += n[forwarded(f)]
	}
	return c, err
}

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
