package lab

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/dataplane/maglev"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
)

var balanceExperiment = Experiment{
	Name:  "balance",
	Short: "How evenly each scheduler spreads connections, and what Maglev moves",
	Long: `Count which of ten backends answers, for every scheduler of every mode that this kernel can do: 100,000 connections
each, from as many addresses, tested against equal shares (chi-square). For schedulers that hash the client, count how many
clients are moved whose own backend stayed when another one goes. It takes about a minute with --quick, a quarter of an hour
without, and root.`,
	Compares: true,
	begin: func(ctx context.Context, r *run) (work, error) {
		p := fullBalance
		if r.Quick {
			p = quickBalance
		}
		return newBalance(ctx, r, p)
	},
}

// balanceProfile says how much is counted.
type balanceProfile struct {
	Name  string
	Each  int // connections of a block
	Parts int // blocks for each scheduler
}

var (
	quickBalance = balanceProfile{"quick", 1000, 5}
	fullBalance  = balanceProfile{"full", 10000, 10}
)

// clients are the addresses that connections come from, one after the other.
var clients = netip.MustParsePrefix("172.20.0.0/15")

// balance is the experiment of that name at work.
type balance struct {
	*run
	Profile balanceProfile
	modes   []string
	cannot  []unable
	nodes   []*node
}

func newBalance(ctx context.Context, r *run, p balanceProfile) (work, error) {
	b := &balance{run: r, Profile: p}
	var err error
	b.modes, b.cannot, err = r.findModes(ctx)
	return b, err
}

func (r *balance) profile() string { return r.Profile.Name }

// schedulers of a mode: each has a Service of its own, in their order.
func schedulers(mode string) []model.Scheduler {
	m, err := agent.ModeOf(mode)
	if err != nil {
		return nil
	}
	return m.Schedulers.List()
}

func (r *balance) steps() []step {
	p, l := r.Profile, &plan{}
	for _, m := range r.modes {
		l.add("starting "+m, time.Second, func(ctx context.Context) error { return r.start(ctx, m) })
	}
	l.add("starting servers", 100*time.Millisecond, r.serve)
	for i, m := range r.modes {
		for k, s := range schedulers(m) {
			l.add(fmt.Sprintf("connecting: %s, %s", m, s), time.Duration(p.Each*p.Parts)*150*time.Microsecond, func(ctx context.Context) error { return r.spread(ctx, r.nodes[i], k, s) })
		}
	}
	for i, m := range r.modes {
		for k, s := range schedulers(m) {
			if s != model.SourceHash && s != model.Maglev {
				continue
			}
			l.add(fmt.Sprintf("taking a backend away: %s, %s", m, s), time.Duration(2*p.Each)*150*time.Microsecond, func(ctx context.Context) error { return r.disrupt(ctx, r.nodes[i], k, s) })
		}
	}
	l.add("computing Maglev's table", 100*time.Millisecond, r.table)
	return *l
}

// start starts an agent with a Service for each of its mode's schedulers.
func (r *balance) start(ctx context.Context, mode string) error {
	list := schedulers(mode)
	var all []int
	for i := range list {
		all = append(all, i)
	}
	c := newCluster(len(list), all...)
	for i, s := range list {
		c.objects[1+2*i].(*corev1.Service).Annotations = map[string]string{resolve.SchedulerAnnotation: s.String()}
	}
	f, err := c.writeTo(r.tmp, mode, 1)
	if err != nil {
		return err
	}
	n, _, err := r.staff(ctx, mode, mode, f, "--maglev-table-size", fmt.Sprint(maglev.Size))
	if err != nil {
		return err
	}
	r.nodes = append(r.nodes, n)
	return n.pair.own(clients)
}

// own makes all addresses of a prefix the node's.
func (p *pair) own(prefix netip.Prefix) error {
	return p.node.Do(func() error {
		c, err := link.DialPolicy()
		if err != nil {
			return err
		}
		defer c.Close()
		return c.Apply([]link.Change{{Way: &link.Way{Owner: unix.RTPROT_STATIC, Table: unix.RT_TABLE_LOCAL, To: prefix, Local: true, Dev: 1}}}) // the loopback is always interface 1
	})
}

