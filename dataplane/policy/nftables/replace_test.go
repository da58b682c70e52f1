package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/nft"
	"fairlead.dev/fairlead/dataplane/policy/policytest"
	kernel "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// refusing is the plane in a kernel that refuses a fact.
type refusing struct {
	*Plane
	key atomic.Pointer[Key] // nil: none
}

func (r *refusing) refuses(put []Fact) error {
	k := r.key.Load()
	if k != nil && slices.ContainsFunc(put, func(f Fact) bool { return f.Key == *k }) {
		return errors.New("no space left on device")
	}
	return nil
}

// Write implements dataplane.Plane.
func (r *refusing) Write(ctx context.Context, put, del []Fact) error {
	if err := r.refuses(put); err != nil {
		return err
	}
	return r.Plane.Write(ctx, put, del)
}

// Check implements dataplane.Checker.
func (r *refusing) Check(ctx context.Context, put, del []Fact) error {
	return errors.Join(r.refuses(put), r.Plane.Check(ctx, put, del))
}

// stream sends datagrams that policies deny from the client to web until ctx ends, and returns how many have come.
func stream(ctx context.Context, n *policytest.Network, running *sync.WaitGroup) *atomic.Int64 {
	var came atomic.Int64
	to := net.UDPAddr{IP: policytest.Behind[0][0].AsSlice(), Port: 9999}
	var receiver, sender *net.UDPConn
	n.Must(n.Of[policytest.Behind[0][0]].Do(func() (err error) {
		receiver, err = net.ListenUDP("udp4", &to)
		return err
	}))
	n.Must(n.Of[policytest.Behind[2][0]].Do(func() (err error) {
		sender, err = net.DialUDP("udp4", nil, &to)
		return err
	}))
	running.Go(func() {
		for b := make([]byte, 1); ; came.Add(1) {
			if _, err := receiver.Read(b); err != nil {
				return
			}
		}
	})
	running.Go(func() {
		for every := time.NewTicker(100 * time.Microsecond); ctx.Err() == nil; <-every.C {
			sender.Write([]byte("x"))
		}
		sender.Close()
		receiver.Close()
	})
	return &came
}

// A table that is made anew, of which the kernel refuses a fact: the former one is in force until all else is written,
// and until everything can be where all policies need that fact. No packet passes that both deny.
func TestRefusedFactLeavesTheFormerTable(t *testing.T) {
	for _, base := range []bool{false, true} {
		t.Run(fmt.Sprint("base ", base), func(t *testing.T) { refusedAnew(t, base) })
	}
}

func refusedAnew(t *testing.T, base bool) {
	n := policytest.NewNetwork(t)
	p := open(n)
	_, objects := policytest.Worlds(t)
	d := policytest.Decide(objects["end-port.yaml"])
	wanted := policytest.Facts(t, p, d.Parts())
	former := *p.table
	former.Flags = 0
	n.Must(former.Write(p.conn, slices.Collect(maps.Values(wanted)), nil))
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	came := stream(ctx, n, &running)
	r := &refusing{Plane: p}
	for k := range wanted {
		if base && k.Key == (nft.Key{Kind: nft.KindChain, Name: "ingress4-last"}) || !base &&
			k.Kind == nft.KindElement && k.Name == setDecision {
			r.key.Store(&k)
		}
	}
	l := reconcile.New(r, reconcile.Options[model.PolicyPart]{Owner: model.PolicyOwnerOf, Label: model.PolicyLabelOf,
		Base:     func(p model.PolicyPart) bool { _, is := p.(*model.PolicyNode); return is },
		StandIns: model.FailClosed, Backoff: func(int) time.Duration { return time.Millisecond }})
	looping, halt := context.WithCancel(ctx)
	var loop sync.WaitGroup
	loop.Go(func() { l.Run(looping) })
	l.Change(d.Parts(), nil)
	if err := l.Sync(ctx); err == nil || !strings.Contains(err.Error(), fmt.Sprint(*r.key.Load())) {
		t.Errorf("%v is refused, and Sync returns %v", *r.key.Load(), err)
	}
	for base && l.Status().Failures < 10 && ctx.Err() == nil { // however often it is tried
		time.Sleep(time.Millisecond)
	}
	if flags, there, err := p.conn.FlagsOf(Table); !there || err != nil || (flags&kernel.Persistent == 0) != base {
		t.Errorf("flags %#x, %v: want the former table: %t", flags, err, base)
	}
	r.key.Store(nil)
	for l.Check(ctx) != nil && ctx.Err() == nil {
	}
	if missing, extra := policytest.Read(t, p, wanted); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
	if k := came.Load(); k > 0 {
		t.Errorf("%d denied datagrams passed", k)
	}
	halt()
	loop.Wait()
	n.Must(p.Clean(ctx))
	for end := time.Now().Add(10 * time.Second); came.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no datagram comes without policies: the test sees nothing")
		}
	}
}
