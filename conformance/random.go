package conformance

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/verdict"
)

// SeedVariable names the environment variable that gives Random its seed. Without it, each run has a new one.
const SeedVariable = "CONFORMANCE_SEED"

// packetsPerCluster is how many packets Random sends in each world.
const packetsPerCluster = 12

// Random walks a subject through random worlds in one sandbox, and wants its packets to fare as verdict says in each. A
// failure is reduced to a small world and shown as a case, ready to go into the folder cases.
func Random(t *testing.T, s Implementation, clusters int) {
	seed := seedOf(t)
	t.Logf("%d worlds from %s=%d", clusters, SeedVariable, seed)
	log, found := wander(t.Context(), s, seed, clusters)
	t.Log(log)
	if found != nil {
		t.Errorf("%s\n\n%s", found.wrong, found.reduce(t.Context(), s))
	}
}

// seedOf returns the seed of SeedVariable, or a new one.
func seedOf(t *testing.T) uint64 {
	text := os.Getenv(SeedVariable)
	if text == "" {
		return uint64(time.Now().UnixNano())
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", SeedVariable, err)
	}
	return seed
}

// wander walks until something is found, and returns the counts.
func wander(ctx context.Context, s Implementation, seed uint64, clusters int) (log string, found *finding) {
	w, err := newTestbed(ctx, s, Config{})
	if err != nil {
		return "", &finding{wrong: err.Error(), scenes: []*scene{{}}}
	}
	defer w.close()
	k := walk{generator: newGenerator(seed), w: w, path: []*scene{{}}, fates: map[verdict.Action]int{},
		seen: map[string]int{}}
	k.origin()
	n := 0
	for ; n < clusters && found == nil; n++ {
		found = k.step(ctx)
	}
	return fmt.Sprintf("%d worlds: %v packets as verdict says, %d by verdict alone, %d restarts, %d questions over kept "+
		"connections\n%s", n, k.fates, k.unsent, k.restarts, k.retained, k.sources()), found
}

// walk is a way from world to world.
type walk struct {
	generator
	w                          *testbed
	path                       []*scene               // all so far
	fates                      map[verdict.Action]int // packets sent, by what became of them
	seen                       map[string]int         // packets that servers saw, by who sent to which kind of address
	unsent, restarts, retained int
}

// step goes to the next world and sends packets there.
func (k *walk) step(ctx context.Context) *finding {
	before := k.path[len(k.path)-1]
	here := k.next(before)
	if k.w.implementation.Engine != nil {
		k.isolate(&here.isolation)
		if d := k.IntN(10); d < 2 { // back by what was changed last, or by much at once
			back := *k.path[len(k.path)-1-k.IntN(min(len(k.path), 1+d*8))]
			here, back.Restart = &back, here.Restart
		}
	}
	k.path = append(k.path, here)
	k.restarts += len(here.Restart)
	if err := k.w.enter(ctx, before, here); err != nil {
		return &finding{wrong: err.Error(), scenes: k.path}
	}
	for _, n := range nodes {
		if wrong := k.w.incremental(n); wrong != "" {
			return &finding{wrong: wrong, scenes: k.path}
		}
	}
	if wrong := k.request(ctx); wrong != "" {
		return &finding{wrong: wrong, scenes: k.path}
	}
	if k.w.implementation.Engine != nil {
		if found := k.direct(ctx); found != nil {
			return found
		}
	}
	for i := range packetsPerCluster {
		l := k.packet(k.w)
		sent, wrong := k.w.fares(ctx, l, i%4 == 0)
		switch {
		case wrong != "":
			return &finding{wrong, k.path, l}
		case sent:
			k.fates[l.Action]++
			k.count(l)
			k.retain(ctx, l)
		default:
			k.unsent++
		}
	}
	return nil
}

// count counts a packet that a server saw: where its source must be what verdict says.
func (k *walk) count(l *packetLine) {
	if l.Action != verdict.Forward {
		return
	}
	j := k.w.assess(l.Clients[0], l.To, l.Proto, l.Via)
	client := memberNamed(l.Clients[0].Name)
	where := map[bool]string{true: "here", false: "remote"}[client.Node == j.node]
	kind := "outside"
	switch {
	case client.isNode():
		kind = "node " + where
	case client.Host:
		kind = "pod of the node's network " + where
	case client.Node != "":
		kind = "pod " + where
	}
	to := addressKind(j.outcome.Frontend)
	if owner := nodeOf(l.To.Addr()); owner != "" && owner != j.node && j.outcome.Frontend.Entry.AnyAddr() {
		to += " of another node"
	}
	k.seen[kind+" → "+to]++
}

