package reconcile

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"fairlead.dev/fairlead/dataplane"
)

// rig is a loop that runs on a fake kernel, in a bubble.
type rig struct {
	*testing.T
	*kernel
	loop *Loop[*part, key, string]
	log  *journal
	stop func()
}

// journal is a log that may be read while it is written.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(b)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// in runs f in a bubble with a loop that is made but not yet run, and looks for complaints afterwards.
func in(t *testing.T, o Options[*part], f func(*rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{T: t, kernel: newKernel(), log: &journal{}}
		if o.Owner == nil {
			o.Owner = ownerOf
		}
		if o.Backoff == nil {
			o.Backoff = doubling
		}
		o.Log = slog.New(slog.NewTextHandler(r.log, nil))
		r.loop = New(watched{plane{r.kernel}}, o)
		r.stop = func() {}
		f(r)
		r.stop()
		for id, e := range r.loop.table.entries.all() {
			switch j := r.loop.table.jobOf(e); {
			case j != nil && j.id != id:
				t.Errorf("an entry's job is another key's: %v", j.key)
			case j == nil && r.loop.table.known && (e.job != settled || e.refs == 0):
				t.Errorf("an entry that is neither as wanted nor has a job: %+v", e)
			}
		}
		r.checkOwned()
		if err := r.complaints(); err != nil {
			t.Error(err)
		}
	})
}

func (r *rig) run() {
	ctx, cancel := context.WithCancel(r.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := r.loop.Run(ctx); err != nil {
			r.Error(err)
		}
	}()
	r.stop = func() { cancel(); <-done }
}

// outcome is what Sync says. The loop is at rest afterwards.
func (r *rig) outcome() error {
	err := r.loop.Sync(r.Context())
	synctest.Wait()
	return err
}

// sync wants the kernel to hold what parts need.
func (r *rig) sync(parts ...*part) {
	r.Helper()
	if err := r.outcome(); err != nil {
		r.Fatal(err)
	}
	r.wants(parts...)
}

func (r *rig) wants(parts ...*part) {
	r.Helper()
	if err := r.holds(parts); err != nil {
		r.Fatal(err)
	}
}

// later lets d pass.
func (r *rig) later(d time.Duration) {
	r.with(func() {}) // what the test has read, the loop may write from now on
	<-time.After(d)
	synctest.Wait()
}

// of makes a part of facts "rank name value".
func of(owner string, facts ...string) *part {
	p := &part{owner: owner}
	for _, s := range facts {
		var f fact
		if _, err := fmt.Sscanf(s, "%d %s %s", &f.Key.rank, &f.Key.name, &f.Value); err != nil {
			panic(err)
		}
		p.facts = append(p.facts, f)
	}
	return p
}

func (r *rig) lines(level string) (n int) { return strings.Count(r.log.String(), "level="+level) }

func TestNothingBeforeTheFirstChange(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.facts[key{1, "old"}] = "v"
		r.run()
		r.later(time.Hour)
		if r.reads+r.writes > 0 {
			r.Errorf("%d Reads and %d Writes before anything is wanted", r.reads, r.writes)
		}
		if err := r.loop.Check(r.Context()); err == nil {
			r.Error("a Check with nothing to check against is no error")
		}
		r.loop.Change(nil, nil)
		r.sync()
	})
}

func TestRestartWritesTheDifference(t *testing.T) {
	in(t, Options[*part]{MaxFacts: 1}, func(r *rig) {
		stays, other, fresh := of("a", "1 chain v", "2 stays v>chain"), of("a", "2 other v>chain"), of("b", "2 fresh v>chain")
		for _, f := range slices.Concat(stays.facts, of("", "2 other w>chain", "2 gone v>lost", "1 lost v").facts) {
			r.facts[f.Key] = f.Value
		}
		r.run()
		r.loop.Change([]*part{stays, other, fresh}, nil)
		r.sync(stays, other, fresh)
		slices.Sort(r.kernel.log[:2])
		if d := cmp.Diff(r.kernel.log, []string{"+fresh", "+other -other", "-gone", "-lost"}); d != "" {
			r.Error(d)
		}
	})
}

