package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// key is a fact's place in the fake kernel.
type key struct {
	rank int
	name string
}

func (k key) Rank() int      { return k.rank }
func (k key) String() string { return k.name }

// A value is a body and the names of keys that it refers to: "body>chain a,chain b".
type fact = dataplane.Fact[key, string]

func refs(value string) []string {
	_, list, ok := strings.Cut(value, ">")
	if !ok {
		return nil
	}
	return strings.Split(list, ",")
}

// part is a piece of the fake model.
type part struct {
	owner string
	facts []fact
}

func ownerOf(p *part) model.Owner { return model.Owner{Name: p.owner} }

func labelOf(p *part) string { return p.owner }

// kernel holds facts as a kernel does. It keeps a list of everything that no kernel should ever have seen.
type kernel struct {
	mu       sync.Mutex
	facts    map[key]string
	required map[key]string // facts that must be true at any time
	bad      []string       // what went wrong
	log      []string       // one line per Write that had an effect

	atomic bool // a Write happens as a whole or not at all
	strict bool // refuses to break a reference, as nf_tables does; else it notes the mistake
	blind  bool // others have written since the last Read: broken references are not the loop's fault

	refuse    map[string]error // by key name: can't be put, changed or deleted
	failRead  int              // this many Reads fail
	failWrite int              // this many Writes fail
	every     int              // every so many Writes one fails
	after     int              // a failing Write stops after so many facts, where not atomic
	late      bool             // a failing Write has done all its work
	block     chan struct{}    // a Write waits for it

	reads, writes, biggest int
	signals                chan struct{}
}

func newKernel() *kernel {
	return &kernel{facts: map[key]string{}, required: map[key]string{}, refuse: map[string]error{},
		signals: make(chan struct{}, 1)}
}

var errBusy = errors.New("device or resource busy")

// plane is a data plane for the fake kernel.
type plane struct{ *kernel }

// watched is one that learns of drift.
type watched struct{ plane }

func (plane) Render(p *part) []fact {
	facts := slices.Clone(p.facts)
	for i := range facts {
		facts[i].Body = bodyOf(facts[i])
	}
	return facts
}

// bodyOf returns a fact's body, which can't be compared; nil for about half of all facts.
func bodyOf(f fact) any {
	if len(f.Key.name)%2 == 0 {
		return nil
	}
	return []string{f.Value}
}

func (p plane) Read(ctx context.Context) ([]fact, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reads++
	if p.failRead > 0 {
		p.failRead--
		return nil, errBusy
	}
	p.blind = false
	var facts []fact
	for k, v := range p.facts {
		facts = append(facts, fact{Key: k, Value: v})
	}
	return facts, ctx.Err()
}

func (p plane) Write(ctx context.Context, put, del []fact) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b := p.block; b != nil {
		p.mu.Unlock()
		<-b
		p.mu.Lock()
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	p.writes++
	p.biggest = max(p.biggest, len(put)+len(del))
	p.checkShape(put, del)
	fails := p.failWrite > 0 || p.every > 0 && p.writes%p.every == 0
	p.failWrite = max(0, p.failWrite-1)
	if p.atomic {
		return p.writeAtOnce(put, del, fails)
	}
	return p.writeInSteps(put, del, fails)
}

func (w watched) Watch(ctx context.Context) (<-chan struct{}, error) {
	out := make(chan struct{})
	go func() {
		defer close(out)
		for {
			select {
			case <-ctx.Done():
				return
			case <-w.signals:
			}
			select {
			case <-ctx.Done():
				return
			case out <- struct{}{}:
			}
		}
	}()
	return out, nil
}

func (p *kernel) writeAtOnce(put, del []fact, fails bool) error {
	if fails && !p.late {
		return errBusy
	}
	before := maps.Clone(p.facts)
	for _, f := range put {
		p.facts[f.Key] = f.Value
	}
	for _, f := range del {
		if p.facts[f.Key] == f.Value {
			delete(p.facts, f.Key)
		}
	}
	err := p.verify(before, put, del)
	if err != nil {
		p.facts = before
		return err
	}
	p.wrote(put, del)
	if fails {
		return errBusy
	}
	return nil
}

func (p *kernel) writeInSteps(put, del []fact, fails bool) error {
	n := 0
	step := func(f fact, do func()) error {
		if n++; fails && !p.late && n > p.after {
			return errBusy
		}
		before := maps.Clone(p.facts)
		do()
		if maps.Equal(before, p.facts) {
			return nil
		}
		if err := p.verify(before, []fact{f}, nil); err != nil {
			p.facts = before
			return err
		}
		return nil
	}
	for _, f := range put {
		if err := step(f, func() { p.facts[f.Key] = f.Value }); err != nil {
			return err
		}
	}
	for _, f := range del {
		if p.facts[f.Key] != f.Value {
			continue // replaced
		}
		if err := step(f, func() { delete(p.facts, f.Key) }); err != nil {
			return err
		}
	}
	p.wrote(put, del)
	if fails {
		return errBusy
	}
	return nil
}

