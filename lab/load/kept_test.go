package load

import (
	"net/netip"
	"slices"
	"testing"
	"time"
)

// An open loop with kept connections opens one for every so many requests, whoever closes it.
func TestPersistentConnections(t *testing.T) {
	for _, end := range []Close{Reset, Fin} {
		p := Thread{Enter: namespace(t)}
		sizes := Sizes{20, 300}
		srv := serve(t, p, sizes, 7, "127.0.0.1:0")
		o := Open{Thread: p, Targets: srv.Addrs, Sizes: sizes, Close: end, Rate: 100, Each: 5, Work: 20 * time.Microsecond}
		s, tr, err := o.Run(t.Context(), 300*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if tr.Intended != 30 || s.Ops != 30 || s.Failed() != 0 || srv.Served() != 30 {
			t.Errorf("%s: %d intended, %d done, %d served, errors %v", end, tr.Intended, s.Ops, srv.Served(), s.Errors)
		}
		// More only where a request began before the last one's answer was there.
		if n := srv.Accepted(); n < 6 || n > 20 {
			t.Errorf("%s: %d connections for 30 requests, five on each", end, n)
		}
		if s.CPU.User+s.CPU.System < 30*20*time.Microsecond {
			t.Errorf("%s: 30 × 20 µs of work took %v", end, s.CPU.User+s.CPU.System)
		}
	}
}

func TestWarmingIsForgotten(t *testing.T) {
	p := Thread{Enter: namespace(t)}
	sizes := Sizes{1, 1}
	srv := serve(t, p, sizes, 7, "127.0.0.1:0")
	s, tr, err := Open{Thread: p, Targets: srv.Addrs, Sizes: sizes, Close: Fin, Rate: 1000,
		Warm: 50 * time.Millisecond}.Run(t.Context(), 30*time.Millisecond)
	if err != nil || tr.Intended != 30 || s.Ops != 30 || srv.Served() != 80 {
		t.Errorf("%d intended, %d done, %d served: %v", tr.Intended, s.Ops, srv.Served(), err)
	}
}

// A client keeps what it is told to keep, in order, ends after so many operations, and comes from its sources in turn.
func TestClientRecordsTimes(t *testing.T) {
	p := Thread{Enter: namespace(t)}
	sizes := Sizes{1, 1}
	srv := serve(t, p, sizes, 7, "127.0.0.1:0")
	c := Client{Thread: p, Targets: srv.Addrs, Sizes: sizes, Sources: []netip.Addr{netip.MustParseAddr("127.0.0.2"),
		netip.MustParseAddr("127.0.0.3")}, Most: 50, Record: true, Warm: time.Millisecond}
	s, err := c.Run(t.Context(), CRR, time.Minute)
	if err != nil || s.Ops != 50 || len(s.Times) != 50 || len(s.Said) != 50 || s.Failed() != 0 {
		t.Fatalf("%d done, %d times, %d answers, errors %v: %v", s.Ops, len(s.Times), len(s.Said), s.Errors, err)
	}
	if slices.IsSorted(s.Times) {
		t.Error("times are not in the order in which they came")
	}
	c.Sources = []netip.Addr{netip.MustParseAddr("192.0.2.1")} // of no host
	if s, err := c.Run(t.Context(), CRR, 20*time.Millisecond); err != nil || s.Ops > 0 || s.Failed() == 0 {
		t.Errorf("from an address that is not ours: %d done, %v, %v", s.Ops, s.Errors, err)
	}
}

func TestStream(t *testing.T) {
	p := Thread{Enter: namespace(t)}
	sizes := Sizes{5 << 20, 1} // longer than any buffer, and no multiple of the client's
	srv := serve(t, p, sizes, 7, "127.0.0.1:0")
	s, err := Client{Thread: p, Targets: srv.Addrs, Sizes: sizes, Most: 3}.Run(t.Context(), Stream, time.Minute)
	if err != nil || s.Ops != 3 || srv.Served() != 4 || // one to warm the path
		srv.Accepted() != 1 || s.Failed() != 0 {
		t.Errorf("%d done, %d served on %d connections, errors %v: %v", s.Ops, srv.Served(), srv.Accepted(), s.Errors, err)
	}
}

// Words of others: what a server of another kind understands, and answers of another length where it closes.
func TestWords(t *testing.T) {
	p := Thread{Enter: namespace(t)}
	srv := serve(t, p, Sizes{3, 8}, 7, "127.0.0.1:0")
	w := &Words{Persist: []byte("kay"), Bye: []byte("cya"), Persisted: 8, Byed: 8}
	for _, each := range []int{1, 4} {
		s, _, err := Open{Thread: p, Targets: srv.Addrs, Sizes: sizes(1), Words: w, Close: Fin, Rate: 400,
			Each: each}.Run(t.Context(), 50*time.Millisecond)
		if err != nil || s.Ops != 20 || s.Failed() != 0 {
			t.Errorf("%d on a connection: %d done, %v: %v", each, s.Ops, s.Errors, err)
		}
	}
}

func sizes(n int) Sizes { return Sizes{n, n} }
