package control

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/controlplane"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// Addresses between the API server's namespace and the nodes' (RFC 2544's range, which is for measurements).
var (
	apiAddr = netip.MustParseAddr("198.18.0.1")
	apiPort = 8080 // of the lab's own server
)

// nodeSide is the address that the i-th node has there, counted from 0.
func nodeSide(i int) netip.Addr {
	i += 2
	return netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
}

// served is a cluster that an API server serves.
type served struct {
	size       size
	cluster    *testbed.Cluster // its Service 0 is not served: a real API server has its address
	kubeconfig string
	publish    func(context.Context, source.Object) error // an object is now so
	close      func() error
	rand       *rand.Rand
	elsewhere  map[int]bool // Services whose first endpoint has been replaced
}

func newServed(s size, seed uint64) *served {
	return &served{size: s, cluster: testbed.NewClusterOf(s.services+1, s.endpoints, steadyService),
		close: func() error { return nil },
		rand:  rand.New(rand.NewPCG(seed, uint64(s.services))), elsewhere: map[int]bool{}}
}

// steadyService has the server's addresses as endpoints and never changes.
const steadyService = 1

// openAPI makes the API server's namespace.
func (r *trial) openAPI(context.Context) (err error) {
	if r.apiNamespace, err = testbed.NewNamespace(r.bed.Name + "-api"); err != nil {
		return err
	}
	r.bed.Defer(func() error { return testbed.RemoveNamespace(r.apiNamespace) })
	r.bed.Defer(r.closeAPI)
	// the loopback is always interface 1
	return testbed.DialLink(r.apiNamespace,
		func(c *link.Conn) error { return c.AddAddress(1, netip.PrefixFrom(apiAddr, 32)) })
}

// connect lays a veth between a node and the API server's namespace.
func (r *trial) connect(p *testbed.Pair) error {
	const near = "api"
	at, far := nodeSide(r.joined), fmt.Sprint("node", r.joined)
	r.joined++
	err := testbed.DialLink(p.Near, func(c *link.Conn) error {
		_, err := c.AddVeth(link.End{Name: near}, link.End{Name: far}, r.apiNamespace)
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(lead(r.apiNamespace, far, apiAddr, at), lead(p.Near, near, at, apiAddr))
}

// lead brings an interface up as the way from one address, which it has from now on, to another.
func lead(ns *netns.Namespace, dev string, from, to netip.Addr) error {
	return testbed.DialLink(ns, func(c *link.Conn) error {
		i, err := c.Index(dev)
		if err != nil {
			return err
		}
		return errors.Join(c.Up(i), c.AddAddress(i, netip.PrefixFrom(from, 32)),
			route.PutIn(ns, route.Route{To: netip.PrefixFrom(to, 32), Dev: i, Source: from}))
	})
}

// publish ends the API server there was and starts one that serves a cluster and a probe.
func (r *trial) publish(ctx context.Context, s size) error {
	if err := r.closeAPI(); err != nil {
		return err
	}
	a := newServed(s, r.bed.Config.Seed)
	c := a.cluster
	objects := slices.Concat(c.Objects[:1], c.Objects[1+2:],
		kubeproxy.ProbeObjects(experiment.ProbeService, experiment.ProbeEndpoints))
	r.cluster = a
	if program := r.programs[experiment.ControlPlaneProgram.Name]; program != "" {
		return r.publishReal(ctx, a, program, objects)
	}
	return r.publishOwn(a, objects)
}

// closeAPI ends the API server.
func (r *trial) closeAPI() error {
	a := r.cluster
	if r.cluster = nil; a == nil {
		return nil
	}
	return a.close()
}

// publishOwn starts the lab's own API server.
func (r *trial) publishOwn(a *served, objects []source.Object) error {
	s := apiserver.New(objects...)
	s.Encode()
	url, stop, err := s.Start(r.apiNamespace, netip.AddrPortFrom(apiAddr, uint16(apiPort)).String())
	if err != nil {
		return err
	}
	a.close = stop
	a.publish = func(_ context.Context, o source.Object) error {
		s.Apply(source.Change{Key: source.KeyOf(o), Object: o})
		return nil
	}
	a.kubeconfig = filepath.Join(r.bed.Dir, "kubeconfig")
	return os.WriteFile(a.kubeconfig, apiserver.Kubeconfig(url), 0o600)
}

// publishReal starts etcd and kube-apiserver.
func (r *trial) publishReal(ctx context.Context, a *served, program string, objects []source.Object) error {
	dir, err := os.MkdirTemp(r.bed.Dir, "control-plane-")
	if err != nil {
		return err
	}
	p, err := controlplane.Start(ctx, controlplane.Options{Program: program, Host: r.apiNamespace, Address: apiAddr,
		Dir: dir})
	a.close = func() error {
		p.Close()
		return os.RemoveAll(dir)
	}
	a.publish = p.Apply
	var spaces []source.Object
	for _, name := range append(generate.Namespaces(a.cluster.Services), kubeproxy.ProbeNamespace) {
		spaces = append(spaces, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	for _, l := range [][]source.Object{spaces, objects} {
		if err == nil {
			err = p.Load(ctx, l)
		}
	}
	if err == nil {
		a.kubeconfig, err = p.Kubeconfig("subject", controlplane.First, "system:masters")
	}
	if err != nil {
		return fmt.Errorf("start the control plane %s: %w", program, err)
	}
	return nil
}

// next is the next change of an endpoint of some Service: replaced, or put back.
func (a *served) next() *discoveryv1.EndpointSlice {
	i := steadyService
	if a.size.services > 1 {
		i += 1 + a.rand.IntN(a.size.services-1)
	}
	if a.elsewhere[i] = !a.elsewhere[i]; !a.elsewhere[i] {
		return a.cluster.Slice(i)
	}
	return a.cluster.With(i, 0, testbed.Spare(i, 0))
}

// stir changes endpoints of Services at a steady rate until it is stopped. It returns how many changes the API server
// took.
func (a *served) stir(ctx context.Context, rate float64) (stop func() (int64, error)) {
	ctx, end := context.WithCancelCause(ctx)
	var n atomic.Int64
	var workers sync.WaitGroup
	todo := make(chan source.Object)
	for range 8 { // a real API server takes some milliseconds for each
		workers.Go(func() {
			for o := range todo {
				if err := a.publish(context.WithoutCancel(ctx), o); err != nil {
					end(err) // the first stays the cause
					continue
				}
				n.Add(1)
			}
		})
	}
	workers.Go(func() {
		defer close(todo)
		tick := time.NewTicker(time.Duration(float64(time.Second) / rate))
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				todo <- a.next()
			case <-ctx.Done():
				return
			}
		}
	})
	return func() (int64, error) {
		end(context.Canceled)
		workers.Wait()
		if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
			return n.Load(), fmt.Errorf("change an endpoint: %w", err)
		}
		return n.Load(), nil
	}
}
