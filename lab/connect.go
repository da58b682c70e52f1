package lab

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

var connectExperiment = Experiment{
	Name:  "connect",
	Short: "New connections in mode ebpf, to within 1 %, with warm and cold caches",
	Long: `Measure connect() alone, and a connection with one request, at 10 and 10,000 Services of ten endpoints, in modes ebpf,
nftables and iptables and with kube-proxy's iptables rules, against direct, of clients on the node and in a pod: in as many
blocks as it takes to tell 1 %, with what was looked up a moment ago still in the processor's caches, and with all of these
cold before each. Then have the kernel count how often each eBPF program runs and how long that takes. It takes
minutes, and root.`,
	Services: fullConnect.Services,
	Compares: true,
	Layouts:  names(connectLayouts),
	Rounds:   true,
	begin: func(ctx context.Context, r *run) (work, error) {
		p := fullConnect
		if r.Quick {
			p = quickConnect
		}
		if r.Services != nil {
			p.Services = r.Services
		}
		p.Rounds = r.rounds(p.Rounds)
		return newConnect(ctx, r, p)
	},
}

// connectProfile says how much is measured.
type connectProfile struct {
	Name     string
	Services []int
	Rounds   int
	Block    time.Duration // of a closed loop with warm caches
	Warm     time.Duration // before it, not measured
	Cold     int           // operations of a block with cold caches
	Counted  int           // rounds in which programs' runs are counted
	Each     int           // exchanges of a block in which they are
}

var (
	quickConnect = connectProfile{"quick", []int{10, 10000}, 21, 20 * time.Millisecond, 4 * time.Millisecond, 4, 5, 500}
	fullConnect  = connectProfile{"full", []int{10, 10000}, 101, 30 * time.Millisecond, 5 * time.Millisecond, 6, 21, 2000}
)

// connect is the experiment of that name at work.
type connect struct {
	*stage
	Profile connectProfile
	memory  *load.Memory // that is walked to make caches cold
	byStack *node        // of armStack; nil: none
}

var connectLayouts = []classic.Layout{classic.IPTables19, classic.IPTables}

// newConnect finds out what this machine can do.
func newConnect(ctx context.Context, r *run, p connectProfile) (work, error) {
	s, err := newStage(ctx, r, p.Services, 0, connectLayouts, armEBPF, armNFT, "iptables")
	if err != nil {
		return nil, err
	}
	s.grouped, s.podded = true, true
	c := &connect{stage: s, Profile: p}
	return c, c.mapMemory()
}

// What is walked to make caches cold: twice the largest of them, within these bounds, of which the first also stands for one
// that the kernel doesn't tell of.
const (
	leastWalk = 16 << 20
	mostWalk  = 256 << 20
)

// mapMemory makes the memory that is walked.
func (r *connect) mapMemory() (err error) {
	size := min(max(2*load.LastCache(r.cpus.load[0]), leastWalk), mostWalk)
	if r.memory, err = load.NewMemory(size); err == nil {
		r.later(r.memory.Close)
	}
	return err
}

func (r *connect) profile() string { return r.Profile.Name }

// armStack is mode ebpf where no packet is handed over to a pod, at the greatest number of Services, for clients in pods: others' packets never are.
const armStack = armEBPF + "-stack"

var stackArm = result.Arm{ID: armStack, Title: "ebpf, by the stack", Style: styles[armStack],
	Text: "as ebpf, with --ebpf-fast-path Never: packets for pods go through the node's stack, as they do where something there looks at them"}

// startStack starts its agent.
func (r *connect) startStack(ctx context.Context) (err error) {
	r.byStack, _, err = r.staff(ctx, armStack, armEBPF, r.folders[len(r.folders)-1], "--ebpf-fast-path", "Never")
	return err
}

// checkStack is an error where the arm was not what it is said to be.
func (r *connect) checkStack(context.Context) error {
	text, _, err := r.byStack.get("/metrics")
	if _, n, counted := bytes.Cut(text, []byte("fairlead_packets_total{outcome=\"handed_over\"} ")); counted && !bytes.HasPrefix(n, []byte("0\n")) {
		err = fmt.Errorf("packets of %s were handed over to its pod", r.byStack.name)
	}
	return err
}

// arms are those that are compared.
func (r *connect) arms() []result.Arm {
	l := slices.Concat(baselines(), modeArms(r.modes), layoutArms(r.layouts))
	if i := slices.IndexFunc(l, func(a result.Arm) bool { return a.ID == armEBPF }); i >= 0 {
		l = slices.Insert(l, i+1, stackArm)
	}
	return l
}