func TestDeferredFactsAreDeletedLater(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		stays, fresh := of("a", "1 chain w", "2 stays v"), of("b", "2 fresh v")
		for _, f := range of("", "1 chain v", "2 stays v", "2 gone v").facts {
			r.facts[f.Key] = f.Value
		}
		until := make(chan struct{})
		r.loop.After(until)
		r.run()
		r.loop.Change([]*part{stays, fresh}, nil)
		r.later(time.Minute)
		if d := cmp.Diff(r.kernel.log, []string{"+chain +fresh -chain"}); d != "" {
			r.Error(d)
		}
		select {
		case <-r.loop.Ready():
			r.Error("it says that all is written while something is to go")
		default:
		}
		close(until)
		r.sync(stays, fresh)
		if d := cmp.Diff(r.kernel.log[1:], []string{"-gone"}); d != "" {
			r.Error(d)
		}
		<-r.loop.Ready()
	})
}

func TestSmallChangeIsOneWrite(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.run()
		a, b := of("s", "1 x v", "2 y v>x", "1 z v"), of("s", "1 x v", "2 y w>x,u", "1 u v")
		r.loop.Change([]*part{a}, nil)
		r.sync(a)
		r.kernel.log = nil
		r.loop.Change([]*part{b}, []*part{a})
		r.sync(b)
		if d := cmp.Diff(r.kernel.log, []string{"+u +y -y -z"}); d != "" {
			r.Error(d)
		}
	})
}

func TestChangesMergeDuringWrite(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.block = make(chan struct{})
		r.run()
		a, b, c := of("a", "1 a v"), of("b", "1 b v"), of("c", "1 c v")
		r.loop.Change([]*part{a}, nil)
		synctest.Wait() // the Write of a is under way
		r.loop.Change([]*part{b}, nil)
		r.loop.Change([]*part{c}, []*part{b})
		r.loop.Change([]*part{b}, []*part{c})
		r.loop.Change([]*part{c, a}, []*part{b, a})
		close(r.block)
		r.sync(a, c)
		if d := cmp.Diff(r.kernel.log, []string{"+a", "+c"}); d != "" {
			r.Error(d)
		}
	})
}

func TestSharedFactsGoWithTheLastPart(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.run()
		a, b, twin := of("a", "1 x v", "1 x v"), of("b", "1 x v"), of("b", "1 x v")
		r.loop.Change([]*part{a, b, twin}, nil)
		r.sync(a)
		for _, p := range []*part{b, a, a} { // the second time it is not there any more
			r.loop.Change(nil, []*part{p})
			r.sync(twin)
		}
		r.loop.Change(nil, []*part{twin})
		r.sync()
	})
}

func TestTwoValuesForOneKey(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.run()
		a, b, c := of("a", "1 x v"), of("b", "1 x w"), of("c", "1 y v")
		r.loop.Change([]*part{a}, nil)
		r.loop.Change([]*part{b, c}, nil)
		err := r.outcome()
		r.wants(a, c)
		if want := "x is wanted with different values by parts of"; err == nil || !strings.Contains(err.Error(), want) {
			r.Errorf("got %v, want …%s…", err, want)
		}
		failing := r.loop.Status().Failing
		if len(failing) != 2 || failing["a"].Error == "" || failing["b"].Error == "" {
			r.Errorf("not both owners, and no other, are failing: %+v", failing)
		}
		r.loop.Change(nil, []*part{a})
		r.sync(b, c)
		if s := r.loop.Status(); s.Failing != nil {
			r.Errorf("still failing: %v", s.Failing)
		}
	})
}

func TestRefusedFact(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.run()
		bad := errors.New("invalid argument")
		r.with(func() { r.refuse["chain"] = bad })
		a := of("a", "1 chain v", "2 entry v") // a kernel that sees no reference between them
		b := of("b", "1 x v", "2 y v>x")
		twin := of("twin", "1 chain v", "2 other v")
		r.loop.Change([]*part{a, b}, nil)
		err := r.outcome()
		if !errors.Is(err, bad) || !strings.HasPrefix(err.Error(), "a: writing chain: ") {
			r.Errorf("Sync gives %v", err)
		}
		r.wants(b)
		r.loop.Change([]*part{twin}, nil)
		if err := r.outcome(); err == nil || !strings.Contains(err.Error(), "twin: ") {
			r.Errorf("Sync doesn't name who came to need the refused fact: %v", err)
		}
		r.wants(b)
		r.later(time.Minute)
		if f := r.loop.Status().Failing["a"]; f.Attempts < 5 || f.Attempts > 12 || time.Since(f.Since) < time.Minute {
			r.Errorf("after a minute: %+v", f)
		}
		if n := r.lines("WARN"); n != 3 {
			r.Errorf("%d warnings, want one for the failed Write, one for each owner:\n%s", n, r.log)
		}

		// Other changes go on at once, in one Write each.
		writes, c := r.writes, of("c", "1 c v")
		r.loop.Change([]*part{c}, nil)
		if err := r.outcome(); err == nil || r.writes != writes+1 {
			r.Errorf("%d Writes for a small change beside a refused fact; Sync gives %v", r.writes-writes, err)
		}
		r.wants(b, c)

		// A changed want is tried at once.
		r.with(func() { clear(r.refuse) })
		a2 := of("a", "1 chain w", "2 entry v")
		r.loop.Change([]*part{a2}, []*part{a, twin})
		r.sync(a2, b, c)
		if s := r.loop.Status(); s.Failing != nil {
			r.Errorf("still failing: %v", s.Failing)
		}
	})
}

