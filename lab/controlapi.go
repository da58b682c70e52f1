package lab

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
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/controlplane"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// Addresses between the API server's namespace and the nodes' (RFC 2544's range, which nobody else here has).
var (
	officeAddr = netip.MustParseAddr("198.18.0.1")
	officePort = 8080 // of the lab's own server
)

// nodeSide is the address that the i-th node has there, counted from 0.
func nodeSide(i int) netip.Addr {
	i += 2
	return netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
}

// announced is a cluster that an API server tells of.
type announced struct {
	size
	cluster    *cluster // with a Service 0 that nobody is told of: a real API server has its address
	kubeconfig string
	tell       func(context.Context, source.Object) error // an object is now so
	close      func() error
	rand       *rand.Rand
	elsewhere  map[int]bool // Services whose first endpoint has been replaced
}

func newAnnounced(s size, seed uint64) *announced {
	return &announced{size: s, cluster: newClusterOf(size{s.services + 1, s.endpoints}, steadyService), close: func() error { return nil },
		rand: rand.New(rand.NewPCG(seed, uint64(s.services))), elsewhere: map[int]bool{}}
}

// steadyService has the server's addresses as endpoints and never changes.
const steadyService = 1

// open makes the API server's namespace.
func (r *controlSide) open(context.Context) (err error) {
	if r.office, err = newSpace(r.id + "-api"); err != nil {
		return err
	}
	r.later(func() error { return r.drop(r.office) })
	r.later(r.silence)
	return dial(r.office, func(c *link.Conn) error { return c.AddAddress(1, netip.PrefixFrom(officeAddr, 32)) }) // the loopback is always interface 1
}

// connect lays a veth between a node and the API server's namespace.
func (r *controlSide) connect(p *pair) error {
	const near = "api"
	at, far := nodeSide(r.joined), fmt.Sprint("node", r.joined)
	r.joined++
	err := dial(p.node, func(c *link.Conn) error {
		_, err := c.AddVeth(link.End{Name: near}, link.End{Name: far}, r.office)
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(lead(r.office, far, officeAddr, at), lead(p.node, near, at, officeAddr))
}

// lead brings an interface up as the way from one address, which it has from now on, to another.
func lead(ns *netns.Namespace, dev string, from, to netip.Addr) error {
	return dial(ns, func(c *link.Conn) error {
		i, err := c.Index(dev)
		if err != nil {
			return err
		}
		return errors.Join(c.Up(i), c.AddAddress(i, netip.PrefixFrom(from, 32)), c.PutRoute(link.Route{To: netip.PrefixFrom(to, 32), Dev: i, Source: from}))
	})
}

// tell ends what was told before and has an API server tell of a cluster, and of a probe.
func (r *controlSide) tell(ctx context.Context, s size) error {
	if err := r.silence(); err != nil {
		return err
	}
	a := newAnnounced(s, r.Seed)
	c := a.cluster
	objects := slices.Concat(c.objects[:1], c.objects[1+2:], kubeproxy.ProbeObjects(probeService, probePlaces))
	r.cluster = a
	if program := r.given[controlPlaneProgram.name]; program != "" {
		return r.tellReal(ctx, a, program, objects)
	}
	return r.tellOwn(a, objects)
}

// silence ends the API server.
func (r *controlSide) silence() error {
	a := r.cluster
	if r.cluster = nil; a == nil {
		return nil
	}
	return a.close()
}

// tellOwn starts the lab's own API server.
func (r *controlSide) tellOwn(a *announced, objects []source.Object) error {
	s := apiserver.New(objects...)
	s.Encode()
	url, stop, err := s.Start(r.office, netip.AddrPortFrom(officeAddr, uint16(officePort)).String())
	if err != nil {
		return err
	}
	a.close = stop
	a.tell = func(_ context.Context, o source.Object) error {
		s.Apply(source.Change{Key: source.KeyOf(o), Object: o})
		return nil
	}
	a.kubeconfig = filepath.Join(r.tmp, "kubeconfig")
	return os.WriteFile(a.kubeconfig, apiserver.Kubeconfig(url), 0o600)
}

// tellReal starts etcd and kube-apiserver.
func (r *controlSide) tellReal(ctx context.Context, a *announced, program string, objects []source.Object) error {
	dir, err := os.MkdirTemp(r.tmp, "control-plane-")
	if err != nil {
		return err
	}
	p, err := controlplane.Start(ctx, controlplane.Options{Program: program, Host: r.office, Address: officeAddr, Dir: dir})
	a.close = func() error {
		p.Close()
		return os.RemoveAll(dir)
	}
	a.tell = p.Tell
	var spaces []source.Object
	for _, name := range append(generate.Namespaces(a.cluster.services), kubeproxy.ProbeNamespace) {
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
func (a *announced) next() *discoveryv1.EndpointSlice {
	i := steadyService
	if a.services > 1 {
		i += 1 + a.rand.IntN(a.services-1)
	}
	if a.elsewhere[i] = !a.elsewhere[i]; !a.elsewhere[i] {
		return a.cluster.slice(i)
	}
	return a.cluster.with(i, 0, spare(i, 0))
}

// stir changes endpoints of Services at a steady rate until it is stopped. It gives how many changes the API server took.
func (a *announced) stir(ctx context.Context, rate float64) (stop func() (int64, error)) {
	ctx, end := context.WithCancelCause(ctx)
	var n atomic.Int64
	var workers sync.WaitGroup
	todo := make(chan source.Object)
	for range 8 { // a real API server takes some milliseconds for each
		workers.Go(func() {
			for o := range todo {
				if err := a.tell(context.WithoutCancel(ctx), o); err != nil {
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