func (r *connect) steps() []step {
	p, l := r.Profile, &plan{}
	r.raise(l)
	var others []*pair
	if slices.Contains(r.modes, armEBPF) {
		l.add("starting "+stackArm.Title, time.Second/2+time.Duration(r.most())*300*time.Microsecond, r.startStack)
		others = append(others, &pair{arm: armStack, services: r.most()})
	}
	l.add("starting servers", 100*time.Millisecond, r.serve)
	l.times(p.Rounds, "traffic, round", r.planned(r.operations(), others...), func(ctx context.Context, i int) error { return r.round(ctx, i, r.operations()) })
	if slices.Contains(r.modes, armEBPF) {
		l.add("checking "+stackArm.Title, 10*time.Millisecond, r.checkStack)
		l.add("reading programs", time.Second, r.readPrograms)
		exchanges := time.Duration(len(p.Services)*len(exchanges)*p.Each) * 60 * time.Microsecond
		l.times(p.Counted, "counting programs' runs, round", exchanges, r.countRuns)
	}
	return *l
}

// walked is about how many bytes a processor reads in a second.
const walked = 10 << 30

// operations are those of a round.
func (r *connect) operations() (l []operation) {
	p := r.Profile
	walks := time.Duration(p.Cold*2*r.memory.Size()) * time.Second / walked
	for _, op := range []load.Op{load.Connect, load.CRR} {
		for _, by := range []string{"", byPod} {
			to := func(p *pair) []netip.AddrPort {
				switch {
				case p.services == 0:
					return direct(fewTargets)
				case p.arm == armStack && by != byPod:
					return nil
				}
				return []netip.AddrPort{entry(service(middle, p.services))}
			}
			l = append(l, operation{measure: op.String() + by, targets: to, load: r.warm(op, by), takes: p.Warm + p.Block},
				operation{measure: op.String() + by + cold, targets: to, load: r.cold(op, by), takes: walks, tried: true})
		}
	}
	return l
}

// What ends the names of measures: of a client in a pod; with cold caches.
const (
	byPod = "-pod"
	cold  = "-cold"
)

// by is a client where that says.
func (r *connect) by(who string, p *pair, to []netip.AddrPort, warm time.Duration) load.Client {
	c := r.client(p, to, warm)
	if who == byPod {
		c.Place.Enter = p.enterPod
	}
	return c
}

// warm is a closed loop for a block's time.
func (r *connect) warm(op load.Op, by string) loader {
	return func(ctx context.Context, p *pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
		s, err := r.by(by, p, to, r.Profile.Warm).Run(ctx, op, r.Profile.Block)
		return s, nil, err
	}
}

// cold is a closed loop of so many operations, each with cold caches.
func (r *connect) cold(op load.Op, by string) loader {
	return func(ctx context.Context, p *pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
		c := r.by(by, p, to, 0)
		c.Cold, c.Most = r.memory, r.Profile.Cold
		s, err := c.Run(ctx, op, time.Minute)
		return s, nil, err
	}
}

func (r *connect) design() result.Design {
	p := r.Profile
	d := result.Design{
		ID: "connect", Title: "connect() and a connection, to 1 %",
		Question: "What does a new connection through a Service cost in mode ebpf against the same connection without any rule, against iptables and nftables, hot and cold; and what do the eBPF programs themselves take?",
		Vary:     result.Axis{Param: "services", Title: fmt.Sprintf("Services × %d endpoints", endpoints), Short: "Services"},
		Arms:     r.arms(),
		Baseline: armDirect, Again: armAgain, Margin: 0.01, Rounds: p.Rounds,
		Measures: slices.Concat(connectMeasures(), programMeasures(p)),
		Aims:     r.aims(),
		Method: []string{
			fmt.Sprintf("Every arm has two network namespaces of its own, joined by a veth: a node, where the client runs, and a far end, where the lab's server answers at ten addresses. "+
				"Direct means: to those addresses in turn, through a node without any rule and without conntrack. On the node is a pod besides, a third namespace behind a veth of its own, whose packets the node forwards: a measure says where its client is. All arms' clients are in a cgroup of their own, as a pod's are, which takes time, too. All arms stand at the same time, each connects to one Service with those ten endpoints, in the middle of all. "+
				"Client and server share one processor and have real-time priority; agents are kept on the others. In each round every arm has a block of each operation, in an order drawn for each, direct first and last. "+
				"A block with warm caches is %v after %v that don't count.", p.Block, p.Warm),
			fmt.Sprintf("With cold caches: just before the clock of each connect() starts, the client's thread reads %d MiB of memory, twice the largest cache of its processor (or %d MiB, where the kernel tells of none; at most %d), a line at a time, each half twice: read but once, it left more and more in the caches. "+
				"Then neither code nor data of client, server and kernel is in a cache, and few translations of addresses are; what the processor has learned of branches it may still know. A block has %d operations, and a round begins with a block that doesn't count.", r.memory.Size()>>20, leastWalk>>20, mostWalk>>20, p.Cold),
			"kube-proxy's rules are written by the lab itself, in kube-proxy's layout and order, through iptables-legacy.",
			fmt.Sprintf("Programs' runs are counted by the kernel's own statistics (BPF_ENABLE_STATS), which are on in blocks of their own, after all others, since they cost time: what they show of a program that does nothing and what they add to each run stands with them. "+
				"A block is %d exchanges of one kind. IPv6's programs are asked by IPv6 sockets for an IPv4 address (::ffff:a.b.c.d), which they look up in the same maps.", p.Each),
		},
		Missing: append(unableWords(r.cannot),
			"kube-proxy's nftables rules, other numbers of Services, HTTP, processor time: the experiment tigera has them.",
			"The run time of sendmsg6, which Linux calls for IPv6 addresses alone: there are none here. Its instructions are counted."),
	}
	return d
}

