package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/bits"
	"slices"
	"strings"
	"sync"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/dataplane/xt"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/kernel/nfacct"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

// Capabilities returns what the plane supports with the variant in use, CapabilitiesOf with a chosen one.
func Capabilities() model.Capabilities { return capabilities("iptables", NFT, Legacy) }

// CapabilitiesOf returns what the plane supports with a variant.
func CapabilitiesOf(v Variant) model.Capabilities { return capabilities("iptables-"+string(v), v) }

// capabilities returns what the plane supports: no family whose commands none of the variants has.
func capabilities(name string, of ...Variant) model.Capabilities {
	c := common
	c.Name = name
	for _, f := range iptables.Families {
		if why := lacks(f, of...); why != "" {
			c.Unserved = append(c.Unserved, model.Remark{ID: fmt.Sprintf("no-commands-ipv%d", f), Text: why,
				About: &model.Packets{Family: uint8(f)}})
		}
	}
	return c
}

// Missing returns what this kernel lacks that the plane can do without, and what follows.
func Missing(of ...Variant) (l []string) {
	for _, f := range iptables.Families {
		if why := lacks(f, of...); why != "" {
			l = append(l, why)
		}
	}
	return l
}

// lacks returns why a family's frontends can't be served, or "".
func lacks(f iptables.Family, of ...Variant) string {
	tool := iptables.Lacks(f, of...)
	if tool == "" {
		return ""
	}
	return fmt.Sprintf("%s is not installed, so that no Service is served by IPv%d: install the package iptables, and "+
		"start the agent anew", tool, f)
}

// common is what the plane supports with either variant.
var common = model.Capabilities{
	Schedulers:  model.SchedulersOf(model.Random, model.RoundRobin),
	Batch:       Batch,
	Tracked:     true,
	Accepts:     true,
	Unsupported: model.Unsupported{NoIPVLAN: service.PodsBypass, NoDirect: service.RepliesReturn},
	Remarks: []model.Remark{
		{ID: "accepts", Text: "Of forwarded packets, those of established connections and those that are masqueraded are " +
			"accepted before other rules, whatever the policy of FORWARD, and in INPUT those to healthCheckNodePorts."},
		{ID: "invalid", Text: "Forwarded packets that connection tracking calls invalid are dropped, unless " +
			"conntrack.tcpBeLiberal is set: set it if the two directions of a connection pass different nodes."},
		{ID: "mark", Text: "Bit 0x4000 of the packet mark is used between PREROUTING and POSTROUTING."},
		{ID: "source-ranges", Text: "Allowed source ranges are a list: a new connection evaluates a rule for each until " +
			"one matches.",
			About: &model.Packets{Ranges: true}},
		{ID: "affinity", Text: "Each endpoint remembers the clients of session affinity up to xt_recent's ip_list_tot, 100 " +
			"by default; a new connection to a Service with session affinity evaluates a rule for each endpoint.",
			About: &model.Packets{Affinity: true}},
		{ID: "legacy-table", Text: "With the legacy variant a change replaces a whole table: 0.4 s at 10,000 " +
			"Services of 10 endpoints, and round-robin counters start again with each."},
		{ID: "legacy-watch", Text: "With the legacy variant changes by other programs are noticed by the tables' sizes, " +
			"once a second."},
	},
}

// Batch is how many facts one Write has at most.
const Batch = 1 << 17

// Mark is the bit of the packet mark that notes that a source is to be hidden, unless another is chosen.
const Mark = 0x4000

// Variant is which of the two sets of iptables' commands is used.
type Variant = iptables.Variant

// The variants.
const (
	Legacy = iptables.Legacy
	NFT    = iptables.NFT
)

// Plane writes facts into one network namespace. It implements dataplane.Plane[model.ServicePart, Key, string],
// dataplane.Watcher and dataplane.Cleaner.
type Plane struct {
	conn     *iptables.Conn
	localnet *sysctl.File
	mark     uint32
	tracking *sysctl.File // how connection tracking judges segments
	liberal  func() bool  // see node; nil: no
	counted  bool

	mu   sync.Mutex
	held map[iptables.Family]*held // what the kernel holds; nil: not known
}

var (
	_ dataplane.Plane[model.ServicePart, Key, string] = (*Plane)(nil)
	_ dataplane.Watcher                               = (*Plane)(nil)
	_ dataplane.Cleaner                               = (*Plane)(nil)
)

// routeLocalnet is the sysctl that lets packets with IPv4 loopback addresses leave the host, for node ports on
// localhost.
const routeLocalnet = "net/ipv4/conf/all/route_localnet"

// tcpBeLiberal is the sysctl that has connection tracking call only resets outside a connection's window invalid. As
// with kube-proxy, it counts as it is when the plane is opened.
const tcpBeLiberal = "net/netfilter/nf_conntrack_tcp_be_liberal"

// New opens the plane of the calling thread's network namespace, with the variant that is in use there.
func New() (*Plane, error) {
	v, err := iptables.Probe(context.Background(), Prefix)
	if err != nil {
		return nil, err
	}
	return NewVariant(v)
}

