package rules

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/service/iptables"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// Addresses of the tests: a node with a pod behind it on one side and a host with ten servers on the other.
var (
	nodeAddr   = netip.MustParseAddr("172.18.0.2")
	hostAddr   = netip.MustParseAddr("172.18.0.1")
	podGateway = netip.MustParseAddr("10.128.0.1")
	podAddr    = netip.MustParseAddr("10.128.0.2")
	pods       = netip.MustParsePrefix("10.128.0.0/9")
)

const (
	endpoints  = 10
	serverPort = 8080
)

func serverAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 200, 0, byte(1 + i)}) }

func serviceAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}) }

// parts returns n Services with the ten servers as endpoints; the first has a node port.
func parts(n int) []model.ServicePart {
	node := &model.ServiceNode{Node: &model.Node{Name: "a", Addresses: []netip.Addr{nodeAddr, podGateway},
		Pods: []netip.Prefix{pods}},
		NodePorts: []model.Range{{First: netip.MustParseAddr("0.0.0.0"), Last: netip.MustParseAddr("126.255.255.255")},
			{First: netip.MustParseAddr("128.0.0.0"), Last: netip.MustParseAddr("255.255.255.255")}}}
	l := []model.ServicePart{node}
	for i := range n {
		p := &model.Pool{ID: uint64(1+i) << 8, Name: fmt.Sprintf("ns/s%d:http tcp ipv4 cluster", i), Protocol: model.TCP}
		for j := range endpoints {
			p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(serverAddr(j), serverPort)})
		}
		t := model.Target{Pool: p}
		front := func(via string, addr netip.Addr, port uint16, masquerade model.Origins) *model.Frontend {
			return &model.Frontend{Service: fmt.Sprintf("ns/s%d:http", i), Via: via,
				Entry: model.Entry{Addr: addr, Port: port, Protocol: model.TCP}, Internal: t, External: t, Masquerade: masquerade}
		}
		l = append(l, p, front("ClusterIP", serviceAddr(i), 80, model.OriginsOf(model.FromNode, model.FromExternal)))
		if i == 0 {
			l = append(l, front("NodePort", netip.IPv4Unspecified(), 30080, model.AllOrigins))
		}
	}
	return l
}

// world is a host, a node and a pod, each a network namespace.
type world struct{ host, node, pod *netns.Namespace }

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{}
	for _, ns := range []**netns.Namespace{&w.host, &w.node, &w.pod} {
		n := netnstest.New(t)
		*ns = n
		must(t, sysctl.Set(n, sysctl.Setting{Name: "net/ipv4/ip_forward", Value: "1"},
			sysctl.Setting{Name: "net/ipv4/conf/all/rp_filter", Value: "0"},
			sysctl.Setting{Name: "net/ipv4/conf/default/rp_filter", Value: "0"}))
		plug(t, n, "lo", nil, netip.Prefix{}, netip.Addr{})
	}
	wire(t, w.node, w.host, "host")
	wire(t, w.node, w.pod, "pod")
	var servers []netip.Addr
	for i := range endpoints {
		servers = append(servers, serverAddr(i))
	}
	plug(t, w.node, "host", []netip.Addr{nodeAddr}, netip.MustParsePrefix("0.0.0.0/0"), hostAddr)
	plug(t, w.node, "pod", []netip.Addr{podGateway}, netip.PrefixFrom(podAddr, 32), podAddr)
	plug(t, w.host, "eth0", append([]netip.Addr{hostAddr}, servers...), netip.MustParsePrefix("0.0.0.0/0"), nodeAddr)
	plug(t, w.pod, "eth0", []netip.Addr{podAddr}, netip.MustParsePrefix("0.0.0.0/0"), podGateway)
	w.serve(t)
	return w
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wire lays a veth from the node to another namespace, where its end is eth0.
func wire(t *testing.T, node, other *netns.Namespace, name string) {
	t.Helper()
	c, err := link.Dial(node)
	must(t, err)
	defer c.Close()
	_, err = c.AddVeth(link.End{Name: name}, link.End{Name: "eth0"}, other)
	must(t, err)
	o, err := link.Dial(other)
	must(t, err)
	defer o.Close()
	i, err := o.Index("eth0")
	must(t, err)
	must(t, o.Up(i))
}

