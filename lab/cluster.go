package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// nodeName is the node that the agents serve, as generate calls it.
const nodeName = "a"

// endpoints of each Service.
const endpoints = 10

// How many Services are connected to in turn: as many as direct has addresses, so that an arm differs from another in
// its number of Services alone; and many, so that what is looked up has long left the caches.
const (
	fewTargets  = endpoints
	manyTargets = 1000
)

// cluster is a number of Services with endpoints. The endpoints of those that are connected to are the
// server's addresses, all others' are addresses behind which there is nothing.
type cluster struct {
	services int
	objects  []source.Object // the Node, then each Service and its EndpointSlice
}

// newCluster makes one of so many Services. Those connected to are the targets, unless others are named.
func newCluster(services int, connected ...int) *cluster {
	return newClusterOf(size{services, endpoints}, connected...)
}

// size is how large a cluster is: Services, and endpoints of each.
type size struct{ services, endpoints int }

func newClusterOf(s size, connected ...int) *cluster {
	services := s.services
	c := &cluster{services: services, objects: generate.Cluster(services, s.endpoints)}
	elsewhere := "servers"
	if connected == nil {
		connected = targets(services)
	}
	for _, i := range connected {
		s := c.slice(i)
		s.Endpoints = s.Endpoints[:min(len(s.Endpoints), servers)] // more addresses than these nobody answers at
		for k := range s.Endpoints {
			e := &s.Endpoints[k]
			e.Addresses, e.NodeName = []string{serverAddr(k).String()}, &elsewhere
		}
	}
	return c
}

// targets gives the Services that may be connected to: spread over all, the first among them.
func targets(services int) []int { return spread(services, manyTargets) }

// spread gives at most so many of 0 to n-1, evenly.
func spread(n, most int) []int {
	l := make([]int, min(n, most))
	for i := range l {
		l[i] = i * n / len(l)
	}
	return l
}

// direct gives the first n addresses of the server.
func direct(n int) (l []netip.AddrPort) {
	for i := range n {
		l = append(l, netip.AddrPortFrom(serverAddr(i), serverPort))
	}
	return l
}

// entry is where a Service is connected to.
func entry(service int) netip.AddrPort {
	return netip.AddrPortFrom(generate.ServiceAddress(service), 80)
}

func (c *cluster) slice(service int) *discoveryv1.EndpointSlice {
	return c.objects[c.place(service)].(*discoveryv1.EndpointSlice)
}

// place is where a Service's EndpointSlice stands among the objects.
func (c *cluster) place(service int) int { return 2 + 2*service }

// with gives a Service's EndpointSlice with another address for one endpoint.
func (c *cluster) with(service, endpoint int, addr netip.Addr) *discoveryv1.EndpointSlice {
	s := c.slice(service).DeepCopy()
	s.Endpoints[endpoint].Addresses = []string{addr.String()}
	return s
}

// spare is an address that no endpoint has.
func spare(service, endpoint int) netip.Addr {
	return generate.EndpointAddress(generate.MaxEndpoints/2 + service*endpoints + endpoint)
}

// changes tells a resolver of the whole cluster.
func (c *cluster) changes() []source.Change {
	l := make([]source.Change, len(c.objects))
	for i, o := range c.objects {
		l[i] = source.Change{Key: source.KeyOf(o), Object: o}
	}
	return l
}

// folder is a cluster as manifests, and a place outside where the next file is written.
type folder struct {
	*cluster
	dir, next string
}

// write makes the folder below dir, with so many objects to a file: prepare wants one.
func (c *cluster) write(dir string, perFile int) (*folder, error) {
	return c.writeTo(dir, fmt.Sprint("services-", c.services), perFile)
}

// writeTo is the same with a name for the folder.
func (c *cluster) writeTo(dir, name string, perFile int) (*folder, error) {
	f := &folder{cluster: c, dir: filepath.Join(dir, name), next: filepath.Join(dir, "next-"+name)}
	return f, generate.Write(f.dir, c.objects, perFile)
}

// save moves an object's file into the folder, new or in place of the one before, and gives its path.
func (f *folder) save(o source.Object) (path string, err error) {
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
func (f *folder) remove() error { return errors.Join(os.RemoveAll(f.dir), os.RemoveAll(f.next)) }

// prepare writes an EndpointSlice's next content beside the folder. What it gives moves it in, as one change of name.
func (f *folder) prepare(service int, s *discoveryv1.EndpointSlice) (save func() error, err error) {
	b, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("write EndpointSlice %s: %w", s.Name, err)
	}
	if err := os.WriteFile(f.next, b, 0o644); err != nil {
		return nil, fmt.Errorf("write EndpointSlice %s: %w", s.Name, err)
	}
	to := filepath.Join(f.dir, fmt.Sprintf("objects-%06d.yaml", f.place(service)))
	return func() error { return os.Rename(f.next, to) }, nil
}