// serve starts a server for each backend in every pair.
func (r *balance) serve(context.Context) error {
	if err := r.apart(); err != nil {
		return err
	}
	for _, p := range r.pairs {
		for i := range endpoints {
			if err := p.serve(r.far(p.far), netip.AddrPortFrom(serverAddr(i), serverPort), sizes, byte(1+i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// connect makes connections to a Service from the clients from one on, one each.
func (r *balance) connect(ctx context.Context, n *node, service, from, count int) (load.Sample, error) {
	c := r.client(n.pair, []netip.AddrPort{entry(service)}, 0)
	c.Most, c.Keep = count, true
	a := clients.Addr().As4()
	first := uint32(a[0])<<24 | uint32(a[1])<<16 | uint32(a[2])<<8 | uint32(a[3])
	for i := range count {
		v := first + uint32(1+from+i)
		c.Sources = append(c.Sources, netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)}))
	}
	return c.Run(ctx, load.CRR, 10*time.Minute)
}

// spread counts who answers.
func (r *balance) spread(ctx context.Context, n *node, service int, s model.Scheduler) error {
	p := r.Profile
	for i := range p.Parts {
		sample, err := r.connect(ctx, n, service, i*p.Each, p.Each)
		if err != nil {
			return err
		}
		b, err := result.Block{Measure: "spread", Arm: n.mode, Round: i, Params: scheduled(s)}.Timed(sample)
		if err != nil {
			return err
		}
		b.Counters["servers"] = endpoints
		if err := r.out.Add(b); err != nil {
			return err
		}
	}
	return nil
}

func scheduled(s model.Scheduler) map[string]string {
	return map[string]string{"scheduler": s.String()}
}

// disrupt takes a backend away and counts the clients that are moved though theirs stayed.
func (r *balance) disrupt(ctx context.Context, n *node, service int, s model.Scheduler) error {
	count := r.Profile.Each
	before, err := r.connect(ctx, n, service, 0, count)
	if err != nil {
		return err
	}
	less := n.slice(service).DeepCopy()
	less.Endpoints = less.Endpoints[:endpoints-1]
	save, err := n.prepare(service, less)
	if err == nil {
		err = n.change(ctx, save)
	}
	if err != nil {
		return fmt.Errorf("take a backend away: %w", err)
	}
	after, err := r.connect(ctx, n, service, 0, count)
	if err != nil {
		return err
	}
	if before.Failed()+after.Failed() > 0 {
		return fmt.Errorf("connections failed: %v, %v", before.Errors, after.Errors)
	}
	moved, stayed := 0, 0
	for i, id := range before.Said {
		if id == endpoints { // the one that went
			continue
		}
		stayed++
		if after.Said[i] != id {
			moved++
		}
	}
	b := result.Block{Arm: n.mode, Params: scheduled(s), Counters: map[string]float64{"clients": float64(stayed), "moved": float64(moved)}}
	return r.add(b, "moved", float64(moved)/float64(max(1, stayed)))
}

// change saves a file and waits until the agent has written what follows from it.
func (n *node) change(ctx context.Context, save func() error) error {
	before, err := n.loop()
	if err != nil {
		return err
	}
	if err := save(); err != nil {
		return err
	}
	for end := time.Now().Add(within(late)); time.Now().Before(end); {
		s, err := n.loop()
		if err != nil {
			return err
		}
		if s.Writes > before.Writes && s.Unsynced == 0 {
			return rest(ctx, 50*time.Millisecond)
		}
		if err := rest(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
	return fmt.Errorf("the agent of %s wrote nothing in %v", n.name, within(late))
}

// table computes what the table itself promises, without a packet: how far its fullest backend is above the mean, and how
// many entries of other backends change when one goes.
func (r *balance) table(context.Context) error {
	var backends []model.Backend
	for i := range endpoints {
		backends = append(backends, model.Backend{Addr: netip.AddrPortFrom(serverAddr(i), serverPort)})
	}
	begin := time.Now()
	before := maglev.Table(backends, maglev.Size)
	took := time.Since(begin)
	after := maglev.Table(backends[:endpoints-1], maglev.Size)
	counts := map[uint16]int{}
	moved := 0
	for i, b := range before {
		counts[b]++
		if b != endpoints-1 && after[i] != b {
			moved++
		}
	}
	most := slices.Max(slices.Collect(maps.Values(counts)))
	at := scheduled(model.Maglev)
	for _, m := range []struct {
		id    string
		value float64
	}{{"table-imbalance", float64(most)*endpoints/float64(maglev.Size) - 1}, {"table-moved", float64(moved) / float64(maglev.Size)}, {"table-time", float64(took)}} {
		if err := r.add(result.Block{Arm: armTable, Params: at}, m.id, m.value); err != nil {
			return err
		}
	}
	return nil
}

// armTable is Maglev's table, computed.
const armTable = "table"

func (r *balance) design() result.Design {
	p := r.Profile
	n := thousands(p.Each * p.Parts)
	return result.Design{
		ID: "balance", Title: "How evenly connections are spread",
		Question: fmt.Sprintf("Which of %d backends answers a connection, in every mode and with every scheduler that it has, and whom does a hash move when a backend goes?", endpoints),
		Vary:     result.Axis{Param: "scheduler", Title: "scheduler", Short: "by scheduler"},
		Arms:     append(modeArms(r.modes), result.Arm{ID: armTable, Title: "Maglev's table, computed", Text: "the table that modes fill, of ten backends, without a packet"}),
		Rounds:   p.Parts,
		Measures: []result.Measure{
			{ID: "spread", Detail: true, Title: "fullest backend above the mean", Unit: "%", Stat: "imbalance", Text: fmt.Sprintf("median over %d blocks of %s connections, each from an address of its own; chance alone makes some", p.Parts, thousands(p.Each))},
			{ID: "moved", Title: "clients moved though their backend stayed", Unit: "%", Stat: "value", Exact: true, Text: fmt.Sprintf("of %s clients, after one of %d backends went", thousands(p.Each), endpoints)},
			{ID: "table-imbalance", Title: "Maglev's table: fullest backend above the mean", Unit: "%", Stat: "value", Exact: true, Text: fmt.Sprintf("computed, %d entries", maglev.Size)},
			{ID: "table-moved", Title: "Maglev's table: entries of other backends that change when one goes", Unit: "%", Stat: "value", Exact: true, Text: "computed"},
			{ID: "table-time", Title: "Maglev's table: time to build", Unit: "ms", Stat: "value", Text: "once"},
		},
		Aims: r.aims(n),
		Method: []string{
			fmt.Sprintf("In each mode there is a Service for each of its schedulers, asked for by the annotation %s, with the same %d backends of equal weight, each a server of its own that says who it is. "+
				"%s connections are made to each, one after the other, each from another address of the node's, so that a hash of the client has as many clients. Maglev's tables have %s entries (run --maglev-table-size), but IPVS's.", resolve.SchedulerAnnotation, endpoints, n, thousands(maglev.Size)),
			"The test is Pearson's chi-square of all counts against equal shares. Random draws and hashes should look like chance (p is anywhere between 0 and 1, below 0.001 once in a thousand); taking turns should be more even than chance (p near 1). " +
				"Schedulers that count connections see one at a time here, and one that hashes the destination has but one: these are shown and not judged.",
		},
		Missing:  append(unableWords(r.cannot), "Weights, other than equal ones.", "Schedulers under many connections at once.", "Clients outside the node."),
		Pictures: []result.Picture{{ID: "shares", Kind: result.Shares, Title: "Who answered: the shares of ten backends", Measures: []string{"spread"}, Alone: true}},
	}
}

// judged are the schedulers whose shares must look equal, or be so.
var judged = []model.Scheduler{model.Random, model.RoundRobin, model.WeightedRoundRobin, model.SourceHash, model.Maglev}

func (r *balance) aims(n string) (l []result.Aim) {
	const least = 0.001
	for _, m := range r.modes {
		for _, s := range schedulers(m) {
			if !slices.Contains(judged, s) {
				continue
			}
			a := result.Aim{ID: m + ", " + s.String(), Text: fmt.Sprintf("equal shares of %s connections: p ≥ %g", n, least), Measure: "spread", Arm: m, Params: scheduled(s), Of: "p", Bound: least, Least: true}
			if m == "iptables" && s == model.Random {
				a.ID, a.Text, a.Claim = "A4", "iptables draws backends at random, each as likely: "+a.Text, byTigera
			}
			l = append(l, a)
			if s == model.Maglev {
				l = append(l, result.Aim{ID: m + ", moved", Text: "Maglev moves ≤ 0.5 % of the clients whose backend stays", Measure: "moved", Arm: m, Params: scheduled(s), Of: "value", Bound: 0.005})
			}
		}
	}
	at := scheduled(model.Maglev)
	return append(l,
		result.Aim{ID: "table, imbalance", Text: "Maglev's table: no backend has more than 1 % above the mean", Measure: "table-imbalance", Arm: armTable, Params: at, Of: "value", Bound: 0.01},
		result.Aim{ID: "table, moved", Text: "Maglev's table: ≤ 0.5 % of all entries are other backends' and change when one goes", Measure: "table-moved", Arm: armTable, Params: at, Of: "value", Bound: 0.005})
}
