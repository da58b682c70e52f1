package paths

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"fairlead.dev/fairlead/dataplane/network/route"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// redirected is the metric of packets that the fast path redirects.
const redirected = `fairlead_packets_total{outcome="handed_over"}`

// checked is how many connections are made to count where their packets go.
const checked = 50

// counts are how many packets went where in an arm.
type counts struct {
	redirected []float64 // by the fast path of each node with an agent
	tunnel     float64   // through the tunnel of the server's node
	tracked    int       // connections, on the server's node
}

// check makes connections in every arm and records where their packets went. An arm that is not what it is said to be
// is an error.
func (r *trial) check(ctx context.Context, round int) error {
	for i, a := range r.arms {
		p := r.bed.Pairs[i]
		before, err := r.count(a, p)
		if err == nil {
			err = r.connect(ctx, p)
		}
		if err != nil {
			return fmt.Errorf("check how packets of %s go: %w", a.Title, err)
		}
		after, err := r.count(a, p)
		if err != nil {
			return fmt.Errorf("check how packets of %s go: %w", a.Title, err)
		}
		sum := 0.0
		for k := range after.redirected {
			sum += after.redirected[k] - before.redirected[k]
		}
		block := result.Block{Arm: a.ID, Round: round}
		err = errors.Join(r.judge(a, before, after), r.out.AddValue(block, "redirected", sum/checked),
			r.out.AddValue(block, "tunnel", (after.tunnel-before.tunnel)/checked))
		if err != nil {
			return err
		}
	}
	return nil
}

// connect makes the connections.
func (r *trial) connect(ctx context.Context, p *testbed.Pair) error {
	c := r.client(p, 0)
	c.Most = checked
	if c.Exact != nil {
		e := *c.Exact
		e.Warm, e.Ops, c.Exact = 0, checked, &e
	}
	s, err := c.Run(ctx, load.CRR, time.Minute)
	if err == nil && s.Ops != checked {
		err = fmt.Errorf("%d connections instead of %d: %v", s.Ops, checked, s.Errors)
	}
	return err
}

// judge returns an error for an arm that is not what it is said to be.
func (r *trial) judge(a arm, before, after counts) (err error) {
	wrong := func(format string, args ...any) {
		err = errors.Join(err, fmt.Errorf("%s: of %d connections %s", a.Title, checked, fmt.Sprintf(format, args...)))
	}
	for k, own := range a.owners() {
		n, name := after.redirected[k]-before.redirected[k], r.nodes[a.ID][k].Pair.Near.Name
		if a.redirects(own) && n < checked || !a.redirects(own) && after.redirected[k] > 0 {
			wrong("%s redirected %v packets, %v in all", name, n, after.redirected[k])
		}
	}
	if n := after.tunnel - before.tunnel; a.tunnel && n < checked || !a.tunnel && n > 0 {
		wrong("%v packets went through a tunnel", n)
	}
	if a.tracked != (after.tracked > 0) {
		wrong("%d are tracked", after.tracked)
	}
	had, failed := r.excludeWires(a)
	if len(had) > 0 {
		failed = fmt.Errorf("%s: the wire of %q was a pod's device to the fast path again", a.Title, had)
	}
	return errors.Join(err, failed)
}

// count returns how many packets went where until now.
func (r *trial) count(a arm, p *testbed.Pair) (c counts, err error) {
	for _, n := range r.nodes[a.ID] {
		v, err := n.Metric(redirected)
		if err != nil {
			return c, err
		}
		c.redirected = append(c.redirected, v)
	}
	if c.tracked, err = p.Tracked(); err != nil {
		return c, err
	}
	var text []byte
	err = p.Near.Do(func() error {
		text, err = os.ReadFile("/proc/thread-self/net/dev")
		return err
	})
	c.tunnel = passed(string(text))
	return c, err
}

// passed returns how many packets tunnels have received and sent, by a text like that of /proc/net/dev.
func passed(text string) (n float64) {
	for line := range strings.Lines(text) {
		name, numbers, _ := strings.Cut(strings.TrimSpace(line), ":")
		f := strings.Fields(numbers)
		if name != route.Device && name != route.IPIPDevice || len(f) < 10 {
			continue
		}
		for _, column := range []int{1, 9} {
			v := 0.0
			fmt.Sscan(f[column], &v)
			n += v
		}
	}
	return n
}