// NewVariant opens the plane of the calling thread's network namespace with a chosen variant.
func NewVariant(v Variant) (*Plane, error) { return NewMarked(v, Mark) }

// NewMarked also chooses the bit of the packet mark, where another owner uses Mark. What was written with another bit
// is read as altered, and so written anew.
func NewMarked(v Variant, mark uint32) (*Plane, error) {
	if bits.OnesCount32(mark) != 1 {
		return nil, fmt.Errorf("iptables: packet mark %#x: choose one bit, such as %#x", mark, Mark)
	}
	conn, err := iptables.Open(v, Prefix, tables...)
	if err != nil {
		return nil, err
	}
	s, err := sysctl.Open(routeLocalnet) // read-only is enough unless localhost takes node ports
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("iptables: %w", err)
	}
	tracking := sysctl.OpenOptional(tcpBeLiberal)
	// Read with the first facts, not here: an agent makes its settings of the node in between.
	liberal := sync.OnceValue(func() bool {
		value, err := tracking.Get()
		return err == nil && value != "0"
	})
	return &Plane{conn: conn, localnet: s, tracking: tracking, mark: mark, liberal: liberal, counted: nfacct.Supported(),
		held: map[iptables.Family]*held{}}, nil
}

// Variant returns the variant in use.
func (p *Plane) Variant() Variant { return p.conn.Variant }

// Close closes the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error {
	p.localnet.Close()
	p.tracking.Close()
	return p.conn.Close()
}

// OnWarning reports the families whose commands are not installed.
func (p *Plane) OnWarning(report func(text string)) {
	for _, why := range Missing(p.Variant()) {
		report(why)
	}
}

// Watch implements dataplane.Watcher, as far as the variant allows.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) { return p.conn.Watch(ctx) }

// Read implements dataplane.Plane. A family that can't be read, while the other can, has no facts: a Write of them says
// why.
func (p *Plane) Read(ctx context.Context) ([]Fact, error) {
	facts, failed, err := p.read(ctx)
	if err == nil && (ctx.Err() != nil || len(failed) == len(p.conn.Families)) {
		err = errors.Join(failed...)
	}
	return facts, err
}

// read returns the facts of the families that can be read, and what is wrong with the others.
func (p *Plane) read(ctx context.Context) (facts []Fact, failed []error, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.conn.Mark(); err != nil {
		return nil, nil, err
	}
	for _, f := range p.conn.Families {
		if err := p.load(ctx, f); err != nil {
			failed = append(failed, err)
		} else {
			facts = append(facts, p.held[f].facts()...)
		}
	}
	if four := p.held[iptables.IPv4]; four != nil && (four.localnet || four.node != nil && four.node.localhost) {
		v, err := p.localnet.Get()
		if err != nil {
			return nil, nil, err
		}
		facts = append(facts, fact(Key{Kind: KindSysctl, Family: iptables.IPv4, Name: routeLocalnet}, v))
	}
	return facts, failed, nil
}

// load learns what a family's tables hold.
func (p *Plane) load(ctx context.Context, f iptables.Family) error {
	delete(p.held, f)
	read, err := p.conn.Save(ctx, f, tables...)
	if err != nil {
		return err
	}
	p.held[f] = understand(f, p.mark, read)
	return nil
}

// facts returns what the tables stand for.
func (h *held) facts() (facts []Fact) {
	node := Key{Kind: KindNode, Family: h.family}
	switch {
	case h.wrong != "":
		facts = append(facts, fact(node, h.wrong))
	case h.node != nil:
		facts = append(facts, fact(node, h.node.String()))
	}
	for name, p := range h.pools {
		facts = append(facts, fact(Key{Kind: KindPool, Family: h.family, Name: name}, p.value))
	}
	for port := range h.health {
		facts = append(facts, healthFact(h.family, port))
	}
	for a := range h.remotes {
		facts = append(facts, remoteFact(a))
	}
	for e, f := range h.frontends {
		facts = append(facts, fact(Key{Kind: KindFrontend, Family: h.family, Entry: e}, f.String()))
	}
	return facts
}

// Write implements dataplane.Plane: one restore for each family concerned (in the nft variant more where very much is
// put), and the sysctl after (or, when it goes, before) it. A family that fails leaves the other be, and is read again
// before the next.
func (p *Plane) Write(ctx context.Context, put, del []Fact) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, f := range p.conn.Families {
		is := func(x Fact) bool { return x.Key.Family != f }
		ours, gone := slices.DeleteFunc(slices.Clone(put), is), slices.DeleteFunc(slices.Clone(del), is)
		for len(ours)+len(gone) > 0 {
			var now, then []Fact
			now, then, ours, gone = p.portion(ours, gone)
			if err := p.write(ctx, f, now, then); err != nil {
				delete(p.held, f)
				errs = append(errs, err)
				break
			}
		}
	}
	return errors.Join(errs...)
}

// most is how many pools' chains one restore of the nft variant is given: it takes longer than linearly in their
// number.
const most = 2000

