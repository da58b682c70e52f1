package testbed

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// NodeName is the name of the node that agents serve, as package generate has it.
const NodeName = "a"

// Endpoints is the number of endpoints of each Service.
const Endpoints = 10

// How many Services are connected to in turn: as many as direct has addresses, so that an arm differs from another in
// its number of Services alone; and many, so that what is looked up has long left the caches.
const (
	FewTargets  = Endpoints
	ManyTargets = 1000
)

// Cluster is a number of Services with endpoints. The endpoints of Services that are connected to are the server's
// addresses; at all others' addresses nothing answers.
type Cluster struct {
	Services int
	Objects  []source.Object // the Node, then each Service and its EndpointSlice
}

// NewCluster returns a cluster of so many Services. Those connected to are the targets, unless others are named.
func NewCluster(services int, connected ...int) *Cluster {
	return NewClusterOf(services, Endpoints, connected...)
}

// NewClusterOf returns a cluster with another number of endpoints of each Service.
func NewClusterOf(services, each int, connected ...int) *Cluster {
	c := &Cluster{Services: services, Objects: generate.Cluster(services, each)}
	elsewhere := "servers"
	if connected == nil {
		connected = Targets(services)
	}
	for _, i := range connected {
		s := c.Slice(i)
		s.Endpoints = s.Endpoints[:min(len(s.Endpoints), Servers)] // the server has no more addresses
		for k := range s.Endpoints {
			e := &s.Endpoints[k]
			e.Addresses, e.NodeName = []string{ServerAddr(k).String()}, &elsewhere
		}
	}
	return c
}

// Targets returns the Services that may be connected to, spread evenly over all, the first among them.
func Targets(services int) []int { return Evenly(services, ManyTargets) }

// Evenly returns at most so many of 0 to n-1, spread evenly.
func Evenly(n, most int) []int {
	l := make([]int, min(n, most))
	for i := range l {
		l[i] = i * n / len(l)
	}
	return l
}

// DirectTargets returns the first n addresses of the server.
func DirectTargets(n int) (l []netip.AddrPort) {
	for i := range n {
		l = append(l, netip.AddrPortFrom(ServerAddr(i), ServerPort))
	}
	return l
}

// ServiceEntry returns the address and port of a Service.
func ServiceEntry(service int) netip.AddrPort {
	return netip.AddrPortFrom(generate.ServiceAddress(service), 80)
}

// Slice returns a Service's EndpointSlice.
func (c *Cluster) Slice(service int) *discoveryv1.EndpointSlice {
	return c.Objects[c.index(service)].(*discoveryv1.EndpointSlice)
}

// index returns the index of a Service's EndpointSlice among the objects.
func (c *Cluster) index(service int) int { return 2 + 2*service }

// With returns a Service's EndpointSlice with another address for one endpoint.
func (c *Cluster) With(service, endpoint int, addr netip.Addr) *discoveryv1.EndpointSlice {
	s := c.Slice(service).DeepCopy()
	s.Endpoints[endpoint].Addresses = []string{addr.String()}
	return s
}

// Spare returns an address that no endpoint has.
func Spare(service, endpoint int) netip.Addr {
	return generate.EndpointAddress(generate.MaxEndpoints/2 + service*Endpoints + endpoint)
}

// Put returns changes that make objects known to a resolver.
func Put(objects ...source.Object) []source.Change {
	return source.Put(objects...)
}

// Folder is a cluster as manifests, and a path outside where the next file is written before it is moved in.
type Folder struct {
	Cluster   *Cluster
	dir, next string
}

// Write writes the folder below dir, with so many objects to a file: Prepare needs one.
func (c *Cluster) Write(dir string, perFile int) (*Folder, error) {
	return c.WriteTo(dir, fmt.Sprint("services-", c.Services), perFile)
}

// WriteTo is Write with a name for the folder.
func (c *Cluster) WriteTo(dir, name string, perFile int) (*Folder, error) {
	f := &Folder{Cluster: c, dir: filepath.Join(dir, name), next: filepath.Join(dir, "next-"+name)}
	return f, generate.Write(f.dir, c.Objects, perFile)
}

// Save moves an object's file into the folder, new or in place of the one before, and returns its path.
func (f *Folder) Save(o source.Object) (path string, err error) {
	path = filepath.Join(f.dir, fmt.Sprintf("probe-%T.yaml", o))
	b, err := json.Marshal(o)
	if err == nil {
		err = os.WriteFile(f.next, b, 0o644)
	}
	if err == nil {
		err = os.Rename(f.next, path)
	}
	if err != nil {
		return path, fmt.Errorf("save %s: %w", o.GetName(), err)
	}
	return path, nil
}

// remove removes the folder.
func (f *Folder) remove() error { return errors.Join(os.RemoveAll(f.dir), os.RemoveAll(f.next)) }

// Prepare writes an EndpointSlice's next content beside the folder. What it returns moves it in, as one rename.
func (f *Folder) Prepare(service int, s *discoveryv1.EndpointSlice) (save func() error, err error) {
	b, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("write EndpointSlice %s: %w", s.Name, err)
	}
	if err := os.WriteFile(f.next, b, 0o644); err != nil {
		return nil, fmt.Errorf("write EndpointSlice %s: %w", s.Name, err)
	}
	to := filepath.Join(f.dir, fmt.Sprintf("objects-%06d.yaml", f.Cluster.index(service)))
	return func() error { return os.Rename(f.next, to) }, nil
}

// Decided is a cluster and what it means for the node, resolved in this process.
type Decided struct {
	Cluster  *Cluster
	Resolver *resolve.Resolver
	Parts    []model.ServicePart
}

// Decide returns a resolved cluster of so many Services.
func Decide(services int, connected ...int) (*Decided, error) {
	w := &Decided{Cluster: NewCluster(services, connected...),
		Resolver: resolve.New(resolve.Config{Node: NodeName, Addresses: []netip.Addr{NodeAddr}})}
	w.Parts = w.Resolver.Apply(Put(w.Cluster.Objects...)).Services.Put
	if p := w.Resolver.Problems(); len(p) > 0 {
		return nil, fmt.Errorf("decide %d Services: %s", services, p[0])
	}
	return w, nil
}