func TestRefusedFactIsForgottenWhenNotWanted(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.run()
		a := of("a", "1 x v")
		r.with(func() { r.refuse["x"] = errBusy })
		r.loop.Change([]*part{a}, nil)
		if err := r.outcome(); err == nil {
			r.Error("no error for a refused fact")
		}
		r.loop.Change(nil, []*part{a})
		r.sync()
		if r.lines("INFO") == 0 {
			r.Errorf("no word of the recovery:\n%s", r.log)
		}
	})
}

// A fact that can't be rewritten keeps what its old value stands on.
func TestNoDeletionBeforeARefusedReplacement(t *testing.T) {
	for _, owner := range []string{"a", "b"} { // b: a stranger to the loop, from before a restart
		in(t, Options[*part]{}, func(r *rig) {
			before, after := of("a", "1 old v", "2 entry v>old"), of(owner, "1 new v", "2 entry v>new", "3 top v>entry,new")
			for _, f := range before.facts {
				r.facts[f.Key] = f.Value
			}
			if owner == "a" {
				r.run()
				r.loop.Change([]*part{before}, nil)
				r.sync(before)
			}
			r.with(func() { r.refuse["entry"] = errBusy })
			r.loop.Change([]*part{after}, []*part{before})
			if owner == "b" {
				r.run()
			}
			if err := r.outcome(); err == nil {
				r.Error("no error for a refused fact")
			}
			r.wants(of("", "1 old v", "2 entry v>old", "1 new v"))
			r.with(func() { clear(r.refuse) })
			r.later(time.Minute)
			r.sync(after)
		})
	}
}

func TestManyRefusedFacts(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.atomic = true
		var good, bad []*part
		for i := range 3000 {
			p := of(fmt.Sprint("s", i), fmt.Sprintf("%d f%d v", i%3, i))
			if i%300 == 7 {
				bad = append(bad, p)
				r.refuse[p.facts[0].Key.name] = errBusy
			} else {
				good = append(good, p)
			}
		}
		r.loop.Change(slices.Concat(good, bad), nil)
		r.run()
		err := r.outcome()
		r.wants(good...)
		if lines := strings.Split(fmt.Sprint(err), "\n"); len(lines) != len(bad) {
			r.Errorf("%d owners in the error, want %d: %v", len(lines), len(bad), err)
		}
		if most := len(bad) * 14; r.writes > most {
			r.Errorf("%d Writes to find %d facts among 3000, want at most %d", r.writes, len(bad), most)
		}
	})
}

func TestKernelThatRefusesEverything(t *testing.T) {
	in(t, Options[*part]{MaxFacts: 50}, func(r *rig) {
		var parts []*part
		for i := range 500 {
			parts = append(parts, of(fmt.Sprint("s", i), fmt.Sprintf("1 f%d v", i)))
		}
		r.failWrite = 1 << 30
		r.loop.Change(parts, nil)
		r.run()
		if err := r.outcome(); err == nil || !strings.Contains(err.Error(), "and 490 more") {
			r.Errorf("Sync gives %v", err)
		}
		if r.writes > despair+15 || r.lines("WARN") > 15 {
			r.Errorf("%d Writes and %d warnings for a kernel that takes nothing", r.writes, r.lines("WARN"))
		}
		before := r.writes
		r.later(10 * time.Minute)
		if n := (r.writes - before) / 20; n > despair+15+few {
			t.Errorf("%d Writes and Reads in 30 s, again and again", n)
		}
		r.with(func() { r.failWrite = 0 })
		r.later(time.Minute)
		r.sync(parts...)
	})
}

