package reconcile

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"fairlead.dev/fairlead/dataplane"
)

// service is one Service of the fake world: a set of backends, and a port where it is entered.
type service struct {
	backends uint8 // a bit each
	port     int
	conceals bool
}

// scenario is what is wanted at a time. Parts are made once: the same part stands for the same piece of every world.
type scenario struct {
	services map[int]service
	layout   int
}

// maker makes the parts of worlds.
type maker map[string]*part

func (m maker) part(owner, id string, facts ...fact) *part {
	if m[id] == nil {
		m[id] = &part{owner, facts}
	}
	return m[id]
}

func (m maker) parts(w scenario) []*part {
	l := []*part{m.part("node", "node", ground)}
	for i, s := range w.services {
		l = append(l, m.pool(i, s, w.layout), m.frontend(i, s))
	}
	return l
}

// ground is what all else stands on, so every part needs it.
var ground = fact{Key: key{0, "table"}, Value: "t"}

func pickOf(n int) key { return key{1, fmt.Sprint("pick", n)} }

// pool returns a part that shares the chain pickN with all pools of N backends, and renders it twice.
func (m maker) pool(i int, s service, layout int) *part {
	n := bits.OnesCount8(s.backends)
	id := fmt.Sprintf("pool%d %x %d", i, s.backends, layout)
	if n == 0 {
		return m.part(fmt.Sprint("s", i), id, ground)
	}
	pick := fact{Key: pickOf(n), Value: fmt.Sprintf("p%d>table", layout)}
	facts := []fact{ground, pick}
	for b := range 8 {
		if s.backends&(1<<b) != 0 {
			facts = append(facts, fact{Key: key{2, fmt.Sprintf("ep%d.%d", i, len(facts)-2)},
				Value: fmt.Sprintf("b%d>%s", b, pick.Key.name)})
		}
	}
	return m.part(fmt.Sprint("s", i), id, append(facts, pick)...)
}

func (m maker) frontend(i int, s service) *part {
	n := bits.OnesCount8(s.backends)
	value := "reject>table"
	if n > 0 {
		value = "to>" + pickOf(n).name
	}
	for e := range n {
		value += fmt.Sprintf(",ep%d.%d", i, e)
	}
	facts := []fact{ground, {Key: key{3, fmt.Sprintf("fe%d:%d", i, s.port)}, Value: value}}
	if s.conceals {
		facts[1].Value += ",hide"
		facts = append(facts, fact{Key: key{1, "hide"}, Value: "h>table"})
	}
	return m.part(fmt.Sprint("s", i), fmt.Sprintf("fe%d %v", i, s), facts...)
}

// op is one thing that happens in a walk.
type op struct {
	kind string
	i, j int
}

func (o op) service() (service, bool) {
	return service{uint8(o.j>>2) & 15, o.j >> 6 & 1, o.j>>7&1 == 1}, o.j&3 != 0
}

var kinds = []string{"change", "change", "change", "change", "all", "layout", "sync", "sync", "check", "drift", "every",
	"fail", "refuse", "refuse", "allow", "restart", "rest"}

var ops = rapid.Custom(func(t *rapid.T) op {
	return op{rapid.SampledFrom(kinds).Draw(t, "kind"), rapid.IntRange(0, 40).Draw(t, "i"),
		rapid.IntRange(0, 255).Draw(t, "j")}
})

// script is a walk and the ground it is on.
type script struct {
	atomic, strict, watched bool
	maxFacts                int
	ops                     []op
}

var scripts = rapid.Custom(func(t *rapid.T) script {
	b := rapid.Bool()
	return script{b.Draw(t, "atomic"), b.Draw(t, "strict"), b.Draw(t, "watched"),
		rapid.SampledFrom([]int{1, 2, 5, 4096}).Draw(t, "facts"), rapid.SliceOfN(ops, 1, 40).Draw(t, "ops")}
})

// doubling is Backoff without chance.
func doubling(attempt int) time.Duration {
	return min(50*time.Millisecond<<min(attempt, 20), 30*time.Second)
}

// walker goes through a script.
type walker struct {
	script
	*kernel
	plane    dataplane.Plane[*part, key, string]
	makes    maker
	scenario scenario
	parts    []*part
	loop     *Loop[*part, key, string]
	stop     func() error
	fickle   bool // Writes or Reads failed by chance since the last rest
}

