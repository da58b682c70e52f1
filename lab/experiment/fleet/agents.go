package fleet

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"net"
	"net/http"
	"path"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// traffic counts what one agent's connections carry, and what its requests come to.
type traffic struct {
	received, sent   atomic.Int64 // bytes, encrypted and framed, without those of TCP and IP
	requests         atomic.Int64
	refused          atomic.Int64 // answered 429
	failed           atomic.Int64 // without an answer, or answered 5xx
	mu               sync.Mutex
	bodies, messages map[string]int64 // by the last part of a path: bytes of answers, decoded, and events of watches
}

// count is traffic at one time.
type count struct {
	received, sent, requests, refused, failed int64
	bodies, messages                          map[string]int64
}

func (c *traffic) now() count {
	c.mu.Lock()
	defer c.mu.Unlock()
	return count{c.received.Load(), c.sent.Load(), c.requests.Load(), c.refused.Load(), c.failed.Load(),
		maps.Clone(c.bodies), maps.Clone(c.messages)}
}

// wrap has a configuration's connections and requests counted, which enter is called to make.
func (c *traffic) wrap(enter func(func() error) error) func(*rest.Config) {
	c.bodies, c.messages = map[string]int64{}, map[string]int64{}
	return func(config *rest.Config) {
		config.Dial = func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			var d net.Dialer
			err = enter(func() error {
				conn, err = d.DialContext(ctx, network, address)
				return err
			})
			return connection{conn, c}, err
		}
		config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return transport{rt, c} })
	}
}

type connection struct {
	net.Conn
	counts *traffic
}

// Read implements net.Conn.
func (c connection) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.counts.received.Add(int64(n))
	return n, err
}

// Write implements net.Conn.
func (c connection) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.counts.sent.Add(int64(n))
	return n, err
}

type transport struct {
	http.RoundTripper
	counts *traffic
}

// RoundTrip implements http.RoundTripper.
func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	t.counts.requests.Add(1)
	a, err := t.RoundTripper.RoundTrip(r)
	switch {
	case err != nil && !errors.Is(err, context.Canceled), err == nil && a.StatusCode >= 500:
		t.counts.failed.Add(1)
	case err == nil && a.StatusCode == http.StatusTooManyRequests:
		t.counts.refused.Add(1)
	}
	if err == nil {
		kind, of, _ := mime.ParseMediaType(a.Header.Get("Content-Type"))
		b := &body{ReadCloser: a.Body, counts: t.counts, of: path.Base(r.URL.Path)}
		b.framed = kind == "application/vnd.kubernetes.protobuf" && of["stream"] == "watch"
		a.Body = b
	}
	return a, err
}

// body counts an answer as it is read. A watch in protobuf is messages, each behind its length in four bytes.
type body struct {
	io.ReadCloser
	counts *traffic
	of     string
	framed bool
	head   []byte // of a length that is not whole yet
	skip   int    // bytes left of the message
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.counts.mu.Lock()
	defer b.counts.mu.Unlock()
	b.counts.bodies[b.of] += int64(n)
	for p := p[:n]; b.framed && len(p) > 0; {
		if b.skip > 0 {
			k := min(b.skip, len(p))
			b.skip, p = b.skip-k, p[k:]
			continue
		}
		if b.head, p = append(b.head, p[0]), p[1:]; len(b.head) == 4 {
			b.skip, b.head = int(binary.BigEndian.Uint32(b.head)), b.head[:0]
			b.counts.messages[b.of]++
		}
	}
	return n, err
}

// agents are sources that run in this process, each as an agent's.
type agents struct {
	counts []*traffic
	begun  time.Time
	synced []time.Duration
	first  []count // of each, when it was in sync
	stop   func() error
}

// start starts sources at once and waits until each knows all there is.
func start(ctx context.Context, n int, enter func(func() error) error, options func(i int) kube.Options) (*agents,
	error) {
	ctx, cancel := context.WithCancelCause(ctx)
	a := &agents{counts: make([]*traffic, n), synced: make([]time.Duration, n), first: make([]count, n), begun: time.Now()}
	var running, waiting sync.WaitGroup
	a.stop = func() error {
		err := context.Cause(ctx)
		cancel(context.Canceled)
		running.Wait()
		return err
	}
	whole := make(chan struct{})
	waiting.Add(n)
	for i := range n {
		o := options(i)
		a.counts[i] = &traffic{}
		o.Wrap = a.counts[i].wrap(enter)
		done := sync.OnceFunc(func() {
			a.synced[i], a.first[i] = time.Since(a.begun), a.counts[i].now()
			waiting.Done()
		})
		running.Go(func() {
			err := kube.New(o).Run(ctx, func(b source.Batch) {
				if !b.Waiting && len(b.Unlisted) == 0 {
					done()
				}
			})
			if err != nil {
				cancel(err)
			}
		})
	}
	go func() {
		waiting.Wait()
		close(whole)
	}()
	select {
	case <-whole:
		return a, nil
	case <-ctx.Done():
		return a, errors.Join(fmt.Errorf("sources never were in sync: %w", context.Cause(ctx)), a.stop())
	}
}

// now returns what each agent's connections carried so far.
func (a *agents) now() (l []count) {
	for _, c := range a.counts {
		l = append(l, c.now())
	}
	return l
}

// sum adds counts up.
func sum(l []count) (s count) {
	s.bodies, s.messages = map[string]int64{}, map[string]int64{}
	for _, c := range l {
		s.received, s.sent, s.requests = s.received+c.received, s.sent+c.sent, s.requests+c.requests
		s.refused, s.failed = s.refused+c.refused, s.failed+c.failed
		for k, v := range c.bodies {
			s.bodies[k] += v
		}
		for k, v := range c.messages {
			s.messages[k] += v
		}
	}
	return s
}

// less returns what was added since an earlier count.
func (c count) less(b count) count {
	c.received, c.sent, c.requests = c.received-b.received, c.sent-b.sent, c.requests-b.requests
	c.refused, c.failed = c.refused-b.refused, c.failed-b.failed
	c.bodies, c.messages = maps.Clone(c.bodies), maps.Clone(c.messages)
	for k, v := range b.bodies {
		c.bodies[k] -= v
	}
	for k, v := range b.messages {
		c.messages[k] -= v
	}
	return c
}
