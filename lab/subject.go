package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// proxyArm is a mode of a real kube-proxy as an arm.
type proxyArm struct {
	id      string
	mode    kubeproxy.Mode
	variant kubeproxy.Variant
	style   int
	text    string
}

const (
	armProxyIPT = "kube-proxy-iptables"
	armProxyNFT = "kube-proxy-nftables"
)

var proxyArms = []proxyArm{
	{armProxyIPT, kubeproxy.IPTables, kubeproxy.Legacy, 9, "the kube-proxy that was given, in mode iptables, through iptables-legacy; told by an API server of the lab's"},
	{armProxyNFT, kubeproxy.NFTables, kubeproxy.Found, 10, "the kube-proxy that was given, in mode nftables; told by an API server of the lab's"},
}

func (a proxyArm) arm() result.Arm {
	return result.Arm{ID: a.id, Title: "kube-proxy " + string(a.mode), Style: a.style, Text: a.text}
}

// noSubject is said where no kube-proxy was given.
const noSubject = "kube-proxy itself: none was given. --subject kube-proxy=PATH takes one; `make -C test/kubeproxy build` builds one and says where."

// program is another's, which a run may be given, and the command that builds it.
type program struct{ name, build string }

var (
	kubeProxyProgram    = program{"kube-proxy", "make -C test/kubeproxy build"}
	controlPlaneProgram = program{"control-plane", "make -C test/cluster build"}
)

// programs reads the subjects, such as kube-proxy=PATH, of which each may be given once, and gives absolute paths by name.
func (o Options) programs(known ...program) (map[string]string, error) {
	paths := map[string]string{}
	for _, s := range o.Subjects {
		name, path, _ := strings.Cut(s, "=")
		i := slices.IndexFunc(known, func(p program) bool { return p.name == name })
		switch {
		case i < 0 || path == "":
			return nil, fmt.Errorf("subject %q: want %s, the path of a program", s, wanted(known))
		case paths[name] != "":
			return nil, fmt.Errorf("subject %q: one %s is given already, and a run takes one", s, name)
		}
		switch info, err := os.Stat(path); {
		case err != nil:
			return nil, fmt.Errorf("subject %q: %w; `%s` builds one and says where", s, err, known[i].build)
		case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
			return nil, fmt.Errorf("subject %q: %s is no program that can be run", s, path)
		}
		abs, err := filepath.Abs(path)
		if err != nil {
			return nil, err
		}
		paths[name] = abs
	}
	return paths, nil
}

// wanted gives "kube-proxy=PATH or control-plane=PATH".
func wanted(known []program) string {
	var l []string
	for _, p := range known {
		l = append(l, p.name+"=PATH")
	}
	return strings.Join(l, " or ")
}

// trySubject has a kube-proxy tell the kernel of one Service, in every mode, each in a pair of its own. It gives the
// kube-proxy's path, "" where none was given.
func (r *run) trySubject(ctx context.Context) (binary string, err error) {
	given, err := r.programs(kubeProxyProgram)
	if err != nil {
		return "", err
	}
	return given[kubeProxyProgram.name], r.tryProxies(ctx, given[kubeProxyProgram.name])
}

// tryProxies does that with a kube-proxy, if there is one.
func (r *run) tryProxies(ctx context.Context, binary string) error {
	if binary == "" {
		return nil
	}
	for _, a := range proxyArms {
		if err := r.tryProxy(ctx, binary, a); err != nil {
			return fmt.Errorf("try the subject %s: %w", binary, err)
		}
	}
	return nil
}

func (r *run) tryProxy(ctx context.Context, binary string, a proxyArm) (err error) {
	p, err := newPair(ctx, r.id+"-try-"+a.id)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	limited, stop := context.WithTimeout(ctx, 30*time.Second)
	defer stop()
	n, _, err := r.proxy(limited, binary, a, p, newCluster(1).objects...)
	if err != nil {
		return err
	}
	return n.Close()
}

// proxy starts a kube-proxy in a pair's node and waits until its first sync has ended. It is the caller's to close.
func (r *run) proxy(ctx context.Context, binary string, a proxyArm, p *pair, objects ...source.Object) (*kubeproxy.Node, kubeproxy.Cold, error) {
	return kubeproxy.NewNode(ctx, kubeproxy.Options{Binary: binary, Mode: a.mode, Variant: a.variant, Namespace: p.node, Node: nodeName,
		Dir: filepath.Join(r.tmp, p.node.Name)}, objects...)
}

// slowly bounds a cold sync of kube-proxy, which may take minutes beside others.
func slowly(ctx context.Context, services int) (context.Context, func()) {
	return context.WithTimeout(ctx, within(patience)+time.Duration(services)*30*time.Millisecond)
}

// Where a probe's endpoint moves, and the Service that leads there: no other has that address.
var (
	probeService = netip.AddrPortFrom(generate.ServiceAddress(generate.MaxServices-1), 80)
	probePlaces  = [2]netip.AddrPort{netip.AddrPortFrom(serverAddr(0), serverPort+1), netip.AddrPortFrom(serverAddr(1), serverPort+1)}
)

// moves is how often a probe's endpoint moves in a round. kube-proxy syncs at most once a second, so it rests before.
const (
	moves     = 2
	moveAfter = 1200 * time.Millisecond
)