func newWalker(s script) *walker {
	w := &walker{script: s, kernel: newKernel(), makes: maker{}, scenario: scenario{services: map[int]service{}}}
	w.kernel.atomic, w.kernel.strict = s.atomic, s.strict
	w.plane = plane{w.kernel}
	if s.watched {
		w.plane = watched{plane{w.kernel}}
	}
	return w
}

// start begins a new loop on whatever the kernel holds.
func (w *walker) start() {
	w.loop = New(w.plane, Options[*part]{Owner: ownerOf, MaxFacts: w.maxFacts, Backoff: doubling})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.loop.Run(ctx) }()
	w.stop = func() error { cancel(); return <-done }
	w.parts = nil
	w.change()
}

// change reports the loop of the world as it is now.
func (w *walker) change() {
	parts := w.makes.parts(w.scenario)
	put := slices.DeleteFunc(slices.Clone(parts), func(p *part) bool { return slices.Contains(w.parts, p) })
	del := slices.DeleteFunc(slices.Clone(w.parts), func(p *part) bool { return slices.Contains(parts, p) })
	w.parts = parts
	w.with(func() { w.requireOnly(parts) })
	w.loop.Change(put, del)
}

// requireOnly forgets of what had to be true all the time what parts don't need.
func (w *walker) requireOnly(parts []*part) {
	want := map[key]string{}
	for _, p := range parts {
		for _, f := range p.facts {
			want[f.Key] = f.Value
		}
	}
	maps.DeleteFunc(w.required, func(k key, v string) bool { return want[k] != v })
}

// names returns the keys of the world that can be refused, sorted.
func (w *walker) names() []key {
	var keys []key
	for _, p := range w.parts {
		for _, f := range p.facts {
			if f.Key.rank > 0 {
				keys = append(keys, f.Key)
			}
		}
	}
	slices.SortFunc(keys, func(a, b key) int { return cmp.Compare(a.name, b.name) })
	return slices.Compact(keys)
}

func (w *walker) step(o op) error {
	switch o.kind {
	case "change", "all":
		for i := range 5 {
			if s, on := o.service(); o.kind == "all" || i == o.i%5 {
				s.backends = bits.RotateLeft8(s.backends, i)
				w.scenario.services[i] = s
				if !on {
					delete(w.scenario.services, i)
				}
			}
		}
		w.change()
	case "layout":
		w.scenario.layout = o.i % 3
		w.change()
	case "sync":
		return w.sync()
	case "check":
		return w.check()
	case "drift":
		w.stray(o)
	case "every":
		w.fickle = true
		w.with(func() { w.every, w.after, w.late = []int{0, 2, 3, 5}[o.i%4], o.j%4, o.j&4 != 0 })
	case "fail":
		w.fickle = true
		w.with(func() { w.failWrite, w.failRead, w.after, w.late = o.i%5, o.i%3, o.j%4, o.j&4 != 0 })
	case "refuse":
		if n := w.names(); len(n) > 0 {
			name := n[o.i%len(n)].name
			w.with(func() { w.refuse[name] = fmt.Errorf("%s: invalid argument", name) })
		}
	case "allow":
		w.with(func() { clear(w.refuse) })
	case "restart":
		err := w.stop()
		w.start()
		return err
	case "rest":
		w.rest()
	}
	return nil
}

// rest lets the longest back-off pass.
func (w *walker) rest() {
	w.with(func() { w.every, w.failWrite, w.failRead = 0, 0, 0 })
	<-time.After(2 * time.Minute)
	synctest.Wait()
	w.fickle = false
}

// stray lets a stranger delete, alter or add a fact.
func (w *walker) stray(o op) {
	keys := append(w.names(), key{0, "table"}, key{3, "alien"}, key{1, "alien chain"})
	k := keys[o.i%len(keys)]
	v := []string{"", "stranger's", "stranger's>table"}[o.j%3]
	w.drift(k, v)
}

func (w *walker) sync() error {
	_ = w.loop.Sync(context.Background()) // in the thick of it
	synctest.Wait()                       // a signal may bring about more
	err := w.loop.Sync(context.Background())
	blind := false
	w.with(func() { blind = w.blind })
	if blind {
		return nil
	}
	return w.verify(err)
}

func (w *walker) check() error { return w.verify(w.loop.Check(context.Background())) }

// verify compares the answer of a Sync or Check with what the kernel holds.
func (w *walker) verify(outcome error) error {
	if outcome != nil {
		return w.excused(outcome)
	}
	if err := w.holds(w.parts); err != nil {
		return fmt.Errorf("synced, but %w", err)
	}
	w.with(func() {
		w.required = maps.Clone(w.facts)
	})
	return nil
}

