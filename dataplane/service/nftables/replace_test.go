package nftables

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	table "fairlead.dev/fairlead/dataplane/nft"
	"fairlead.dev/fairlead/dataplane/service/servicetest"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
)

// TestTableOfAnotherLayoutIsReplacedUnderTraffic has a table of another layout replaced again and again, in one
// transaction each, while 5,000 connections are opened to a Service, one after another. One is lost in a hundred times
// at most: the kernel may replace the table in the middle of its first packet's evaluation.
func TestTableOfAnotherLayoutIsReplacedUnderTraffic(t *testing.T) {
	const connections = 5000
	server, entry := netip.MustParseAddrPort("10.1.0.1:8080"), netip.MustParseAddrPort("10.96.0.1:80")
	ns := netnstest.New(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	c, err := link.Dial(ns)
	must(err)
	defer c.Close()
	must(errors.Join(c.Up(1), c.AddAddress(1, netip.PrefixFrom(server.Addr(), 32)),
		c.AddAddress(1, netip.PrefixFrom(entry.Addr(), 32))))
	var l net.Listener
	var p *Plane
	must(ns.Do(func() (err error) {
		if l, err = net.Listen("tcp4", server.String()); err == nil {
			p, err = New()
		}
		return err
	}))
	defer p.Close()
	var running sync.WaitGroup
	defer running.Wait()
	defer l.Close()
	running.Go(func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			running.Go(func() {
				io.Copy(io.Discard, c)
				c.Close()
			})
		}
	})
	pool := &model.Pool{ID: 7, Name: "p", Protocol: model.TCP, Backends: []model.Backend{{Addr: server}}}
	to := model.Target{Pool: pool}
	parts := []model.ServicePart{&model.ServiceNode{Node: &model.Node{Name: "a"}}, pool, &model.Frontend{
		Entry: model.Entry{Addr: entry.Addr(), Port: entry.Port(), Protocol: model.TCP}, Internal: to, External: to}}
	wanted := servicetest.Facts(t, p, parts)
	must(p.Write(t.Context(), wanted, nil))
	held := append([]Fact(nil), wanted...)
	for i, f := range held {
		if f.Key.Kind == table.KindTable {
			held[i].Value = "another layout"
		}
	}
	stop := make(chan struct{})
	replaced := 0
	running.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			before, err := p.conn.Generation()
			err = errors.Join(err, p.Write(t.Context(), wanted, held))
			after, err2 := p.conn.Generation()
			if err = errors.Join(err, err2); err != nil || after != before+1 {
				t.Errorf("%d transactions, %v", after-before, err)
			}
			replaced++
		}
	})
	lost := 0
	for range connections {
		must(ns.Do(func() error {
			c, err := (&net.Dialer{Timeout: 900 * time.Millisecond}).Dial("tcp4", entry.String())
			if err != nil {
				lost++
				t.Log(err)
				return nil
			}
			c.(*net.TCPConn).SetLinger(0) // so that its port isn't in use for a minute
			return c.Close()
		}))
	}
	close(stop)
	l.Close()
	running.Wait()
	if lost*100 > replaced || replaced == 0 {
		t.Errorf("the table was replaced %d times, and %d of %d connections were lost", replaced, lost, connections)
	}
	if now, err := p.Read(t.Context()); err != nil || len(servicetest.Difference(wanted, now)) > 0 {
		t.Errorf("missing %v, %v", servicetest.Difference(wanted, now), err)
	}
}
