package resolve

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// proxyNameLabel, on a Service or an EndpointSlice, names the proxy that is to serve it.
const proxyNameLabel = "service.kubernetes.io/service-proxy-name"

// via is the kind of way into a Service.
type via uint8

const (
	viaClusterIP via = iota
	viaLoadBalancer
	viaExternalIP
	viaNodePort
)

// String gives the word for model.Frontend.Via.
func (v via) String() string {
	return [...]string{"ClusterIP", "LoadBalancer", "ExternalIP", "NodePort"}[v]
}

// declared is what a Service asks for, whatever its endpoints and the node.
type declared struct {
	label    string // "shop/web"
	created  int64  // Unix seconds; the highest number where not said, so that those with an age come first
	groups   []group
	entries  []entry // in the order in which they take an entry that two of them want
	internal bool    // internalTrafficPolicy: Local
	external bool    // externalTrafficPolicy: Local
	spread   distribution
	affinity time.Duration
	sources  []netip.Prefix // for ingress addresses: the only ones let in. nil lets all in
	health   uint16         // port of the health check; 0: none
	problems []source.Problem
}

// group is what one port of a Service has in one family: endpoints, and pools of them.
type group struct {
	label    string // "shop/web:http", the start of its pools' names
	port     unique.Handle[string]
	protocol model.Protocol
	family   family
	pools    [scopes]poolName
}

// The pools of a group.
const (
	cluster = iota // all of the cluster's endpoints
	onlyLocal
	scopes
)

// poolName names a pool; zero where no policy needs the pool.
type poolName struct {
	name string
	id   uint64
}

// entry is a way into a Service.
type entry struct {
	model.Entry
	via   via
	group int32
	port  int32 // index in spec.ports
	index int32 // of the address in its list
}

// field gives the path of what asks for the entry.
func (e *entry) field() string {
	switch e.via {
	case viaNodePort:
		return fmt.Sprintf("spec.ports[%d].nodePort", e.port)
	case viaExternalIP:
		return fmt.Sprintf("spec.externalIPs[%d]", e.index)
	case viaLoadBalancer:
		return fmt.Sprintf("status.loadBalancer.ingress[%d].ip", e.index)
	}
	return fmt.Sprintf("spec.clusterIPs[%d]", e.index)
}

// isLocal says whether the entry's traffic from outside goes to endpoints of this node only.
func (d *declared) isLocal(e *entry) bool {
	return e.via == viaClusterIP && d.internal || e.via != viaClusterIP && d.external
}

// reading is a Service being read.
type reading struct {
	report
	svc      *corev1.Service
	hash     func(string) uint64
	out      *declared
	families families
	in       []way
}

// way is an address by which traffic enters, whatever the port.
type way struct {
	addr  netip.Addr
	via   via
	index int
}

// declare reads a Service. hash gives the ID of a pool from its name.
func declare(svc *corev1.Service, proxyName string, hash func(string) uint64) *declared {
	r := &reading{svc: svc, hash: hash, out: &declared{created: math.MaxInt64}}
	r.object = source.KeyOf(svc)
	r.out.label = word(svc.Namespace) + "/" + word(svc.Name)
	if !svc.CreationTimestamp.IsZero() {
		r.out.created = svc.CreationTimestamp.Unix()
	}
	if served(svc, proxyName) {
		r.read()
	}
	r.out.problems = r.problems
	return r.out
}

// served says whether this proxy serves the Service: not ExternalName, not headless, not another proxy's.
func served(svc *corev1.Service, proxyName string) bool {
	_, headless := svc.Labels[corev1.IsHeadlessService]
	proxy, named := svc.Labels[proxyNameLabel]
	if headless || proxy != proxyName || named != (proxyName != "") {
		return false
	}
	none := svc.Spec.ClusterIP == corev1.ClusterIPNone || slices.Contains(svc.Spec.ClusterIPs, corev1.ClusterIPNone)
	return svc.Spec.Type != corev1.ServiceTypeExternalName && !none
}