func TestReadFails(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		a := of("a", "1 x v")
		r.failRead = 1
		r.loop.Change([]*part{a}, nil)
		r.run()
		r.sync(a) // once is no reason to give up
		r.with(func() { r.failRead = 100 })
		if err := r.loop.Check(r.Context()); !errors.Is(err, errBusy) {
			r.Errorf("Check gives %v", err)
		}
		if s := r.loop.Status(); !strings.Contains(s.Error, "busy") || s.Failures < 2 || s.Retries < 1 {
			r.Errorf("status: %+v", s)
		}
		r.with(func() { r.failRead = 0 })
		r.later(time.Minute)
		r.sync(a)
		if s := r.loop.Status(); s.Error != "" {
			r.Errorf("status: %+v", s)
		}
	})
}

func TestDriftIsRepaired(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		a, b := of("a", "1 x v", "2 y v>x"), of("b", "1 z v")
		r.loop.Change([]*part{a, b}, nil)
		r.run()
		r.sync(a, b)
		synctest.Wait()
		before := r.log.String()
		r.drift(key{1, "x"}, "")
		r.drift(key{2, "y"}, "stranger's")
		r.drift(key{3, "alien"}, "stranger's")
		synctest.Wait()
		r.sync(a, b)
		if s := r.loop.Status(); s.Repairs != 3 {
			r.Errorf("%d repairs, want 3", s.Repairs)
		}
		for _, want := range []string{`msg="drift repaired" owner=a facts=2`, `owner=nobody facts=1`} {
			if strings.Count(strings.TrimPrefix(r.log.String(), before), want) != 1 {
				r.Errorf("the log doesn't say once %q:\n%s", want, r.log)
			}
		}
	})
}

// twice is a plane that reads each fact twice, as a kernel may whose table changes meanwhile.
type twice struct{ watched }

func (w twice) Read(ctx context.Context) ([]fact, error) {
	facts, err := w.watched.Read(ctx)
	return append(facts, facts...), err
}

func TestDriftIsRepairedAmongFactsReadTwice(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		a := of("a", "1 x v", "1 y v")
		r.loop = New(twice{watched{plane{r.kernel}}}, Options[*part]{})
		r.loop.Change([]*part{a}, nil)
		r.run()
		r.sync(a)
		r.drift(key{1, "x"}, "")
		synctest.Wait()
		r.sync(a)
	})
}

func TestReadAgainAfterDrift(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		a := of("a", "1 x v", "1 y v")
		r.loop.Change([]*part{a}, nil)
		r.run()
		r.sync(a)
		r.drift(key{1, "x"}, "")
		r.later(afterDrift / 2)
		r.with(func() { // of this the plane doesn't hear
			r.facts[key{1, "y"}] = "stranger's"
			delete(r.required, key{1, "y"})
			r.blind = true
		})
		r.later(2 * afterDrift)
		r.wants(a)
		reads := r.reads
		r.later(time.Hour)
		if r.reads > reads+1 {
			r.Errorf("%d Reads after the last drift, want 1 at most", r.reads-reads)
		}
	})
}

func TestIdleIsIdle(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		a := of("a", "1 x v")
		r.loop.Change([]*part{a}, nil)
		r.run()
		r.sync(a)
		synctest.Wait()
		reads, writes := r.reads, r.writes
		r.later(1000 * time.Hour)
		if reads != 1 || r.reads != reads || r.writes != writes {
			r.Errorf("%d Reads at the start, want 1; %d Reads and %d Writes in idle time", reads, r.reads-reads, r.writes-writes)
		}
	})
}

// deaf is a plane whose watch fails, or ends, the first times.
type deaf struct {
	watched
	tries *int
}

func (d deaf) Watch(ctx context.Context) (<-chan struct{}, error) {
	switch *d.tries++; *d.tries {
	case 1:
		return nil, errBusy
	case 2:
		c := make(chan struct{})
		close(c)
		return c, nil
	}
	return d.watched.Watch(ctx)
}

func TestWatchThatFailsIsTriedAgain(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		a, tries := of("a", "1 x v"), 0
		r.loop = New(deaf{watched{plane{r.kernel}}, &tries}, Options[*part]{Backoff: doubling})
		r.loop.Change([]*part{a}, nil)
		r.run()
		r.sync(a)
		r.drift(key{1, "x"}, "")
		r.later(time.Minute)
		r.wants(a)
		if tries != 3 {
			r.Errorf("watched %d times, want 3", tries)
		}
	})
}

// slow is a plane whose Read takes a second.
type slow struct{ watched }

func (s slow) Read(ctx context.Context) ([]fact, error) {
	<-time.After(time.Second)
	return s.watched.Read(ctx)
}