// portion returns what one restore is to do, and what is left: everything, or, where there are many pools to put, some
// of those. A pool may come before what leads to it.
func (p *Plane) portion(put, del []Fact) (now, then, later, after []Fact) {
	chosen := map[Key]bool{}
	for _, f := range put {
		if f.Key.Kind == KindPool && len(chosen) < most {
			chosen[f.Key] = true
		}
	}
	if p.Variant() == Legacy || len(chosen) < most || len(put) == len(chosen) {
		return put, del, nil, nil
	}
	for _, f := range put {
		if chosen[f.Key] {
			now = append(now, f)
		} else {
			later = append(later, f)
		}
	}
	for _, f := range del {
		if chosen[f.Key] {
			then = append(then, f)
		} else {
			after = append(after, f)
		}
	}
	return now, then, later, after
}

// countPolicies reads anew where the rules of a policy engine end, for a change that puts rules behind them: it may
// have come since. A rule of ours in front of them would accept what they drop.
func (p *Plane) countPolicies(ctx context.Context, c *change) error {
	is, err := p.conn.Save(ctx, c.family, "filter")
	if err != nil {
		return err
	}
	clear(c.from.tables["filter"].policies)
	for name, rules := range is["filter"].Rules {
		for _, r := range rules {
			if !xt.Leads(r, xt.PolicyPrefix) {
				break
			}
			c.from.tables["filter"].policies[strings.Clone(name)]++
		}
	}
	return nil
}

// write writes one family's facts.
func (p *Plane) write(ctx context.Context, f iptables.Family, put, del []Fact) error {
	if p.held[f] == nil {
		if err := p.load(ctx, f); err != nil {
			return err
		}
	}
	h := p.held[f]
	c := h.change(put, del)
	after, err := p.localhost(c)
	if err != nil {
		return err
	}
	if err := p.ensureCounters(c); err != nil {
		return err
	}
	if c.leads() {
		xt.Leading.Lock()
		defer xt.Leading.Unlock()
		if err := p.countPolicies(ctx, c); err != nil {
			return err
		}
	}
	if input := c.input(); len(input) > 0 {
		if err := p.conn.Restore(ctx, f, input); err != nil {
			return err
		}
	}
	if after {
		if err := p.setSysctl("1"); err != nil {
			return err
		}
	}
	h.become(c)
	return nil
}

// ensureCounters creates the counters that the rules of a change count in.
func (p *Plane) ensureCounters(c *change) error {
	if c.tables == nil || c.node == nil || !c.node.counted {
		return nil
	}
	return p.conn.Do(func() error { return errors.Join(nfacct.Ensure(invalidDropped), nfacct.Ensure(localhostAccepted)) })
}

// Counted returns what was counted; nil where the kernel has no counters (CONFIG_NETFILTER_XT_MATCH_NFACCT).
func (p *Plane) Counted() (*service.RuleCounts, error) {
	if !p.counted {
		return nil, nil
	}
	var c service.RuleCounts
	err := p.conn.Do(func() (err error) {
		if c.InvalidDropped, err = nfacct.Packets(invalidDropped); err == nil {
			c.LocalhostAccepted, err = nfacct.Packets(localhostAccepted)
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // nothing is written yet
		return nil, fmt.Errorf("iptables: %w", err)
	}
	return &c, nil
}

// localhost changes the sysctl back before the guard goes, if it was us who changed it, which a comment among the rules
// says; and reports whether it is to be set once the guard stands.
func (p *Plane) localhost(c *change) (after bool, err error) {
	if c.sysctl == nil {
		return false, nil
	}
	if !*c.sysctl {
		if c.localnet {
			c.localnet = false
			err = p.setSysctl("0")
		}
		return false, err
	}
	now, err := p.localnet.Get()
	if err != nil || now == "1" {
		return false, err
	}
	c.localnet = true
	return true, nil
}

func (p *Plane) setSysctl(value string) error {
	if err := p.localnet.Set(value); err != nil {
		return fmt.Errorf("iptables: node ports on localhost: %w", err)
	}
	return nil
}

// Clean implements dataplane.Cleaner, for both variants where they are installed.
func (p *Plane) Clean(ctx context.Context) error {
	if err := p.clean(ctx); err != nil {
		return err
	}
	other := NFT
	if p.Variant() == NFT {
		other = Legacy
	}
	var q *Plane
	err := p.conn.Do(func() (err error) {
		q, err = NewVariant(other)
		return err
	})
	if err != nil {
		return nil // not installed, or not in this kernel: nothing of ours can be there
	}
	defer q.Close()
	return q.clean(ctx)
}

// clean removes everything of ours from the plane's variant, as far as it can be read.
func (p *Plane) clean(ctx context.Context) error {
	facts, failed, err := p.read(ctx)
	err = errors.Join(err, p.Write(ctx, nil, facts), errors.Join(failed...))
	if err != nil || !p.counted {
		return err
	}
	return p.conn.Do(func() error { return errors.Join(nfacct.Delete(invalidDropped), nfacct.Delete(localhostAccepted)) })
}

// sortedKeys returns a map's keys in order.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
