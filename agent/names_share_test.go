package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// flooded is how many queries a pod has sent by each socket before another one's count: many times its share.
const flooded = 50_000

// TestFloodOfQueriesLosesNoAnswerOfAnotherPod: while a pod sends queries as fast as it can, each answer to another pod
// comes, and its addresses are open by then.
func TestFloodOfQueriesLosesNoAnswerOfAnotherPod(t *testing.T) {
	for _, c := range []struct{ family, sink, resolver string }{{"IPv4", "10.244.1.66:53", "10.244.1.53:5353"},
		{"IPv6", "[fd00:10:244:1::66]:53", "[fd00:10:244:1::53]:5353"}} {
		t.Run(c.family, func(t *testing.T) {
			b := newNamesBed(t, "nftables", "nftables")
			b.resolvers = []netip.AddrPort{netip.MustParseAddrPort(c.sink), netip.MustParseAddrPort(c.resolver)}
			b.start()
			defer b.flood(c.sink)()
			for i := range 20 {
				name, address := fmt.Sprintf("n%d.example.com", i), fmt.Sprintf("192.0.2.%d", 100+i)
				b.set(name, record{address, 30})
				if !b.queryWithin(packetWithin, "client", "udp", c.resolver, name, dnsmessage.TypeA) {
					b.Errorf("no answer about %s", name)
				} else if b.dial("client", "tcp", address+":80") == nil {
					b.Errorf("the first packet to %s was dropped", name)
				}
			}
		})
	}
}

// flood has a pod send queries to a resolver as fast as it can, from two sockets, until the function that it returns is
// called. It returns once so many are sent that another pod's may count.
func (b *namesBed) flood(to string) (end func()) {
	b.Helper()
	m := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: 1, RecursionDesired: true})
	b.must(errors.Join(m.StartQuestions(), m.Question(dnsmessage.Question{Name: dnsmessage.MustNewName("f.example.com."),
		Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET})))
	query, err := m.Finish()
	b.must(err)
	var stop atomic.Bool
	var full, ended sync.WaitGroup
	for range 2 {
		c := b.dial("flood", "udp", to)
		if c == nil {
			b.Fatalf("no socket to %s", to)
		}
		full.Add(1)
		ended.Go(func() {
			defer c.Close()
			for i := 0; !stop.Load(); i++ {
				if c.Write(query); i == flooded {
					full.Done()
				}
			}
		})
	}
	full.Wait()
	return func() {
		stop.Store(true)
		ended.Wait()
	}
}