// plug brings a device up with addresses and, if to is valid, a route.
func plug(t *testing.T, ns *netns.Namespace, dev string, addrs []netip.Addr, to netip.Prefix, via netip.Addr) {
	t.Helper()
	c, err := link.Dial(ns)
	must(t, err)
	defer c.Close()
	i, err := c.Index(dev)
	must(t, err)
	must(t, c.Up(i))
	for _, a := range addrs {
		must(t, c.AddAddress(i, netip.PrefixFrom(a, 32)))
	}
	if to.IsValid() {
		must(t, route.PutIn(ns, route.Route{To: to, Via: via, Dev: i, Source: addrs[0]}))
	}
	must(t, c.Await(t.Context(), i, addrs...))
}

// serve has the host answer each request with the address that it came to.
func (w *world) serve(t *testing.T) {
	t.Helper()
	var l net.Listener
	must(t, w.host.Do(func() (err error) {
		var c net.ListenConfig
		c.SetMultipathTCP(false)
		l, err = c.Listen(t.Context(), "tcp4", fmt.Sprintf(":%d", serverPort))
		return err
	}))
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1)
				for {
					if _, err := io.ReadFull(c, b); err != nil {
						return
					}
					fmt.Fprintf(c, "%-21s", c.LocalAddr())
				}
			}()
		}
	}()
}

// connect opens a connection from a namespace.
func connect(ctx context.Context, ns *netns.Namespace, to netip.AddrPort) (c net.Conn, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	err = ns.Do(func() error {
		c, err = (&net.Dialer{}).DialContext(ctx, "tcp4", to.String())
		return err
	})
	return c, err
}

// request sends a request and returns the server that answered.
func request(c net.Conn) (netip.AddrPort, error) {
	c.SetDeadline(time.Now().Add(20 * time.Second))
	b := make([]byte, 21)
	if _, err := c.Write([]byte{1}); err != nil {
		return netip.AddrPort{}, err
	}
	if _, err := io.ReadFull(c, b); err != nil {
		return netip.AddrPort{}, err
	}
	return netip.ParseAddrPort(strings.TrimSpace(string(b)))
}

// subject is a way to program a node.
type subject struct {
	name string
	via  Interface
	// program writes parts(n), in the thread of the node.
	program func(ctx context.Context, l []model.ServicePart) (closed func() error, err error)
	// read returns the rules back for Static.
	read func(t *testing.T) (Ruleset, error)
	// keeps are limits that must hold at any number of Services; nil: none.
	bounds *limits
}

var subjects = []subject{
	{"ipt-classic19 legacy", Legacy, install(classic.IPTables19, classic.Legacy), readIPTables("legacy"), nil},
	{"ipt-classic19 nft", NFT, install(classic.IPTables19, classic.NFT), readIPTables("nft"), nil},
	{"ipt-classic legacy", Legacy, install(classic.IPTables, classic.Legacy), readIPTables("legacy"), nil},
	{"ipt-classic nft", NFT, install(classic.IPTables, classic.NFT), readIPTables("nft"), nil},
	{"nft-classic", NFT, install(classic.NFTables, classic.NFT), readNFTables, &limits{worst: 20, mean: 20, none: 11}},
	{"nftables", NFT, plane(nftables.Capabilities.Batch, openNFTables), readNFTables,
		&limits{worst: 13, mean: 13, none: 7}},
	{"iptables legacy", Legacy, plane(iptables.Batch, openIPTables(iptables.Legacy)), readIPTables("legacy"), &aim},
	{"iptables nft", NFT, plane(iptables.Batch, openIPTables(iptables.NFT)), readIPTables("nft"), &aim},
}

// limits are what new connections may meet at any number of Services here.
type limits struct {
	worst     int     // rules for a Service
	mean      float64 // over all Services and endpoints
	none      int     // rules for traffic to no Service
	own       int     // further rules for packets of the node itself
	forwarded int     // rules more for what the node forwards: those of FORWARD that accept it
}

// hold returns what of a count is more than the limits.
func (l *limits) hold(r Spread, p Packet) error {
	worst, mean := l.worst, l.mean
	none := l.none
	if p.Path == Sent {
		worst, mean = worst+l.own, mean+float64(l.own)
	} else {
		worst, mean, none = worst+l.forwarded, mean+float64(l.forwarded), none+l.forwarded
	}
	service := p.Dst.Port() != serverPort
	if !service && r.Max > none || service && (r.Max > worst || r.Mean > mean+1e-6) {
		return fmt.Errorf("%.2f rules on average, %d at worst, more than %+v", r.Mean, r.Max, *l)
	}
	return nil
}

