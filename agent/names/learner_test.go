package names

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// An answer teaches its addresses, held or copied. One that is held comes when they are in force, or late where that
// takes too long.
func TestLearner(t *testing.T) {
	for _, c := range []struct {
		name         string
		copied, slow bool
	}{{"held", false, false}, {"copied", true, false}, {"slow", false, true}} {
		t.Run(c.name, func(t *testing.T) {
			netnstest.Do(t, func() {
				for _, args := range [][]string{{"link", "set", "lo", "up"}, {"address", "add", "10.0.0.1", "dev", "lo"},
					{"address", "add", "10.0.0.2", "dev", "lo"}} {
					if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
						t.Errorf("%v: %s", err, out)
					}
				}
				if err := learn(t, c.copied, c.slow); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// learn has a pod query a resolver, both in the calling thread's namespace.
func learn(t *testing.T, copied, slow bool) error {
	ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
	defer stop()
	applied, received := make(chan source.Change, 1), make(chan struct{})
	l, err := Open(Options{Copied: copied, Log: slog.New(slog.DiscardHandler),
		Apply: func(ctx context.Context, changes []source.Change) {
			if slow {
				<-received
			}
			applied <- changes[0]
		}})
	if err != nil {
		return err
	}
	defer l.Close()
	pod, resolver := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddrPort("10.0.0.2:53")
	table := &model.PeerTable{Rules: []model.Rule{{Peers: []*model.Peers{{Domain: "*.example.com"}}}}}
	rules := &model.Ruleset{Default: model.PortEntry{PeerTable: table}}
	subject := []model.PolicyPart{&model.Subject{Addr: pod, Out: [model.PolicyStages]*model.Ruleset{rules}}}
	l.SetResolvers([]netip.AddrPort{resolver})
	l.Follow(model.Change[model.PolicyPart]{Put: subject})
	server, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(resolver))
	if err != nil {
		return err
	}
	defer server.Close()
	client, err := net.DialUDP("udp4", &net.UDPAddr{IP: pod.AsSlice()}, net.UDPAddrFromAddrPort(resolver))
	if err != nil {
		return err
	}
	defer client.Close()
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	if err := l.Sync(ctx); err != nil {
		return err
	}
	if _, err := client.Write(built(t, dnsmessage.Header{ID: 7}, "a.example.com.", 0)); err != nil {
		return err
	}
	b := make([]byte, 512)
	_, from, err := server.ReadFromUDPAddrPort(b)
	if err == nil {
		_, err = server.WriteToUDPAddrPort(built(t, dnsmessage.Header{ID: 7, Response: true}, "a.example.com.", 30,
			"a.example.com.", "192.0.2.1"), from)
	}
	if err == nil {
		_, err = client.Read(b)
	}
	if err != nil {
		return err
	}
	if !copied && !slow && len(applied) == 0 {
		t.Error("the answer has come before its addresses were in force")
	}
	close(received)
	select {
	case c := <-applied:
		if o, ok := c.Object.(*source.ResolvedName); !ok || c.Key.Name != "a.example.com" ||
			!slices.Equal(o.Addresses, []netip.Addr{netip.MustParseAddr("192.0.2.1")}) {
			t.Errorf("%+v", c)
		}
	case <-ctx.Done():
		return errors.New("nothing was learned")
	}
	n := l.Counts().Answers
	if n[taught] != 1 || n[unsolicited] != 0 || (n[late] == 1) != slow {
		t.Errorf("%v", n)
	}
	l.Follow(model.Change[model.PolicyPart]{Del: subject})
	l.SetResolvers([]netip.AddrPort{resolver, netip.MustParseAddrPort("10.0.0.3:53")})
	if err := l.Sync(ctx); err != nil {
		return err
	}
	if tables, err := exec.Command("nft", "list", "tables").CombinedOutput(); err != nil || len(tables) > 0 {
		t.Errorf("no rule names a domain name any more, but there is %s (%v)", tables, err)
	}
	stop()
	return <-ended
}
