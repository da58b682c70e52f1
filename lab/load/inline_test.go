package load

import (
	"net/netip"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A client and a server of one thread exchange what they would with one each, by the number of operations.
func TestInline(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Fatal("exact counts need amd64")
	}
	sizes := Sizes{Request: 100, Response: 1000}
	s, err := ServeInline(ServerConfig{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, Sizes: sizes,
		ID: 7})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, op := range []Op{Connect, CRR, RR} {
		traced := 0
		c := Client{Targets: s.Addrs, Sizes: sizes, Exact: &Exact{Server: s, Warm: 3, Ops: 11, Traced: 2,
			Trace: func(mark uintptr, f func() error) error {
				traced++
				if mark == 0 {
					t.Error("no mark")
				}
				return f()
			}}}
		got, err := c.Run(t.Context(), op, time.Nanosecond) // which bounds nothing
		if err != nil || got.Ops != 11 || got.Failed() > 0 || got.Answers[7] != 11 || got.Quantiles["min"] <= 0 {
			t.Errorf("%s: %+v, %v", op, got, err)
		}
		if traced != 1 {
			t.Errorf("%s: traced %d times", op, traced)
		}
	}
	stale, err := (&loop{Client: Client{Timeout: time.Second}}).socket(sockaddr(s.Addrs[0])) // waits to be accepted
	if err != nil || connect(stale, sockaddr(s.Addrs[0])) != nil || unix.Close(stale) != nil {
		t.Fatal(err)
	}
	if got, err := (Client{Targets: s.Addrs, Sizes: sizes, Exact: &Exact{Server: s, Ops: 5}}).Run(t.Context(), CRR,
		0); err != nil || got.Ops != 4 || got.Failed() != 1 {
		t.Errorf("after another's connection: %+v, %v", got, err)
	}
	stream := Client{Targets: s.Addrs, Sizes: sizes, Exact: &Exact{Server: s}}
	if _, err := stream.Run(t.Context(), Stream, 0); err == nil {
		t.Error("a stream is counted")
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if got, err := (Client{Targets: s.Addrs, Sizes: sizes, Exact: &Exact{Server: s, Ops: 3}}).Run(t.Context(), CRR,
		0); err != nil || got.Ops > 0 || got.Failed() != 3 {
		t.Errorf("without a server: %+v, %v", got, err)
	}
}

// A run ends with the first operation that is few enough, where one ends it.
func TestRunEndsWithFew(t *testing.T) {
	for few, want := range map[int64]int{0: 10, 4: 10, 5: 3, 9: 1} {
		n := 0
		l := &loop{Client: Client{Exact: &Exact{}}, rec: newRecorder(10), few: few}
		l.do = func(*loop) (start, end time.Duration, err error) {
			n++
			return 0, time.Duration(max(5, 8-n)), nil // 7, 6, 5, 5, ...
		}
		if l.run(t.Context(), exactly, 10); n != want {
			t.Errorf("until one takes %d: %d operations, want %d", few, n, want)
		}
	}
}