// aim is what the data plane for iptables is to keep at 10,000 Services of 10 endpoints. Packets of the node itself
// meet the rule that notes that their source is to be hidden besides.
var aim = limits{worst: 32, mean: 26, none: 3, own: 1, forwarded: 4}

func install(l classic.Layout, v classic.Variant) func(context.Context, []model.ServicePart) (func() error, error) {
	return func(ctx context.Context, p []model.ServicePart) (func() error, error) {
		_, err := classic.Install(ctx, l, v, classic.FromParts(p))
		return func() error { return nil }, err
	}
}

// closer is a data plane of ours.
type closer[K dataplane.Key] interface {
	dataplane.Plane[model.ServicePart, K, string]
	Close() error
}

// plane programs the node with a data plane of ours.
func plane[K dataplane.Key](batch int, open func() (closer[K],
	error)) func(context.Context, []model.ServicePart) (func() error, error) {
	return func(ctx context.Context, l []model.ServicePart) (func() error, error) {
		p, err := open()
		if err != nil {
			return nil, err
		}
		ctx, stop := context.WithCancel(ctx)
		loop := reconcile.New(p, reconcile.Options[model.ServicePart]{MaxFacts: batch})
		done := make(chan struct{})
		go func() {
			loop.Run(ctx)
			close(done)
		}()
		loop.Change(l, nil)
		return func() error { stop(); <-done; return p.Close() }, loop.Sync(ctx)
	}
}

func openNFTables() (closer[nftables.Key], error) { return nftables.New() }

func openIPTables(v iptables.Variant) func() (closer[iptables.Key], error) {
	return func() (closer[iptables.Key], error) { return iptables.NewVariant(v) }
}

// iptablesRules reads the rules that iptables, in the legacy or the nft variant, has in the calling thread's network
// namespace, and the sets and lists that they ask for.
func iptablesRules(ctx context.Context, variant string) (t *IPTables, err error) {
	output := func(name string, args ...string) string {
		out, e := exec.CommandContext(ctx, name, args...).Output()
		if e != nil {
			err = errors.Join(err, fmt.Errorf("read rules: %s: %w", name, e))
		}
		return string(out)
	}
	save, sets := output("iptables-"+variant+"-save"), ""
	if strings.Contains(save, "--match-set") {
		sets = output("ipset", "save")
	}
	if err != nil {
		return nil, err
	}
	if t, err = ParseIPTables(save, sets); err == nil {
		t.recent, err = readRecent()
	}
	return t, err
}

// readRecent reads the lists of recent addresses: lines such as "src=10.0.0.1 ttl: 64 last_seen: …".
func readRecent() (map[listed]bool, error) {
	const dir = "/proc/thread-self/net/xt_recent"
	lists, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	recent := map[listed]bool{}
	for _, l := range lists {
		text, e := os.ReadFile(filepath.Join(dir, l.Name()))
		err = errors.Join(err, e)
		for line := range strings.Lines(string(text)) {
			addr, _, _ := strings.Cut(strings.TrimPrefix(line, "src="), " ")
			a, e := netip.ParseAddr(addr)
			err = errors.Join(err, e)
			recent[listed{l.Name(), a}] = true
		}
	}
	return recent, err
}

func readIPTables(variant string) func(*testing.T) (Ruleset, error) {
	return func(t *testing.T) (Ruleset, error) { return iptablesRules(t.Context(), variant) }
}

func readNFTables(t *testing.T) (Ruleset, error) {
	r, err := ReadNFTables()
	if err == nil {
		t.Cleanup(func() { must(t, r.Close()) })
	}
	return r, err
}

// TestStaticIsWhatTheKernelDoes programs each subject, sends real packets of every class and compares.
func TestStaticIsWhatTheKernelDoes(t *testing.T) {
	for _, s := range subjects {
		for _, n := range []int{1, 10, 100} {
			t.Run(fmt.Sprintf("%s/%d", s.name, n), func(t *testing.T) { agree(t, s, n) })
		}
	}
}

