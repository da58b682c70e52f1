package reconcile

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// The size of the benchmarks: 10,000 Services of 10 backends, each with three facts of its own.
const (
	services = 10_000
	backends = 10
	factsPer = backends + 3
)

// bigKey is shaped like a plane's: a kind, a set's name and an element's bytes.
type bigKey struct {
	kind    uint8
	name    string
	element string
}

func (k bigKey) Rank() int { return int(k.kind) }

// bigPart is a Service; its facts follow from its number and version.
type bigPart struct{ number, version uint32 }

type bigFact = dataplane.Fact[bigKey, string]

// paper is a plane that takes everything, save the facts of one part, and holds nothing but what it was made with.
type paper struct {
	facts   []bigFact
	refuses uint32
}

func (*paper) Render(p *bigPart) []bigFact {
	facts := make([]bigFact, 0, factsPer)
	for i := range uint32(factsPer) {
		element := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, uint64(p.number)), i)
		version := uint32(0)
		if i == 0 {
			version = p.version
		}
		value := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, p.number), version)
		facts = append(facts, bigFact{Key: bigKey{kind: 1 + uint8(i%4), name: "endpoint4", element: string(element)},
			Value: string(value)})
	}
	return facts
}

func (p *paper) Read(context.Context) ([]bigFact, error) { return p.facts, nil }

func (p *paper) Write(_ context.Context, put, del []bigFact) error {
	for _, f := range put {
		if number := binary.BigEndian.Uint64([]byte(f.Key.element)); p.refuses > 0 && number == uint64(p.refuses) {
			return errors.New("refused")
		}
	}
	if p.refuses > 0 {
		p.facts = append(p.facts, put...)
	}
	return nil
}

func bigParts() []*bigPart {
	parts := make([]*bigPart, services)
	for i := range parts {
		parts[i] = &bigPart{number: uint32(i)}
	}
	return parts
}

// bigLoop is a loop that has synced everything.
func bigLoop(b *testing.B, p *paper, parts []*bigPart) (l *Loop[*bigPart, bigKey, string], stop func()) {
	b.Helper()
	l = New[*bigPart, bigKey, string](p, Options[*bigPart]{
		Owner: func(p *bigPart) model.Owner { return model.Owner{Name: fmt.Sprint(p.number)} }})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = l.Run(ctx) }()
	l.Change(parts, nil)
	if err := l.Sync(ctx); err != nil && p.refuses == 0 {
		b.Fatal(err)
	}
	return l, func() { cancel(); <-done }
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkStart writes everything to an empty kernel. bytes/fact is what stays, keys' and values' own bytes included.
func BenchmarkStart(b *testing.B) {
	parts := bigParts()
	var bytes uint64
	for b.Loop() {
		b.StopTimer()
		before := heap()
		b.StartTimer()
		l, stop := bigLoop(b, &paper{}, parts)
		b.StopTimer()
		bytes += heap() - before
		stop()
		runtime.KeepAlive(l)
		b.StartTimer()
	}
	facts := float64(b.N) * services * factsPer
	b.ReportMetric(float64(bytes)/facts, "bytes/fact")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/facts, "ns/fact")
}

// BenchmarkRender is the floor under BenchmarkStart.
func BenchmarkRender(b *testing.B) {
	parts, p := bigParts(), &paper{}
	for b.Loop() {
		for _, part := range parts {
			p.Render(part)
		}
	}
}

// BenchmarkRestart finds everything held.
func BenchmarkRestart(b *testing.B) {
	parts, p := bigParts(), &paper{}
	for _, part := range parts {
		p.facts = append(p.facts, p.Render(part)...)
	}
	for b.Loop() {
		l, stop := bigLoop(b, p, parts)
		stop()
		if l.Status().Writes > 0 {
			b.Fatal("a restart writes")
		}
	}
}

// changeOne changes one fact of part i and waits for it.
func changeOne(b *testing.B, l *Loop[*bigPart, bigKey, string], parts []*bigPart, i int) {
	i %= services
	old := parts[i]
	parts[i] = &bigPart{old.number, old.version + 1}
	l.Change(parts[i:i+1], []*bigPart{old})
	_ = l.Sync(context.Background())
}

// BenchmarkChange changes one fact among all the others.
func BenchmarkChange(b *testing.B) {
	parts := bigParts()
	l, stop := bigLoop(b, &paper{}, parts)
	defer stop()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		changeOne(b, l, parts, i)
	}
}

// BenchmarkChangeBesideFailure is the same while the kernel refuses a fact of another part.
func BenchmarkChangeBesideFailure(b *testing.B) {
	parts := bigParts()
	refused := &bigPart{number: services}
	l, stop := bigLoop(b, &paper{refuses: refused.number}, append(parts, refused))
	defer stop()
	for i := 0; b.Loop(); i++ {
		changeOne(b, l, parts, i)
	}
}

// BenchmarkSyncOwner waits for the parts of one owner of 75,000, which are in the kernel.
func BenchmarkSyncOwner(b *testing.B) {
	parts := make([]*bigPart, 75_000)
	for i := range parts {
		parts[i] = &bigPart{number: uint32(i)}
	}
	l, stop := bigLoop(b, &paper{}, parts)
	defer stop()
	for i := 0; b.Loop(); i++ {
		if err := l.SyncOwner(b.Context(), model.Owner{Name: fmt.Sprint(i % len(parts))}); err != nil {
			b.Fatal(err)
		}
	}
}
