package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/source"
)

// Probe is a Service with one endpoint, which moves from one place to another and back. How long until a connection
// arrives at the new place is how long a change takes, whoever carries it to the kernel.
type Probe struct {
	client    Entrance
	service   netip.AddrPort
	endpoints [2]netip.AddrPort
	at        int // the place where the endpoint is
	servers   [2]net.Listener
	requests  chan chan<- answer // to the thread that connects; nil: none yet
	done      sync.WaitGroup
}

// Entrance is where connections come from: Do runs a function there, on the calling thread.
type Entrance interface{ Do(func() error) error }

// answer is what became of a connection.
type answer struct {
	endpoint int // where it came to, -1 for nowhere
	err      error
}

// again is how long the probe waits between a connection that came to the wrong place, or nowhere, and the next.
const again = 500 * time.Microsecond

// NewProbe listens at both places in one namespace, and will connect to the service's address from another.
func NewProbe(client Entrance, server *netns.Namespace, service netip.AddrPort,
	endpoints [2]netip.AddrPort) (*Probe, error) {
	p := &Probe{client: client, service: service, endpoints: endpoints}
	for i := range endpoints {
		err := server.Do(func() (err error) {
			p.servers[i], err = net.Listen("tcp4", endpoints[i].String())
			return err
		})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("listen as endpoint %s: %w", endpoints[i], err), p.Close())
		}
		p.done.Go(func() { serve(p.servers[i], byte(i)) })
	}
	return p, nil
}

// serve answers every connection with the index of this endpoint.
func serve(l net.Listener, endpoint byte) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		c.Write([]byte{endpoint})
		c.Close()
	}
}

// Close ends the listeners and the thread that connects.
func (p *Probe) Close() (err error) {
	if p.requests != nil {
		close(p.requests)
	}
	for _, l := range p.servers {
		if l != nil {
			err = errors.Join(err, l.Close())
		}
	}
	p.done.Wait()
	return err
}

// ProbeNamespace is where a probe's objects live.
const ProbeNamespace = "probe"

const probeName = "probe"

// Service is the probe's Service.
func (p *Probe) Service() *corev1.Service {
	ip := p.service.Addr().String()
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: ProbeNamespace, Name: probeName},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: int32(p.service.Port()),
				TargetPort: intstr.FromInt32(int32(p.endpoints[0].Port()))}},
		},
	}
}

// Slice is its EndpointSlice as it is now.
func (p *Probe) Slice() *discoveryv1.EndpointSlice {
	ready, name, tcp, port := true, "", corev1.ProtocolTCP, int32(p.endpoints[p.at].Port())
	return &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ProbeNamespace, Name: probeName + "-0",
			Labels:      map[string]string{discoveryv1.LabelServiceName: probeName},
			Annotations: map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().UTC().Format(time.RFC3339Nano)},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{p.endpoints[p.at].Addr().String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
		Ports: []discoveryv1.EndpointPort{{Name: &name, Protocol: &tcp, Port: &port}},
	}
}

// Objects are both.
func (p *Probe) Objects() []source.Object { return []source.Object{p.Service(), p.Slice()} }

// ProbeObjects are those of a Probe that is yet to be made.
func ProbeObjects(service netip.AddrPort, endpoints [2]netip.AddrPort) []source.Object {
	return (&Probe{service: service, endpoints: endpoints}).Objects()
}

// Move moves the endpoint: tell is called with the new EndpointSlice. It returns how long after that call's begin the
// first connection was made that arrived at the new place.
func (p *Probe) Move(ctx context.Context, apply func(source.Object) error) (time.Duration, error) {
	p.at = 1 - p.at
	s := p.Slice()
	begin := time.Now()
	if err := apply(s); err != nil {
		return 0, fmt.Errorf("tell that the probe's endpoint is now %s: %w", p.endpoints[p.at], err)
	}
	return p.arrive(ctx, begin)
}

// Reach connects until a connection arrives where the endpoint is.
func (p *Probe) Reach(ctx context.Context) error {
	_, err := p.arrive(ctx, time.Now())
	return err
}

func (p *Probe) arrive(ctx context.Context, begin time.Time) (time.Duration, error) {
	for {
		endpoint, err := p.reach()
		if err == nil && endpoint == p.at {
			return time.Since(begin), nil
		}
		select {
		case <-time.After(again):
		case <-ctx.Done():
			return 0, fmt.Errorf("reach %s through %s: %w (last at place %d of 0 and 1: %v)", p.endpoints[p.at], p.service,
				ctx.Err(), endpoint, err)
		}
	}
}

// reach connects to the Service and hears where it came to. One thread asks as long as the probe lives, since to enter
// a place may take longer than to connect.
func (p *Probe) reach() (endpoint int, err error) {
	if p.requests == nil {
		p.requests = make(chan chan<- answer)
		p.done.Go(p.reachAll)
	}
	c := make(chan answer, 1)
	p.requests <- c
	a := <-c
	return a.endpoint, a.err
}

// reachAll answers as it is asked. Where it can't enter, that is every answer.
func (p *Probe) reachAll() {
	err := p.client.Do(func() error {
		for c := range p.requests {
			c <- p.connect()
		}
		return nil
	})
	for c := range p.requests {
		c <- answer{-1, err}
	}
}

func (p *Probe) connect() answer {
	c, err := net.DialTimeout("tcp4", p.service.String(), 200*time.Millisecond)
	if err != nil {
		return answer{-1, err}
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(200 * time.Millisecond))
	var b [1]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return answer{-1, err}
	}
	return answer{int(b[0]), nil}
}