func agree(t *testing.T, s subject, n int) {
	w := newWorld(t)
	rules := w.program(t, s, parts(n))
	for _, c := range []struct {
		name string
		to   netip.AddrPort
	}{
		{"first", netip.AddrPortFrom(serviceAddr(0), 80)},
		{"middle", netip.AddrPortFrom(serviceAddr(n/2), 80)},
		{"last", netip.AddrPortFrom(serviceAddr(n-1), 80)},
		{"node port", netip.AddrPortFrom(nodeAddr, 30080)},
		{"no service", netip.AddrPortFrom(serverAddr(3), serverPort)},
	} {
		sent := Packet{Src: netip.AddrPortFrom(nodeAddr, 0), Dst: c.to, Protocol: model.TCP, Path: Sent, Out: "host",
			Node: []netip.Addr{nodeAddr, podGateway}}
		if c.name != "node port" { // of a node port the node asks from that same address
			w.compare(t, s, rules, c.name, w.node, sent)
		}
		passing := sent
		passing.Src, passing.Path, passing.In = netip.AddrPortFrom(podAddr, 0), Forwarded, "pod"
		w.compare(t, s, rules, c.name, w.pod, passing)
	}
}

// program has a subject write parts into the node, and reads its rules back.
func (w *world) program(t *testing.T, s subject, l []model.ServicePart) (rules Ruleset) {
	t.Helper()
	must(t, w.node.Do(func() error {
		closed, err := s.program(t.Context(), l)
		if err == nil {
			t.Cleanup(func() { must(t, closed()) })
			rules, err = s.read(t)
		}
		return err
	}))
	return rules
}

// compare traces a new connection's first packet and one of its data, and has the walk agree.
func (w *world) compare(t *testing.T, s subject, rules Ruleset, name string, from *netns.Namespace, p Packet) {
	t.Helper()
	var c net.Conn
	name = fmt.Sprintf("%s, %s", name, p.Path)
	refused := false
	traced, err := Trace(t.Context(), w.node, s.via, p, func() (err error) {
		c, err = connect(t.Context(), from, p.Dst)
		if refused = errors.Is(err, unix.ECONNREFUSED); refused {
			return nil
		}
		return err
	})
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if refused {
		c, err := Static(rules, p)
		if err != nil || c.Rules != (Spread{float64(traced), traced, traced}) || c.Outcomes[0].Verdict != "reject" {
			t.Errorf("%s: refused, the kernel tested %d rules, the walk %+v, %v", name, traced, c, err)
		}
		return
	}
	defer c.Close()
	server, err := request(c)
	must(t, err)
	p.Src = c.LocalAddr().(*net.TCPAddr).AddrPort()
	count, err := Static(rules, p)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	i := slices.IndexFunc(count.Outcomes, func(o Outcome) bool { return o.Dst == server && o.Verdict == "accept" })
	if i < 0 {
		t.Fatalf("%s: came to %s, which is not among %d outcomes", name, server, len(count.Outcomes))
	}
	if o := count.Outcomes[i]; o.Rules != traced {
		t.Errorf("%s: the kernel tested %d rules to come to %s, the walk %d", name, traced, server, o.Rules)
	}
	var sum float64
	for _, o := range count.Outcomes {
		sum += o.Probability
	}
	if sum < 1-1e-6 || sum > 1+1e-6 {
		t.Errorf("%s: probabilities of outcomes sum to %v", name, sum)
	}

	if k := s.bounds; k != nil {
		if err := k.hold(Spread{Max: count.Rules.Max}, p); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}

	p.Established, p.To = true, server
	again, err := Trace(t.Context(), w.node, s.via, p, func() error { _, err := request(c); return err })
	if err != nil {
		t.Fatalf("%s, established: %v", name, err)
	}
	known, err := Static(rules, p)
	if err != nil {
		t.Fatalf("%s, established: %v", name, err)
	}
	if known.Rules != (Spread{float64(again), again, again}) {
		t.Errorf("%s, established: the kernel tested %d rules, the walk %+v", name, again, known.Rules)
	}
	t.Logf("%-24s new: traced %d, walk %.2f (%d to %d), %d instructions; established: %d", name, traced, count.Rules.Mean,
		count.Rules.Min, count.Rules.Max, count.Instructions.Max, again)
}