// verify reports whether the kernel takes the change from before to now, which put and del made, and notes what is
// unsafe.
func (p *kernel) verify(before map[key]string, put, del []fact) error {
	for _, f := range slices.Concat(put, del) {
		if err := p.refuse[f.Key.name]; err != nil && before[f.Key] != p.facts[f.Key] {
			return err
		}
	}
	names := map[string]bool{}
	for k := range p.facts {
		names[k.name] = true
	}
	for k, v := range p.facts {
		for _, r := range refs(v) {
			if names[r] {
				continue
			}
			fresh := before[k] != v || slices.ContainsFunc(slices.Collect(maps.Keys(before)),
				func(b key) bool { return b.name == r })
			if fresh && p.strict {
				return fmt.Errorf("%v refers to %v: no such file or directory", k, r)
			}
			if fresh && !p.blind {
				p.bad = append(p.bad, fmt.Sprintf("%v refers to %v, which is not there", k, r))
			}
		}
	}
	for k, v := range p.required {
		if p.facts[k] != v {
			p.bad = append(p.bad, fmt.Sprintf("%v was %q all the time and is now %q", k, v, p.facts[k]))
		}
	}
	return nil
}

// checkShape records where a Write is not as promised.
func (p *kernel) checkShape(put, del []fact) {
	if len(put)+len(del) == 0 {
		p.bad = append(p.bad, "an empty Write")
	}
	if !slices.IsSortedFunc(put, func(a, b fact) int { return cmp.Compare(a.Key.rank, b.Key.rank) }) {
		p.bad = append(p.bad, fmt.Sprintf("put is not by rising rank: %v", put))
	}
	if !slices.IsSortedFunc(del, func(a, b fact) int { return cmp.Compare(b.Key.rank, a.Key.rank) }) {
		p.bad = append(p.bad, fmt.Sprintf("del is not by falling rank: %v", del))
	}
	seen := map[key]int{}
	for _, f := range put {
		if want := bodyOf(f); !reflect.DeepEqual(f.Body, want) {
			p.bad = append(p.bad, fmt.Sprintf("%v is put with body %v, want %v", f.Key, f.Body, want))
		}
	}
	for i, f := range slices.Concat(put, del) {
		bit := 1
		if i >= len(put) {
			bit = 2
		}
		if seen[f.Key]&bit != 0 {
			p.bad = append(p.bad, fmt.Sprintf("%v twice in one Write", f.Key))
		}
		seen[f.Key] |= bit
	}
	for _, f := range del {
		if v, ok := p.facts[f.Key]; !p.blind && (!ok || v != f.Value) {
			p.bad = append(p.bad, fmt.Sprintf("del of %v, but the kernel holds %q", f, v))
		}
	}
	for _, f := range put {
		if _, ok := p.facts[f.Key]; !p.blind && ok && seen[f.Key] != 3 {
			p.bad = append(p.bad, fmt.Sprintf("%v changes without its old value in del", f))
		}
	}
}

func (p *kernel) wrote(put, del []fact) {
	var l []string
	for _, f := range put {
		l = append(l, "+"+f.Key.name)
	}
	for _, f := range del {
		l = append(l, "-"+f.Key.name)
	}
	p.log = append(p.log, strings.Join(l, " "))
}

// drift writes as a stranger, past all rules; an empty value deletes.
func (p *kernel) drift(k key, v string) {
	p.mu.Lock()
	if v == "" {
		delete(p.facts, k)
	} else {
		p.facts[k] = v
	}
	delete(p.required, k)
	p.blind = true
	p.mu.Unlock()
	select {
	case p.signals <- struct{}{}:
	default:
	}
}

// with changes the kernel's manners.
func (p *kernel) with(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// holds compares with what parts need.
func (p *kernel) holds(parts []*part) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	want := map[key]string{}
	for _, pt := range parts {
		for _, f := range pt.facts {
			want[f.Key] = f.Value
		}
	}
	if maps.Equal(want, p.facts) {
		return nil
	}
	return fmt.Errorf("the kernel holds\n %v\nwanted\n %v", p.facts, want)
}

// complaints returns all that went wrong so far.
func (p *kernel) complaints() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bad == nil {
		return nil
	}
	return errors.New(strings.Join(p.bad[:min(3, len(p.bad))], "\n"))
}