func TestEndlessSignalsCostATenth(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.loop = New(slow{watched{plane{r.kernel}}}, Options[*part]{})
		r.loop.Change(nil, nil)
		r.run()
		for range 1000 {
			r.drift(key{1, "alien"}, "")
			r.later(100 * time.Millisecond)
		}
		r.with(func() {
			if r.reads < 5 || r.reads > 15 {
				r.Errorf("%d Reads of a second in 100 s", r.reads)
			}
		})
	})
}

func TestEndIsNoFailure(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		a := of("a", "1 x v")
		r.loop.Change([]*part{a}, nil)
		r.run()
		r.sync(a)
		r.block = make(chan struct{})
		r.loop.Change([]*part{of("b", "1 y v")}, nil)
		synctest.Wait()
		waiting := make(chan error)
		go func() { waiting <- r.loop.Sync(r.Context()) }()
		ended := make(chan struct{})
		go func() { r.stop(); close(ended) }()
		synctest.Wait()
		close(r.block)
		<-ended
		r.wants(a)
		if s := r.loop.Status(); s.Failures != 0 || s.Error != "" {
			r.Errorf("an end counts as a failure: %+v", s)
		}
		if err := <-waiting; err == nil {
			r.Error("Sync is content though the loop has ended")
		}
		if err := r.loop.Run(r.Context()); err == nil {
			r.Error("a loop runs twice")
		}
	})
}

func TestSyncEndsWithItsContext(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.run()
		ctx, cancel := context.WithTimeout(r.Context(), time.Minute)
		defer cancel()
		if err := r.loop.Sync(ctx); !errors.Is(err, context.DeadlineExceeded) {
			r.Errorf("Sync without any Change gives %v", err)
		}
		if _, err := r.loop.compare(ctx); !errors.Is(err, context.DeadlineExceeded) {
			r.Errorf("Plan in an ended context gives %v", err)
		}
	})
}

func TestPlan(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		for _, f := range of("", "1 x v", "2 y old>x", "2 gone v>lost", "1 lost v").facts {
			r.facts[f.Key] = f.Value
		}
		a := of("a", "1 x v", "2 y new>x", "1 z v")
		r.loop.Change([]*part{a}, nil)
		for range 2 { // the second time after Sync, beside a loop that runs
			p, err := r.loop.compare(r.Context())
			slices.SortFunc(p.Del[:min(2, len(p.Del))], func(a, b fact) int { return strings.Compare(a.Key.name, b.Key.name) })
			want := difference[key, string]{
				Put:  of("", "1 z v", "2 y new>x").facts,
				Del:  of("", "2 gone v>lost", "2 y old>x", "1 lost v").facts,
				Held: 1,
			}
			if r.writes > 0 {
				want = difference[key, string]{Held: 3}
			}
			if d := cmp.Diff(want, p, cmp.AllowUnexported(key{})); d != "" || err != nil {
				r.Error(d, err)
			}
			if r.writes > 0 {
				break
			}
			r.run()
			r.sync(a)
		}
		r.with(func() { r.failRead = 1 })
		if _, err := r.loop.compare(r.Context()); !errors.Is(err, errBusy) {
			r.Errorf("Plan gives %v where nothing can be read", err)
		}
	})
}

func TestStatusJSON(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		begin := time.Now()
		r.atomic = true
		r.with(func() { r.refuse["y"] = errBusy })
		r.loop.Change(nil, nil)
		r.run()
		r.sync()
		r.loop.Change([]*part{of("a", "1 x v"), of("b", "1 y v")}, nil)
		_ = r.outcome()
		got, err := json.Marshal(r.loop.Status())
		if err != nil {
			r.Fatal(err)
		}
		stamp := func(d time.Duration) string { return begin.Add(d).Format(time.RFC3339Nano) }
		want := `{"parts":2,"held":1,"unsynced":1,"writes":4,"puts":1,"dels":0,"repairs":0,"retries":6,"failures":3,` +
			`"lastReadNanoseconds":0,"lastWriteNanoseconds":0,"lastChange":"` + stamp(0) + `","firstSync":"` + stamp(0) +
			`","firstSyncNanoseconds":0,"serving":true,"notServing":"","error":"",` +
			`"failing":{"b":{"error":"writing y: device or resource busy","since":"` +
			stamp(100*time.Millisecond) + `","attempts":1}}}`
		if d := cmp.Diff(want, string(got)); d != "" {
			r.Error(d)
		}
	})
}