func (r *reading) read() {
	r.readType()
	clusterIPs := r.clusterIPs()
	if len(clusterIPs) == 0 {
		r.add("spec.clusterIP", "ClusterIPMissing", "the Service has no clusterIP: nothing is served; give it one, or None to make it headless")
		return
	}
	r.readFamilies(clusterIPs)
	r.readPolicies()
	r.readAffinity()
	r.readSources()
	r.readHealth()
	r.addWays(clusterIPs, viaClusterIP, func(i int) string { return fmt.Sprintf("spec.clusterIPs[%d]", i) })
	r.addIngress()
	r.addWays(r.svc.Spec.ExternalIPs, viaExternalIP, func(i int) string { return fmt.Sprintf("spec.externalIPs[%d]", i) })
	r.readPorts()
}

func (r *reading) readType() {
	switch r.svc.Spec.Type {
	case "", corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer:
	default:
		r.add("spec.type", "UnknownValue", "%q is unknown: served as ClusterIP; use ClusterIP, NodePort, LoadBalancer or ExternalName", r.svc.Spec.Type)
	}
}

// isLoadBalancer says whether the Service may have ingress addresses.
func (r *reading) isLoadBalancer() bool { return r.svc.Spec.Type == corev1.ServiceTypeLoadBalancer }

// hasNodePorts says whether the Service may have node ports.
func (r *reading) hasNodePorts() bool {
	return r.isLoadBalancer() || r.svc.Spec.Type == corev1.ServiceTypeNodePort
}

// clusterIPs gives the Service's addresses, not yet read: spec.clusterIPs, or spec.clusterIP alone.
func (r *reading) clusterIPs() []string {
	spec := &r.svc.Spec
	if len(spec.ClusterIPs) == 0 {
		if spec.ClusterIP == "" {
			return nil
		}
		return []string{spec.ClusterIP}
	}
	if spec.ClusterIP != "" && spec.ClusterIP != spec.ClusterIPs[0] {
		r.add("spec.clusterIP", "ClusterIPsDiffer", "%s is not spec.clusterIPs[0]: spec.clusterIPs counts; make them equal", spec.ClusterIP)
	}
	return spec.ClusterIPs
}

// readFamilies takes the families from spec.ipFamilies, or else from the addresses.
func (r *reading) readFamilies(clusterIPs []string) {
	for i, f := range r.svc.Spec.IPFamilies {
		switch f {
		case corev1.IPv4Protocol:
			r.families.add(ipv4)
		case corev1.IPv6Protocol:
			r.families.add(ipv6)
		default:
			r.add(fmt.Sprintf("spec.ipFamilies[%d]", i), "UnknownValue", "%q is unknown and left out; use IPv4 or IPv6", f)
		}
	}
	if r.families != (families{}) {
		return
	}
	for _, s := range clusterIPs {
		if a, err := parseAddr(s); err == nil {
			r.families.add(familyOf(a))
		}
	}
}

func (r *reading) readPolicies() {
	spec := &r.svc.Spec
	if p := spec.InternalTrafficPolicy; p != nil {
		r.out.internal = r.readPolicy("spec.internalTrafficPolicy", string(*p))
	}
	r.out.external = r.readPolicy("spec.externalTrafficPolicy", string(spec.ExternalTrafficPolicy))
	if spec.TrafficDistribution == nil {
		return
	}
	switch *spec.TrafficDistribution {
	case "":
	case corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone:
		r.out.spread = closeZone
	case corev1.ServiceTrafficDistributionPreferSameNode:
		r.out.spread = closeNode
	default:
		r.add("spec.trafficDistribution", "UnknownValue", "%q is unknown and not obeyed; use PreferSameZone, PreferSameNode or PreferClose", *spec.TrafficDistribution)
	}
}

// readPolicy says whether a traffic policy is Local.
func (r *reading) readPolicy(field, policy string) bool {
	switch policy {
	case "Local":
		return true
	case "", "Cluster":
	default:
		r.add(field, "UnknownValue", "%q is unknown: taken as Cluster; use Cluster or Local", policy)
	}
	return false
}

func (r *reading) readAffinity() {
	spec := &r.svc.Spec
	switch spec.SessionAffinity {
	case "", corev1.ServiceAffinityNone:
		return
	case corev1.ServiceAffinityClientIP:
	default:
		r.add("spec.sessionAffinity", "UnknownValue", "%q is unknown: taken as None; use None or ClientIP", spec.SessionAffinity)
		return
	}
	seconds := corev1.DefaultClientIPServiceAffinitySeconds
	if c := spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		if t := *c.ClientIP.TimeoutSeconds; t > 0 && t <= 86400 {
			seconds = t
		} else {
			r.add("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "InvalidTimeout",
				"%d is not from 1 to 86400: %d seconds are used; give a number in that range", t, seconds)
		}
	}
	r.out.affinity = time.Duration(seconds) * time.Second
}

