package load

import (
	"net/netip"
	"testing"
	"time"
)

// A server that is to work takes its time before each answer.
func TestServerWorks(t *testing.T) {
	const cpu = 2 * time.Millisecond
	w, err := MeasureWork(Thread{}, cpu)
	if err != nil || w.Steps == 0 {
		t.Fatal(w, err)
	}
	sizes := Sizes{Request: 1, Response: 1}
	s, err := Serve(ServerConfig{Sizes: sizes, Work: w, Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	sample, err := Client{Targets: s.Addrs, Sizes: sizes, Most: 5}.Run(t.Context(), RR, time.Minute)
	if err != nil || sample.Ops != 5 || sample.Quantiles["min"] < float64(cpu/2) {
		t.Errorf("%d answers, the fastest after %v ns: %v", sample.Ops, sample.Quantiles["min"], err)
	}
}