// connectMeasures are those of connections.
func connectMeasures() (l []result.Measure) {
	exchange := fmt.Sprintf("connect(2), %d bytes there, %d bytes back, close(2) with a reset", sizes.Request, sizes.Response)
	for _, by := range []struct{ id, title string }{{"", ""}, {byPod, ", client in a pod"}} {
		for _, how := range []struct{ id, title, text string }{{"", "", ""}, {cold, ", cold caches", "; each after a walk through more memory than caches hold"}} {
			id, title := by.id+how.id, by.title+how.title
			l = append(l,
				result.Measure{ID: "connect" + id, Title: "connect() alone" + title, Unit: "µs", Stat: "p50", Ratio: true, Text: "connect(2) from call to return; the connection is reset afterwards" + how.text},
				result.Measure{ID: "crr" + id, Title: "connect, request, close" + title, Unit: "µs", Stat: "p50", Ratio: true, Text: exchange + how.text})
		}
	}
	first := loaded
	first.Detail = true
	return append(l, first)
}

// aims are those of clients on the node and in a pod, with warm and with cold caches.
func (r *connect) aims() (l []result.Aim) {
	for _, by := range []string{"", byPod} {
		for _, how := range []string{"", cold} {
			l = append(l, newConnectionAims(r.modes, r.layouts, by+how)...)
		}
	}
	return l
}

// newConnectionAims are the project's for new connections in mode ebpf, of measures whose names end in a suffix.
func newConnectionAims(modes []string, layouts []classic.Layout, suffix string) (l []result.Aim) {
	if !slices.Contains(modes, armEBPF) {
		return nil
	}
	at, ten, how := params(10000), params(10), ""
	if strings.HasPrefix(suffix, byPod) {
		how = ", pod"
	}
	if strings.HasSuffix(suffix, cold) {
		how += ", cold"
	}
	add := func(id, text string, a result.Aim) {
		a.ID, a.Text, a.Arm, a.Measure = id+how, text+how, armEBPF, a.Measure+suffix
		l = append(l, a)
	}
	over := func(arm string, at map[string]string) *result.CellRef { return &result.CellRef{Arm: arm, Params: at} }
	add("ebpf, connection", "ebpf: a connection with one request at 10,000 Services costs ≤ 1.01 × direct", result.Aim{Measure: "crr", Params: at, Of: "ratio", Bound: 1.01})
	add("ebpf, connect", "ebpf: connect() at 10,000 Services costs ≤ 1.02 × direct", result.Aim{Measure: "connect", Params: at, Of: "ratio", Bound: 1.02})
	if slices.Contains(modes, "iptables") {
		add("ebpf, few", "ebpf: a connection costs ≤ 0.90 × iptables at 10 Services", result.Aim{Measure: "crr", Params: ten, Of: "value", Over: over("iptables", ten), Bound: 0.9})
	}
	if slices.Contains(layouts, classic.IPTables19) {
		add("ebpf, many", "ebpf: a connection costs ≤ 0.65 × kube-proxy's iptables rules of 2019 at 10,000 Services", result.Aim{Measure: "crr", Params: at, Of: "value", Over: over(old, at), Bound: 0.65})
	}
	return l
}