// readSources takes the permitted sources of ingress addresses, from the field or else from its old annotation.
func (r *reading) readSources() {
	field, list := "spec.loadBalancerSourceRanges", r.svc.Spec.LoadBalancerSourceRanges
	if text := r.svc.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey]; len(list) == 0 && strings.TrimSpace(text) != "" {
		field, list = "metadata.annotations["+corev1.AnnotationLoadBalancerSourceRangesKey+"]", strings.Split(text, ",")
	}
	if len(list) == 0 {
		return
	}
	if !r.isLoadBalancer() {
		r.add(field, "SourceRangesLeftOut", "source ranges restrict nothing on a Service whose type is not LoadBalancer; remove them, or use a NetworkPolicy")
		return
	}
	r.out.sources = make([]netip.Prefix, 0, len(list))
	for i, s := range list {
		p, err := parsePrefix(strings.TrimSpace(s))
		if err != nil {
			r.flawed(fmt.Sprintf("%s[%d]", field, i), err, "it lets nobody in; correct it")
			continue
		}
		r.out.sources = append(r.out.sources, p)
	}
	r.out.sources = outermost(r.out.sources)
}

func (r *reading) readHealth() {
	n := r.svc.Spec.HealthCheckNodePort
	if n == 0 {
		return
	}
	const field = "spec.healthCheckNodePort"
	if !r.isLoadBalancer() || !r.out.external {
		r.add(field, "HealthCheckLeftOut", "a health check is for type LoadBalancer with externalTrafficPolicy Local: none is served; remove the port")
		return
	}
	port, err := parsePort(n)
	if err != nil {
		r.flawed(field, err, "no health check is served; correct it")
	}
	r.out.health = port
}

// addWays adds those addresses that can be served.
func (r *reading) addWays(list []string, v via, field func(int) string) {
	for i, s := range list {
		r.addWay(s, v, i, field)
	}
}

func (r *reading) addWay(s string, v via, i int, field func(int) string) {
	addr, err := parseAddr(s)
	if err == nil && !r.families.has(familyOf(addr)) {
		err = &flaw{"WrongFamily", fmt.Sprintf("%s is of a family that the Service doesn't have", addr)}
	}
	if err != nil {
		r.flawed(field(i), err, "nothing is served there; correct or remove it")
		return
	}
	r.in = append(r.in, way{addr, v, i})
}

// addIngress adds the addresses of load balancers that leave the destination address as it is (KEP-1860: ipMode VIP).
func (r *reading) addIngress() {
	list := r.svc.Status.LoadBalancer.Ingress
	if len(list) > 0 && !r.isLoadBalancer() {
		r.add("status.loadBalancer", "IngressLeftOut", "the type is not LoadBalancer: nothing is served at its ingress addresses; set the type, or clear the status")
		return
	}
	for i := range list {
		mode := corev1.LoadBalancerIPModeVIP
		if list[i].IPMode != nil {
			mode = *list[i].IPMode
		}
		switch {
		case list[i].IP == "" || mode == corev1.LoadBalancerIPModeProxy:
		case mode == corev1.LoadBalancerIPModeVIP:
			r.addWay(list[i].IP, viaLoadBalancer, i, func(i int) string { return fmt.Sprintf("status.loadBalancer.ingress[%d].ip", i) })
		default:
			r.add(fmt.Sprintf("status.loadBalancer.ingress[%d].ipMode", i), "UnknownValue", "%q is unknown: nothing is served there; use VIP or Proxy", mode)
		}
	}
}

// port is a Service's port as read.
type port struct {
	index          int
	name           string
	protocol       model.Protocol
	number, onNode uint16 // onNode: the node port; 0: none
	groups         [2]int // by index in bothFamilies; -1: none
}

