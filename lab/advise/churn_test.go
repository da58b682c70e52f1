package advise

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/source"
)

// scripted is a source that delivers batches a second apart, and then ends or waits.
type scripted struct {
	batches []source.Batch
	err     error
}

func (s scripted) Run(ctx context.Context, deliver func(source.Batch)) error {
	for _, b := range s.batches {
		time.Sleep(time.Second)
		deliver(b)
	}
	if s.err == nil {
		<-ctx.Done()
	}
	return s.err
}

// Only what changes after all was there counts, and of that only endpoints.
func TestChurn(t *testing.T) {
	changes := func(kinds ...source.Kind) (b source.Batch) {
		for _, k := range kinds {
			b.Changes = append(b.Changes, source.Change{Key: source.Key{Kind: k}})
		}
		return b
	}
	slice := source.EndpointSlice
	for name, c := range map[string]struct {
		scripted
		want float64
		says string
	}{
		"some": {scripted{[]source.Batch{{Waiting: true}, changes(slice, slice), changes(slice, source.Pod), changes(slice)},
			nil}, 0.25, "changed 2 times in the 8s"},
		"none":      {scripted{[]source.Batch{changes(slice, slice)}, nil}, 0, "changed 0 times in the 9s"},
		"never":     {scripted{[]source.Batch{{Waiting: true}}, nil}, 7, "the API server did not deliver them in time"},
		"at an end": {scripted{nil, errors.New("no such file")}, 7, "(no such file)"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				x := &churn{from: c.scripted}
				stop := x.follow(t.Context())
				time.Sleep(10 * time.Second)
				synctest.Wait()
				got, text := x.rate(time.Now(), 7)
				if got != c.want || !strings.Contains(text, c.says) || !strings.Contains(text, "--changes") {
					t.Errorf("%v: %s", got, text)
				}
				stop()
			})
		})
	}
}