// sources returns what count counted, a line for each kind.
func (k *walk) sources() (text string) {
	for _, s := range slices.Sorted(maps.Keys(k.seen)) {
		text += fmt.Sprintf("%5d %s\n", k.seen[s], s)
	}
	return text
}

// origin begins the walk with the pods and namespaces that there are.
func (k *walk) origin() {
	if k.w.implementation.Engine == nil {
		return
	}
	known := &k.path[0].isolation
	for i, m := range pods() {
		known.Pods[i] = m.podObject()
	}
}

// directPackets is how many packets between hosts of the cast are sent side by side in each world of policies.
const directPackets = 40

// direct sends packets between hosts of the cast, side by side: most of them are dropped.
func (k *walk) direct(ctx context.Context) *finding {
	lines := make([]*packetLine, directPackets)
	wrong := make([]string, directPackets)
	var wg sync.WaitGroup
	for i := range lines {
		lines[i] = k.generator.direct()
		wg.Go(func() { _, wrong[i] = k.w.fares(ctx, lines[i], false) })
	}
	wg.Wait()
	for i, l := range lines {
		if wrong[i] != "" {
			return &finding{wrong[i], k.path, l}
		}
		k.fates[l.Action]++
	}
	return nil
}

// retain holds a few of the TCP connections and UDP flows.
func (k *walk) retain(ctx context.Context, l *packetLine) {
	j := k.w.assess(l.Clients[0], l.To, l.Proto, l.Via)
	// Not one that is led by one node now, by another then, nor one by loopback, which ends with the permission to do so.
	fixed := (memberNamed(l.Clients[0].Name).Node != "" || nodeOf(l.To.Addr()) != "") && !l.To.Addr().IsLoopback()
	if !fixed || l.Proto == model.SCTP || j.outcome.Action != verdict.Forward || len(k.w.flows) >= 4 {
		return
	}
	held := *l
	held.Open = fmt.Sprint("flow ", k.fates)
	if p := (probe{w: k.w, l: &held, c: l.Clients[0], j: j}); p.openFlow(ctx) != "" {
		delete(k.w.flows, held.Open)
	}
}

// captured reports whether an endpoint's own address has become an entry, which externalIPs Any allows: in mode ebpf a
// connection that a socket was translated for goes to that address without a trace of its own, and is the entry's then;
// in mode userspace so is the plane's own connection to the endpoint, since rules of routing see no connection.
func (k *walk) captured(endpoint netip.AddrPort) bool {
	e := model.Entry{Addr: endpoint.Addr(), Port: endpoint.Port(), Protocol: model.TCP}
	for _, a := range k.w.agents {
		if a.services.Frontends[e] != nil && slices.Contains([]string{"ebpf", "userspace"}, k.w.implementation.Name) {
			return true
		}
	}
	return false
}

// request queries over the kept connections and flows: whatever has changed, they stay with who answered first; flows
// of UDP as long as verdict says so. Each is asked some ten times, then closed.
func (k *walk) request(ctx context.Context) string {
	for _, name := range slices.Sorted(maps.Keys(k.w.flows)) {
		f := k.w.flows[name]
		if f.l.Proto == model.UDP && !f.stays() || f.l.Proto == model.TCP && k.captured(f.last) {
			f.held.Close()
			delete(k.w.flows, name)
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, k.w.patience)
		a, err := f.held.Request(ctx)
		cancel()
		if err != nil || a.Server != f.last {
			return fmt.Sprintf("a %s connection from %s to %s, kept with %s while all else changed: %s", f.l.Proto, f.c.Name,
				f.l.To, f.last, describe(a, err))
		}
		if k.retained++; k.chance(10) {
			f.held.Close()
			delete(k.w.flows, name)
		}
	}
	return ""
}