func (r *reading) readPorts() {
	ports := make([]port, 0, len(r.svc.Spec.Ports))
	for i := range r.svc.Spec.Ports {
		if p, ok := r.readPort(i, ports); ok {
			r.addGroups(&p)
			ports = append(ports, p)
		}
	}
	r.out.entries = make([]entry, 0, (len(r.in)+1)*len(ports))
	for _, w := range r.in {
		for i := range ports {
			r.addEntry(&ports[i], w.addr, ports[i].number, w.via, w.index)
		}
	}
	for i := range ports {
		for _, f := range bothFamilies {
			if ports[i].onNode != 0 && r.families.has(f) {
				r.addEntry(&ports[i], f.any(), ports[i].onNode, viaNodePort, 0)
			}
		}
	}
	r.namePools()
}

// readPort reads spec.ports[i]; before are those read already.
func (r *reading) readPort(i int, before []port) (p port, ok bool) {
	in := &r.svc.Spec.Ports[i]
	p = port{index: i, name: in.Name}
	var err *flaw
	if p.protocol, err = parseProtocol(in.Protocol); err != nil {
		r.flawed(fmt.Sprintf("spec.ports[%d].protocol", i), err, "this port is not served; correct it")
		return p, false
	}
	if p.number, err = parsePort(in.Port); err != nil {
		r.flawed(fmt.Sprintf("spec.ports[%d].port", i), err, "this port is not served; correct it")
		return p, false
	}
	if slices.ContainsFunc(before, func(o port) bool { return o.name == p.name && o.protocol == p.protocol }) {
		r.add(fmt.Sprintf("spec.ports[%d].name", i), "DuplicateName", "an earlier port has the name %q and protocol %s too: this one is not served; give it another name", p.name, p.protocol)
		return p, false
	}
	p.onNode = r.readNodePort(i, in.NodePort)
	return p, true
}

func (r *reading) readNodePort(i int, n int32) uint16 {
	if n == 0 {
		return 0
	}
	field := fmt.Sprintf("spec.ports[%d].nodePort", i)
	if !r.hasNodePorts() {
		r.add(field, "NodePortLeftOut", "the type has no node ports: %d is not served; use type NodePort or LoadBalancer", n)
		return 0
	}
	number, err := parsePort(n)
	if err != nil {
		r.flawed(field, err, "the node port is not served; correct it")
	}
	return number
}

// addGroups makes the groups of a port.
func (r *reading) addGroups(p *port) {
	label := r.out.label
	if p.name != "" {
		label += ":" + word(p.name)
	}
	for i, f := range bothFamilies {
		p.groups[i] = -1
		if r.families.has(f) {
			p.groups[i] = len(r.out.groups)
			r.out.groups = append(r.out.groups, group{label: label, port: intern(p.name), protocol: p.protocol, family: f})
		}
	}
}

func (r *reading) addEntry(p *port, addr netip.Addr, number uint16, v via, index int) {
	g := p.groups[slices.Index(bothFamilies[:], familyOf(addr))]
	r.out.entries = append(r.out.entries, entry{
		Entry: model.Entry{Addr: addr, Port: number, Protocol: p.protocol},
		via:   v, group: int32(g), port: int32(p.index), index: int32(index),
	})
}

// namePools names the pools that the entries need. An external entry with the Local policy needs both: clients on this
// node and in its pods use the whole cluster's endpoints.
func (r *reading) namePools() {
	for i := range r.out.entries {
		e := &r.out.entries[i]
		if e.via != viaClusterIP || !r.out.internal {
			r.namePool(e.group, cluster, "cluster")
		}
		if r.out.isLocal(e) {
			r.namePool(e.group, onlyLocal, "local")
		}
	}
}

func (r *reading) namePool(index int32, scope int, what string) {
	g := &r.out.groups[index]
	if g.pools[scope].name != "" {
		return
	}
	name := g.label + " " + g.protocol.String() + " " + g.family.String() + " " + what
	g.pools[scope] = poolName{name, r.hash(name)}
	g.label = name[:len(g.label)] // one text in memory for both
}

// word gives s, quoted if it holds anything that names in Kubernetes don't, so that names put together stay apart.
func word(s string) string {
	plain := func(c rune) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '.' || c == '_'
	}
	if s != "" && strings.IndexFunc(s, func(c rune) bool { return !plain(c) }) < 0 {
		return s
	}
	return strconv.Quote(s)
}