func TestBackoff(t *testing.T) {
	for attempt, most := range []time.Duration{1: 50 * time.Millisecond, 2: 100 * time.Millisecond,
		9: 12800 * time.Millisecond, 10: 25600 * time.Millisecond, 11: 30 * time.Second, 1000: 30 * time.Second} {
		if most == 0 {
			continue
		}
		for range 100 {
			if d := Backoff(attempt); d > most || d < most/2 {
				t.Errorf("attempt %d waits %v, want %v to %v", attempt, d, most/2, most)
			}
		}
	}
}

func TestPortion(t *testing.T) {
	one := &job[key, string]{refs: 1, needs: &noNeeds}
	two := &job[key, string]{refs: 1, held: true, needs: &noNeeds}
	for _, c := range []struct {
		jobs  []*job[key, string]
		limit int
		want  int
	}{
		{[]*job[key, string]{one, one, one}, 2, 2},
		{[]*job[key, string]{two, one}, 1, 1},
		{[]*job[key, string]{one, two}, 2, 1},
		{[]*job[key, string]{two, two}, 4, 2},
		{nil, 4, 0},
	} {
		if got := portion(c.jobs, c.limit); got != c.want {
			t.Errorf("%d of %d jobs for %d facts, want %d", got, len(c.jobs), c.limit, c.want)
		}
	}
}

// The way to a world leaves no trace: step by step, squashed into one change, or its independent changes the other way
// round.
func TestOrderOfChangesLeavesNoTrace(t *testing.T) {
	many(t, 500)
	rapid.Check(t, func(r *rapid.T) {
		var steps []op
		for _, o := range rapid.SliceOfN(ops, 1, 20).Draw(r, "ops") {
			steps = append(steps, op{"change", o.i, o.j})
		}
		last := map[int]op{} // by service: the last wins
		for _, o := range steps {
			last[o.i%5] = o
		}
		var reversed []op
		for i := 4; i >= 0; i-- {
			if o, ok := last[i]; ok {
				reversed = append(reversed, o, op{kind: "sync"})
			}
		}
		got := map[string]map[key]string{}
		for name, ops := range map[string][]op{"merged": steps, "synced": between(steps, op{kind: "sync"}),
			"reversed": reversed} {
			err := bubble(t, func() error {
				w := newWalker(script{strict: true, maxFacts: 4096, ops: ops})
				defer func() { got[name] = w.facts }()
				return w.walk()
			})
			if err != nil {
				r.Fatal(name, err)
			}
		}
		if d := cmp.Diff(got["merged"], got["synced"], cmp.AllowUnexported(key{})) +
			cmp.Diff(got["merged"], got["reversed"], cmp.AllowUnexported(key{})); d != "" {
			r.Fatal(d)
		}
	})
}

func between(l []op, o op) (r []op) {
	for _, e := range l {
		r = append(r, e, o)
	}
	return r
}

// Every method from many goroutines at a time, on a kernel that fails now and then.
func TestManyAtATime(t *testing.T) {
	k := newKernel()
	k.strict, k.every = true, 7
	l := New[*part, key, string](watched{plane{k}}, Options[*part]{MaxFacts: 3,
		Backoff: func(int) time.Duration { return time.Millisecond }})
	ctx, cancel := context.WithCancel(t.Context())
	var loop, others sync.WaitGroup
	loop.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	final := make([]*part, 8)
	for g := range final {
		others.Go(func() {
			for i := range 100 {
				next := of(fmt.Sprint("s", g), "1 shared v", fmt.Sprintf("2 chain%d.%d v>shared", g, i),
					fmt.Sprintf("3 fe%d v%d>chain%d.%d", g, i, g, i))
				if old := final[g]; old == nil {
					l.Change([]*part{next}, nil)
				} else {
					l.Change([]*part{next}, []*part{old})
				}
				final[g] = next
				switch i % 10 {
				case 3:
					_ = l.Sync(ctx)
				case 5:
					_ = l.Check(ctx)
				case 7:
					if _, err := l.compare(ctx); err != nil {
						t.Error(err)
					}
				default:
					l.Status()
				}
			}
		})
	}
	others.Wait()
	k.with(func() { k.every = 0 })
	for l.Check(ctx) != nil { // facts set aside are tried again within milliseconds
		if ctx.Err() != nil {
			t.Fatal("never synced")
		}
	}
	cancel()
	loop.Wait()
	if err := errors.Join(k.holds(final), k.complaints()); err != nil {
		t.Error(err)
	}
}

var _ dataplane.Watcher = watched{}