// enter changes the world from one scene to another.
func (w *testbed) enter(ctx context.Context, from, to *scene) error {
	restart := to.Restart
	if !equalConfig(from.Config, to.Config) {
		w.config, restart = to.Config, nodes
	}
	if err := w.change(to.changesFrom(from), restart...); err != nil {
		return err
	}
	return w.sync(ctx)
}

// incremental returns how a node that came here change by change differs from one that knows the world at once, or "".
func (w *testbed) incremental(node string) string {
	fresh := resolve.New(w.resolveConfig(node))
	d := fresh.Apply(w.everything())
	if p := w.agents[node].policies; p != nil {
		all, policies := model.NewPolicies(), w.policyResolver(node)
		if w.implementation.PreDNAT {
			policies.ApplyServices(d.Services)
		}
		all.Apply(policies.Apply(w.everything()))
		if !reflect.DeepEqual(all, p.decided) {
			return "resolve/policy comes to something else on node " + node + " change by change than at once"
		}
	}
	if !reflect.DeepEqual(fresh.Services(), w.agents[node].resolver.Services()) {
		return "resolve comes to something else on node " + node + " change by change than at once"
	}
	return ""
}

// fares sends a packet and reports whether it could be sent for real, and how its fate differs from what verdict says.
func (w *testbed) fares(ctx context.Context, l *packetLine, thorough bool) (sent bool, wrong string) {
	c := l.Clients[0]
	j := w.assess(c, l.To, l.Proto, l.Via)
	o := j.outcome
	if l.Action = o.Action; j.uncertain || j.unanswerable() || w.reachesHostPort(j) || l.stays() ||
		w.implementation.leaves(j, l.Size) != "" {
		return false, ""
	}
	if l.Sticks = o.Action == verdict.Forward && o.Frontend.Target(o.Origin).Pool.Affinity > 0; l.Sticks {
		thorough = false
	}
	p := probe{w: w, l: l, c: c, j: j, sample: 4}
	if thorough {
		p.sample = 0
	}
	if wrong = p.run(ctx); wrong != "" {
		wrong = fmt.Sprintf("%s -> %s/%s via node %s: %s: %s\n%s\n%s", c.Name, l.To, l.Proto, w.entrance(l.To.Addr(), l.Via),
			w.implementation.Name, wrong, j, w.dump(j.node))
	}
	return true, wrong
}

// stays reports whether a pod's packet is to its own address, so that no node sees it, whoever has that address as an
// entry.
func (l *packetLine) stays() bool {
	c := l.Clients[0]
	return l.Action != verdict.Pass && c.Addr == l.To.Addr() && memberNamed(c.Name).Node != "" &&
		!memberNamed(c.Name).onNode()
}

// unanswerable reports that some candidate's answer would not come back through the node that translated the packet, so
// that the client wouldn't know it, or that no host has its address. No cluster is run so; a random world may be.
func (j assessment) unanswerable() bool {
	home := ""
	for _, m := range topology {
		if slices.Contains(m.Addrs, j.packet.Src.Addr()) {
			home = cmp.Or(home, m.Node)
		}
	}
	if j.packet.Src.Addr().IsLoopback() {
		home = j.node
	}
	return slices.ContainsFunc(j.outcome.Candidates, func(v verdict.Candidate) bool {
		at := v.Backend.Addr.Addr()
		server := memberNamed(nameOf(at))
		if server == nil { // an endpoint that is a Service's address
			return true
		}
		far := home != j.node && server.Node != j.node
		return !v.Masqueraded && !v.DSR && (far || at == j.packet.Src.Addr())
	})
}

// reachesHostPort reports whether the node on which some candidate runs translates or rejects the packet again: with
// externalIPs Any, an external IP may be the candidate's own address.
func (w *testbed) reachesHostPort(j assessment) bool {
	return slices.ContainsFunc(j.outcome.Candidates, func(v verdict.Candidate) bool {
		server := memberNamed(nameOf(v.Backend.Addr.Addr()))
		if server == nil || server.Node == "" || server.Node == j.node {
			return false
		}
		p := verdict.Packet{Src: j.packet.Src, Dst: v.Backend.Addr, Protocol: j.packet.Protocol, In: uplink}
		return verdict.Of(w.agents[server.Node].services, p).Action != verdict.Pass
	})
}
