// Package health is the data plane of healthCheckNodePort: HTTP servers on which load balancers ask whether this node
// has backends of a Service of its own. What a kernel is to others, the process's listeners are to it.
package health

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/httpserver"
	"fairlead.dev/fairlead/model"
)

// Key is where a server listens; the zero address stands for all.
type Key struct {
	Addr netip.Addr
	Port uint16
}

// String returns "192.0.2.1:30999", or ":30999" for all addresses.
func (k Key) String() string {
	if !k.Addr.IsValid() {
		return ":" + strconv.Itoa(int(k.Port))
	}
	return netip.AddrPortFrom(k.Addr, k.Port).String()
}

// Rank implements dataplane.Key: servers don't depend on each other.
func (Key) Rank() int { return 0 }

// State is what a server answers.
type State struct {
	Owner model.Owner // the Service
	Local int         // ready backends on this node
}

// Fact returns what the server at a port answers.
type Fact = dataplane.Fact[Key, State]

// Plane implements dataplane.Plane[*model.HealthCheck, Key, State].
type Plane struct {
	listen  func(Key) (net.Listener, error)
	healthy func() bool
	mu      sync.Mutex
	servers map[Key]*server
}

var _ dataplane.Plane[*model.HealthCheck, Key, State] = (*Plane)(nil)

// New returns a plane without servers. listen opens a server's socket; nil: a TCP one. healthy reports whether the node
// serves Services at all: while it doesn't, no server has backends; nil: it does.
func New(listen func(Key) (net.Listener, error), healthy func() bool) *Plane {
	if listen == nil {
		listen = func(k Key) (net.Listener, error) { return net.Listen("tcp", k.String()) }
	}
	if healthy == nil {
		healthy = func() bool { return true }
	}
	return &Plane{listen: listen, healthy: healthy, servers: map[Key]*server{}}
}

// Render implements dataplane.Plane.
func (p *Plane) Render(h *model.HealthCheck) []Fact {
	state := State{h.Owner, h.Local}
	if h.Addresses == nil {
		return []Fact{{Key: Key{Port: h.Port}, Value: state}}
	}
	facts := make([]Fact, len(h.Addresses))
	for i, a := range h.Addresses {
		facts[i] = Fact{Key: Key{a, h.Port}, Value: state}
	}
	return facts
}

// Read implements dataplane.Plane.
func (p *Plane) Read(context.Context) (facts []Fact, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, s := range p.servers {
		facts = append(facts, Fact{Key: k, Value: *s.state.Load()})
	}
	return facts, nil
}

// Write implements dataplane.Plane. A port that is taken fails; the others are served.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	stays := map[Key]bool{}
	var errs []error
	for _, f := range put {
		stays[f.Key] = true
	}
	for _, f := range del { // first: a server at all addresses leaves no room for one at some
		if s := p.servers[f.Key]; s != nil && !stays[f.Key] {
			s.close()
			delete(p.servers, f.Key)
		}
	}
	for _, f := range put {
		errs = append(errs, p.serve(f))
	}
	return errors.Join(errs...)
}

// serve notifies a server what to answer, and starts it if there is none.
func (p *Plane) serve(f Fact) error {
	if s := p.servers[f.Key]; s != nil {
		s.state.Store(&f.Value)
		return nil
	}
	l, err := p.listen(f.Key)
	if err != nil {
		return fmt.Errorf("health: listen on healthCheckNodePort %s of Service %s: %w", f.Key, f.Value.Owner, err)
	}
	s := &server{healthy: p.healthy, socket: l}
	s.state.Store(&f.Value)
	s.http = httpserver.New(s)
	p.servers[f.Key] = s
	go s.http.Serve(l)
	return nil
}

// Close ends all servers.
func (p *Plane) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, s := range p.servers {
		s.close()
		delete(p.servers, k)
	}
}

// server answers for one Service.
type server struct {
	state   atomic.Pointer[State]
	healthy func() bool
	http    *http.Server
	socket  net.Listener
}

// close closes the socket too: http knows of it only once it serves.
func (s *server) close() {
	s.http.Close()
	s.socket.Close()
}

// ServeHTTP answers 200 if the node has backends and 503 if not, in the words of kube-proxy's health check server.
func (s *server) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	state := *s.state.Load()
	var body struct {
		Service struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
		} `json:"service"`
		LocalEndpoints      int  `json:"localEndpoints"`
		ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
	}
	body.Service.Namespace, body.Service.Name = state.Owner.Namespace, state.Owner.Name
	body.LocalEndpoints, body.ServiceProxyHealthy = state.Local, s.healthy()
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(state.Local))
	if state.Local == 0 || !body.ServiceProxyHealthy {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	json.NewEncoder(w).Encode(body)
}