// subject measures the control side of a kube-proxy: a cold sync, its memory, and an endpoint's moves.
func (r *services) subject(ctx context.Context, round int, a proxyArm, w *world) (err error) {
	p, err := newPair(ctx, r.id+"-"+a.id)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	probe, err := kubeproxy.NewProbe(p.node, p.far, probeService, probePlaces)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, probe.Close()) }()
	limited, stop := slowly(ctx, w.services)
	defer stop()
	n, cold, err := r.proxy(limited, r.kubeProxy, a, p, append(w.objects[:len(w.objects):len(w.objects)], probe.Objects()...)...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	b := result.Block{Arm: a.id, Round: round, Params: params(w.services)}
	started, held := b, b
	started.Params = with(w.services, also("kernel", "empty"))
	held.Params = with(w.services, also("after", "the first sync"))
	if err := errors.Join(r.add(b, "cold", float64(cold.Sync)), r.add(started, "ready", float64(cold.Wall)), r.add(started, "ready-cpu", float64(cold.CPU()))); err != nil {
		return err
	}
	if err := settle(limited, n.CPU); err != nil {
		return err
	}
	used, err := n.Usage()
	if err != nil {
		return err
	}
	held.Counters = map[string]float64{"most": float64(used.Peak)}
	if err := r.add(held, "memory", float64(used.Resident)); err != nil {
		return err
	}
	return r.move(limited, b, probe, n.Tell)
}

// move has a probe's endpoint move, and notes how long until a connection came to its new place.
func (r *services) move(ctx context.Context, b result.Block, probe *kubeproxy.Probe, tell func(source.Object) error) error {
	if err := probe.Reach(ctx); err != nil {
		return err
	}
	b.Start = time.Now()
	var took []int64
	for range moves {
		if err := rest(ctx, moveAfter); err != nil {
			return err
		}
		d, err := probe.Move(ctx, tell)
		if err != nil {
			return err
		}
		took = append(took, int64(d))
	}
	b.Wall = time.Since(b.Start)
	return r.addTimes(b, "moved", took)
}

// moveOurs does the same with every node of ours, which is told by saved files.
func (r *services) moveOurs(ctx context.Context) error {
	for _, n := range r.nodes {
		if err := r.moveOne(ctx, n); err != nil {
			return fmt.Errorf("move an endpoint beside %d Services: %w", n.services, err)
		}
	}
	return nil
}

func (r *services) moveOne(ctx context.Context, n *node) (err error) {
	probe, err := kubeproxy.NewProbe(n.pair.node, n.pair.far, probeService, probePlaces)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, probe.Close()) }()
	limited, stop := context.WithTimeout(ctx, within(patience))
	defer stop()
	var saved []string
	tell := func(o source.Object) error {
		path, err := n.save(o)
		saved = append(saved, path)
		return err
	}
	defer func() {
		for _, path := range saved {
			if rerr := os.Remove(path); !errors.Is(rerr, os.ErrNotExist) {
				err = errors.Join(err, rerr)
			}
		}
		err = errors.Join(err, n.settle(ctx))
	}()
	for _, o := range probe.Objects() {
		if err := tell(o); err != nil {
			return err
		}
	}
	for round := range r.Profile.Cold {
		if err := r.move(limited, result.Block{Arm: armNFT, Round: round, Params: params(n.services)}, probe, tell); err != nil {
			return err
		}
	}
	return nil
}

// proxyDesign adds to the design of services what a kube-proxy brings.
func proxyDesign(d *result.Design) {
	for _, a := range proxyArms {
		d.Arms = append(d.Arms, a.arm())
	}
	for i := range d.Measures {
		switch m := &d.Measures[i]; m.ID {
		case "cold":
			m.Text += "; kube-proxy: its first sync, of which it says itself how long it took"
		case "ready":
			m.Text += "; kube-proxy: until the end of its first sync"
		case "memory":
			m.Text += "; kube-proxy: one look after each cold sync, its own memory without the commands that it runs"
		}
	}
	d.Measures = append(d.Measures,
		result.Measure{ID: "ready-cpu", Title: "processor time from start to ready", Unit: "s", Stat: "value", Text: "of all threads, kube-proxy's with that of the commands that it ran, in steps of 10 ms"},
		result.Measure{ID: "moved", Title: "one endpoint moved, told to first connection", Unit: "ms", Stat: "p50", Text: fmt.Sprintf("a Service's only endpoint moves; until a connection comes to its new place, %v after the last move: kube-proxy, told by the API server, as upstream configures it; ours, told by a saved file", moveAfter)})
	d.Aims = append(d.Aims, result.Aim{ID: "G5", Text: "G5: cold sync at 10,000 × 10 ≥ 100 × faster than kube-proxy's nftables mode", Measure: "cold", Arm: armProxyNFT, Params: params(10000), Of: "value",
		Over: &result.CellRef{Arm: armNFT}, Bound: 100, Least: true})
	d.Missing = append(d.Missing, "Traffic through kube-proxy's rules, and its idle time: the experiment tigera has the former.")
	d.Method = append(d.Method, "kube-proxy is the program that was given, one at a time, started with nothing in its kernel against an API server within the lab's process on the loopback of its node, which costs it nothing. Its configuration is upstream's, with the limits of conntrack left alone.")
}
