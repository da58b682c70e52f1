package test_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/kernel/netns"
)

// fewEngines are the policy engines that TestPolicyEngineChanges goes through: each follows each other once.
var fewEngines = []string{"nftables", "ebpf", "iptables", "nftables", "iptables", "ebpf", "nftables"}

// engineChanges is what clients of the shop's database see while the policy engine changes.
type engineChanges struct {
	t         *testing.T
	box, file string
	now       atomic.Pointer[string] // the change that is under way
	denied    atomic.Int64           // connections that were refused an answer
	allowed   atomic.Int64           // answers to what is allowed
	mu        sync.Mutex
	failures  []string
}

// The policy engine of running agents changes under traffic: the one before goes when the next is in place. So no
// connection that policies deny is ever answered, and none that they allow fails, new or open.
func TestPolicyEngineChanges(t *testing.T) {
	for _, mode := range []string{"nftables", "ebpf"} {
		t.Run(mode, func(t *testing.T) {
			c := &engineChanges{t: t, file: filepath.Join(t.TempDir(), "fairlead.yaml")}
			c.configure(fewEngines[0])
			c.box, _ = boxOf(t, []string{"--network", "wires"}, "--config", c.file, "--mode", mode)
			c.inForce(fewEngines[0])
			ctx, stop := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() { c.within(ctx, "client", c.forbidden) })
			running.Go(func() { c.within(ctx, "web-2", c.fresh) })
			running.Go(func() { c.within(ctx, "web-2", c.open) })
			for i, e := range fewEngines[1:] {
				what := fewEngines[i] + " → " + e
				c.now.Store(&what)
				c.configure(e)
				c.inForce(e)
				c.progress()
			}
			stop()
			running.Wait()
			t.Logf("%d connections denied, %d answers", c.denied.Load(), c.allowed.Load())
			for _, f := range c.failures[:min(len(c.failures), 20)] {
				t.Error(f)
			}
		})
	}
}

// configure has the agents' configuration name an engine.
func (c *engineChanges) configure(engine string) {
	c.t.Helper()
	c.now.CompareAndSwap(nil, &engine)
	text := "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\n" +
		"policy: {mode: Enforce, engine: " + engine + "}\n"
	err := os.WriteFile(c.file+".new", []byte(text), 0o644)
	if err = errors.Join(err, os.Rename(c.file+".new", c.file)); err != nil {
		c.t.Fatal(err)
	}
}

// inForce waits until both nodes' agents are ready with an engine, and nothing is left of that before.
func (c *engineChanges) inForce(engine string) {
	c.t.Helper()
	for _, node := range []string{"a", "b"} {
		eventually(c.t, "engine "+engine+" is in force", func() bool {
			var s agent.State
			return json.Unmarshal([]byte(status(c.t, c.box, node)), &s) == nil && s.Ready && s.Policies != nil &&
				s.Policies.Engine == engine && policyTable(c.t, c.box, node) == (engine == "nftables")
		})
	}
}

// progress waits until each client has tried often enough from now on.
func (c *engineChanges) progress() {
	c.t.Helper()
	denied, allowed := c.denied.Load(), c.allowed.Load()
	eventually(c.t, "the clients go on", func() bool {
		return c.denied.Load() > denied+20 && c.allowed.Load() > allowed+20
	})
}

// within has a pod of the shop do something until ctx ends.
func (c *engineChanges) within(ctx context.Context, pod string, do func(ctx context.Context) error) {
	ns, err := netns.Open(c.box + "-pod-shop." + pod)
	if err == nil {
		err = errors.Join(ns.Do(func() error { return do(ctx) }), ns.Close())
	}
	if err != nil {
		c.fail(err)
	}
}

func (c *engineChanges) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failures = append(c.failures, *c.now.Load()+": "+err.Error())
}

// forbidden opens connections that are denied. An answer would come within a fraction of the time that it waits.
func (c *engineChanges) forbidden(ctx context.Context) error {
	for ctx.Err() == nil {
		conn, err := (&net.Dialer{Timeout: 5 * time.Millisecond}).Dial("tcp", database)
		if err == nil {
			conn.Close()
			return errors.New("a connection that policies deny was accepted")
		}
		c.denied.Add(1)
	}
	return nil
}

// fresh opens one connection that is allowed after the other.
func (c *engineChanges) fresh(ctx context.Context) error {
	for ctx.Err() == nil {
		conn, err := net.DialTimeout("tcp", database, replyTimeout)
		if err == nil {
			err = errors.Join(c.exchange(conn), conn.Close())
		}
		if err != nil {
			return fmt.Errorf("a new connection: %w", err)
		}
	}
	return nil
}

// open has a connection for each change so far, and uses all of them in turn.
func (c *engineChanges) open(ctx context.Context) (err error) {
	open := map[string]net.Conn{}
	for ctx.Err() == nil {
		if since := *c.now.Load(); open[since] == nil {
			if open[since], err = net.DialTimeout("tcp", database, replyTimeout); err != nil {
				return fmt.Errorf("a connection to be kept: %w", err)
			}
			defer open[since].Close()
		}
		for since, conn := range open {
			if err := c.exchange(conn); err != nil {
				return fmt.Errorf("open since %s: %w", since, err)
			}
		}
	}
	return nil
}

// exchange sends a line by a connection and reads the answer.
func (c *engineChanges) exchange(conn net.Conn) error {
	conn.SetDeadline(time.Now().Add(replyTimeout))
	if _, err := io.WriteString(conn, "?\n"); err != nil {
		return err
	}
	b := make([]byte, 1024)
	n, err := conn.Read(b)
	if err == nil && !strings.Contains(string(b[:n]), "shop/db") {
		err = fmt.Errorf("the answer is %q", b[:n])
	}
	if err == nil {
		c.allowed.Add(1)
	}
	return err
}
