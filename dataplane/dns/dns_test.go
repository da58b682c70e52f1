package dns

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

func TestKernelHoldsWhatIsWritten(t *testing.T) {
	for _, held := range []bool{true, false} {
		netnstest.With(t, New, func(p *Plane) {
			if !p.Held() {
				t.Error("this kernel has NFQUEUE, and it isn't used")
			}
			if !held {
				p.Copy()
			}
			var all []Fact
			for _, x := range []Part{{netip.MustParseAddr("10.0.0.1"), 0}, {netip.MustParseAddr("fd00::1"), 0},
				{netip.MustParseAddr("10.0.0.10"), 53}, {netip.MustParseAddr("fd00::10"), 5353}} {
				for _, f := range p.Render(x) {
					if !slices.ContainsFunc(all, f.Equal) {
						all = append(all, f)
					}
				}
			}
			ctx := context.Background()
			if err := p.Write(ctx, all, nil); err != nil {
				t.Error(err)
			}
			got, err := p.Read(ctx)
			if err != nil || len(got) != len(all) {
				t.Errorf("%d facts, %v; want %d", len(got), err, len(all))
			}
			for _, f := range all {
				if !slices.ContainsFunc(got, f.Equal) {
					t.Errorf("missing %v", f.Key)
				}
			}
			if err := p.Clean(ctx); err != nil {
				t.Error(err)
			}
			if got, err := p.Read(ctx); len(got) > 0 || err != nil {
				t.Errorf("%v, %v after Clean", got, err)
			}
		})
	}
}

func TestRecordsOutliveTheirWriter(t *testing.T) {
	netnstest.Do(t, func() {
		p, err := New()
		if err != nil {
			t.Error(err)
			return
		}
		if l, err := p.Records(); len(l) > 0 || err != nil {
			t.Errorf("without a table: %v, %v", l, err)
		}
		a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
		l := []Record{{"a.example.com", a, time.Hour}, {"b.example.com", a, time.Minute}, {"a.example.com", b, time.Hour}}
		if err := p.Write(context.Background(), p.Render(Part{a, 0}), nil); err != nil {
			t.Error(err)
		}
		for range 2 {
			if err := p.SetRecords(l); err != nil {
				t.Error(err)
			}
		}
		p.Close()
		if p, err = New(); err != nil {
			t.Error(err)
			return
		}
		defer p.Close()
		got, err := p.Records()
		if err != nil || len(got) != len(l) {
			t.Errorf("%v, %v", got, err)
		}
		for _, want := range l {
			if !slices.ContainsFunc(got, func(r Record) bool {
				return r.Name == want.Name && r.Addr == want.Addr && r.TTL > want.TTL/2 && r.TTL <= want.TTL
			}) {
				t.Errorf("%v is not among %v", want, got)
			}
		}
	})
}