// excused reports whether the answer may be an error: only for owners who need a fact that the kernel refuses. All else
// is true.
func (w *walker) excused(outcome error) error {
	if w.fickle {
		return nil
	}
	failing, refused, facts := w.loop.Status().Failing, 0, map[key]string(nil)
	w.with(func() { refused, facts = len(w.refuse), maps.Clone(w.facts) }) // the loop may write again
	if refused == 0 && len(failing) == 0 {
		return fmt.Errorf("nothing is refused, and still: %w", outcome)
	}
	for _, p := range w.parts {
		if _, ok := failing[p.owner]; ok {
			continue
		}
		for _, f := range p.facts {
			if v := facts[f.Key]; v != f.Value {
				return fmt.Errorf("%s isn't failing, but %v is %q, wanted %q", p.owner, f.Key, v, f.Value)
			}
		}
	}
	return nil
}

// walk goes through the whole script, then lets all trouble end and looks at what is left.
func (w *walker) walk() (err error) {
	w.start()
	defer func() { err = errors.Join(err, w.stop()) }()
	for i, o := range w.ops {
		if err := errors.Join(w.step(o), w.complaints()); err != nil {
			return fmt.Errorf("step %d %v: %w", i, o, err)
		}
	}
	w.with(func() { clear(w.refuse) })
	w.rest()
	if err := w.loop.Check(context.Background()); err != nil {
		return fmt.Errorf("all trouble is over, and still: %w", err)
	}
	if err := errors.Join(w.holds(w.parts), w.complaints()); err != nil {
		return err
	}
	return w.quiet()
}

// quiet searches for work where there is none.
func (w *walker) quiet() error {
	writes := w.writes
	w.loop.Change(nil, nil)
	w.loop.Change(w.parts, nil)
	if err := errors.Join(w.loop.Sync(context.Background()), w.loop.Check(context.Background())); err != nil {
		return err
	}
	if err := w.loop.acquire(context.Background()); err != nil {
		return err
	}
	defer w.loop.release()
	s := w.loop.Status()
	switch {
	case w.writes != writes:
		return fmt.Errorf("%d Writes without a change", w.writes-writes)
	case s.Held != len(w.facts) || s.Unsynced != 0 || s.Failing != nil || s.Error != "":
		return fmt.Errorf("the kernel holds %d facts, but status says %+v", len(w.facts), s)
	case w.loop.table.entries.len() != len(w.facts):
		return fmt.Errorf("%d entries for %d facts", w.loop.table.entries.len(), len(w.facts))
	case len(w.loop.table.todo)+len(w.loop.table.claims)+len(w.loop.gone)+len(w.loop.blame.suspects)+
		len(w.loop.repaired) > 0:
		return errors.New("something is left over from trouble that has ended")
	}
	return nil
}

// bubble runs f with a clock that goes on only when everybody waits.
func bubble(t *testing.T, f func() error) (err error) {
	synctest.Test(t, func(*testing.T) { err = f() })
	return err
}

// many makes rapid draw n times, unless the command line says how often.
func many(t *testing.T, n int) {
	f := flag.Lookup("rapid.checks")
	if before := f.Value.String(); before == f.DefValue {
		t.Cleanup(func() { _ = f.Value.Set(before) })
		_ = f.Value.Set(strconv.Itoa(n))
	}
}

// Whatever happens on the way, the kernel ends as the last world wants it, and no state in between was unsafe.
func TestWalk(t *testing.T) {
	many(t, 3000)
	rapid.Check(t, func(r *rapid.T) {
		s := scripts.Draw(r, "script")
		if err := bubble(t, func() error { return newWalker(s).walk() }); err != nil {
			r.Fatal(err)
		}
	})
}

// Walks that went wrong once, each many times: what merges with what is chance.
func TestWalksThatWentWrong(t *testing.T) {
	for name, ops := range map[string][]op{
		"a chain that a blocked frontend stands on goes with another Service": {
			{"change", 1, 5}, {"change", 0, 0}, {"change", 1, 13}, {"refuse", 1, 0}, {"change", 0, 5}, {"sync", 0, 0},
			{"change", 0, 0},
		},
		"drift that can't be repaired at once": {{"drift", 0, 0}, {"every", 1, 0}, {"sync", 0, 0}},
	} {
		for range 300 {
			if err := bubble(t, func() error {
				return newWalker(script{watched: true, maxFacts: 1, ops: ops}).walk()
			}); err != nil {
				t.Fatal(name, err)
			}
		}
	}
}
