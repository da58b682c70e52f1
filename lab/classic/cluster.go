package classic

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
)

// Cluster is what the layouts are written from.
type Cluster struct {
	Pods     netip.Prefix // kube-proxy's --cluster-cidr; invalid: none, and only node ports hide their clients
	Node     []netip.Addr // addresses that take node ports in nft-classic; the others take them at every own address
	Services []Service    // in the order of their rules
}

// Service is one port of a Service.
type Service struct {
	Name      string // "namespace/name:port name", unique
	Protocol  model.Protocol
	Address   netip.Addr // the ClusterIP
	Port      uint16
	NodePort  uint16 // 0: none
	Endpoints []netip.AddrPort
}

// FromParts returns the cluster of a decided node's IPv4 ClusterIPs and node ports that have endpoints, in the order of
// their addresses. Whatever else the parts say is left out.
func FromParts(parts []model.ServicePart) *Cluster {
	c := &Cluster{}
	nodePorts := map[string]uint16{}
	for _, p := range parts {
		switch v := p.(type) {
		case *model.ServiceNode:
			for _, a := range v.Addresses {
				if a.Is4() && !a.IsLoopback() {
					c.Node = append(c.Node, a)
				}
			}
			if i := slices.IndexFunc(v.Pods, func(p netip.Prefix) bool { return p.Addr().Is4() }); i >= 0 {
				c.Pods = v.Pods[i]
			}
		case *model.Frontend:
			e := v.Entry
			switch {
			case !e.Addr.Is4() || len(v.Internal.Pool.Backends) == 0:
			case e.AnyAddr():
				nodePorts[v.Service+e.Protocol.String()] = e.Port
			case v.Via == model.ViaClusterIP:
				c.Services = append(c.Services, Service{Name: v.Service, Protocol: e.Protocol, Address: e.Addr, Port: e.Port,
					Endpoints: endpoints(v.Internal.Pool)})
			}
		}
	}
	for i, s := range c.Services {
		c.Services[i].NodePort = nodePorts[s.Name+s.Protocol.String()]
	}
	slices.SortFunc(c.Services, func(a, b Service) int {
		return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
	})
	return c
}

func endpoints(p *model.Pool) (l []netip.AddrPort) {
	for _, b := range p.Backends {
		l = append(l, b.Addr)
	}
	return l
}

// path returns "namespace/name/tcp/port name", as nftables mode names a Service.
func (s *Service) path() string {
	name, port, _ := strings.Cut(s.Name, ":")
	return name + "/" + s.Protocol.String() + "/" + port
}