// TestAimAtTenThousand holds our data plane for iptables to its aim at 10,000 Services of 10 endpoints: for every
// Service on paper, and for one by the kernel's trace. Other planes' rules don't follow the number of Services.
func TestAimAtTenThousand(t *testing.T) {
	const n = 10000
	i := slices.IndexFunc(subjects, func(s subject) bool { return s.name == "iptables legacy" })
	s, w := subjects[i], newWorld(t)
	rules := w.program(t, s, parts(n))
	sent := Packet{Src: netip.AddrPortFrom(nodeAddr, 40000), Protocol: model.TCP, Path: Sent, Out: "host",
		Node: []netip.Addr{nodeAddr, podGateway}}
	passing := sent
	passing.Src, passing.Path, passing.In = netip.AddrPortFrom(podAddr, 40000), Forwarded, "pod"
	for _, p := range []Packet{sent, passing} {
		all := everyService(t, rules, p, n)
		t.Logf("%s: mean %.2f, worst %d", p.Path, all.Mean, all.Max)
		if err := s.bounds.hold(all, p); err != nil {
			t.Errorf("%s: %v", p.Path, err)
		}
	}
	for _, to := range []netip.AddrPort{netip.AddrPortFrom(serviceAddr(n/2+17), 80),
		netip.AddrPortFrom(serverAddr(3), serverPort)} {
		p := sent
		p.Dst = to
		w.compare(t, s, rules, to.String(), w.node, p)
	}
}

// everyService counts rules over all Services.
func everyService(t *testing.T, rules Ruleset, p Packet, n int) (all Spread) {
	t.Helper()
	for i := range n {
		p.Dst = netip.AddrPortFrom(serviceAddr(i), 80)
		c, err := Static(rules, p)
		must(t, err)
		all.Mean += c.Rules.Mean / float64(n)
		all.Max = max(all.Max, c.Rules.Max)
	}
	return all
}

// TestOtherShapes compares what only our own data planes can do: restricted sources, affinity, other backends for
// clients outside, no endpoint there.
func TestOtherShapes(t *testing.T) {
	for _, s := range subjects {
		if s.name == "nftables" || strings.HasPrefix(s.name, "iptables ") {
			t.Run(s.name, func(t *testing.T) { shapes(t, s) })
		}
	}
}

func shapes(t *testing.T, s subject) {
	w := newWorld(t)
	l := parts(4)
	pool := func(name string, from, to int) *model.Pool {
		p := &model.Pool{ID: uint64(from+1)<<40 | uint64(to), Name: name, Protocol: model.TCP}
		for i := from; i < to; i++ {
			p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(serverAddr(i), serverPort)})
		}
		l = append(l, p)
		return p
	}
	front := func(port uint16, inside, outside *model.Pool, sources ...netip.Prefix) netip.AddrPort {
		at := netip.AddrPortFrom(serviceAddr(200), port)
		l = append(l, &model.Frontend{Service: fmt.Sprintf("ns/shape:%d", port), Via: "ClusterIP",
			Entry:    model.Entry{Addr: at.Addr(), Port: port, Protocol: model.TCP},
			Internal: model.Target{Pool: inside}, External: model.Target{Pool: outside},
			Masquerade: model.OriginsOf(model.FromNode, model.FromExternal), Sources: sources})
		return at
	}
	few, many, sticky, own, empty := pool("few", 0, 2), pool("many", 2, 9), pool("keep", 0, 5), pool("own", 3, 9),
		pool("empty", 0, 0)
	sticky.Affinity, own.Affinity = time.Hour, time.Hour
	to := map[string]netip.AddrPort{
		"restricted": front(81, few, few, netip.PrefixFrom(podAddr, 32), netip.MustParsePrefix("172.18.0.0/30")),
		"affinity":   front(82, sticky, sticky),
		"split":      front(83, few, many),
		"nobody":     front(84, empty, empty),
		"all":        front(85, own, many, netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("128.0.0.0/1")),
	}
	rules := w.program(t, s, l)
	for _, when := range []string{"first", "again"} { // where there is affinity, clients are known the second time
		for name, at := range to {
			name = when + ", " + name
			p := Packet{Src: netip.AddrPortFrom(nodeAddr, 0), Dst: at, Protocol: model.TCP, Path: Sent, Out: "host",
				Node: []netip.Addr{nodeAddr, podGateway}}
			w.compare(t, s, rules, name+", node", w.node, p)
			p.Src, p.Path, p.In = netip.AddrPortFrom(podAddr, 0), Forwarded, "pod"
			w.compare(t, s, rules, name+", pod", w.pod, p)
			p.Src, p.In = netip.AddrPortFrom(hostAddr, 0), "host"
			w.compare(t, s, rules, name+", host", w.host, p)
		}
		must(t, w.node.Do(func() (err error) {
			rules, err = s.read(t)
			return err
		}))
	}
}
