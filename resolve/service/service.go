package service

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
)

// proxyNameLabel, on a Service, names the proxy that is to serve it.
const proxyNameLabel = "service.kubernetes.io/service-proxy-name"

// reading is a Service being read.
type reading struct {
	report
	svc      *corev1.Service
	set      *settings
	out      *declared
	families families
}

// ingressAddress is an address by which traffic enters, whatever the port.
type ingressAddress struct {
	addr  netip.Addr
	via   via
	index int
}

// declare reads a Service for a node that is set so. Its entries are not made yet: see expand.
func declare(svc *corev1.Service, set *settings) *declared {
	r := &reading{svc: svc, set: set, out: &declared{created: math.MaxInt64}}
	r.object = source.KeyOf(svc)
	r.out.label = word(svc.Namespace) + "/" + word(svc.Name)
	if !svc.CreationTimestamp.IsZero() {
		r.out.created = svc.CreationTimestamp.Unix()
	}
	if Unserved(svc, set.ProxyName) == "" {
		r.read()
	} else if _, named := svc.Labels[proxyNameLabel]; named && set.ProxyName == "" {
		r.readForeign()
	}
	r.out.problems = r.report.problems
	return r.out
}

// Unserved returns why no proxy, or not the one of this name, serves the Service; "" if it does.
func Unserved(svc *corev1.Service, proxyName string) string {
	proxy, named := svc.Labels[proxyNameLabel]
	switch {
	case svc.Spec.Type == corev1.ServiceTypeExternalName:
		return "its type is ExternalName"
	case svc.Spec.ClusterIP == corev1.ClusterIPNone || slices.Contains(svc.Spec.ClusterIPs, corev1.ClusterIPNone):
		return "it is headless"
	case named && proxy != proxyName || named && proxyName == "":
		return fmt.Sprintf("it is for the proxy %q by its label %s", proxy, proxyNameLabel)
	case !named && proxyName != "":
		return fmt.Sprintf("it lacks the label %s: %s", proxyNameLabel, proxyName)
	}
	return ""
}

func (r *reading) read() {
	r.readType()
	clusterIPs := r.clusterIPs()
	if len(clusterIPs) == 0 {
		r.add("spec.clusterIP", "ClusterIPMissing",
			"the Service has no clusterIP: nothing is served; give it one, or None to make it headless")
		return
	}
	r.readFamilies(clusterIPs)
	r.readPolicies()
	r.readAffinity()
	r.readScheduler()
	r.readSources()
	r.readHealth()
	for i, s := range clusterIPs {
		if len(r.svc.Spec.ClusterIPs) == 0 {
			i = -1
		}
		r.addAddress(s, viaClusterIP, i)
	}
	r.addIngress()
	r.warnOpen()
	if n := len(r.svc.Spec.ExternalIPs); n > 0 && r.set.ExternalIPs == RefuseExternalIPs {
		r.add("spec.externalIPs", "ExternalIPsRefused", "%d addresses are not served, since externalIPs is %s "+
			"here; use type LoadBalancer or NodePort",
			n, RefuseExternalIPs)
	} else {
		for i, s := range r.svc.Spec.ExternalIPs {
			r.addAddress(s, viaExternalIP, i)
		}
	}
	r.readPorts()
}

func (r *reading) readType() {
	switch r.svc.Spec.Type {
	case "", corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer:
	default:
		r.add("spec.type", "UnknownValue", "%q is unknown: served as ClusterIP; use ClusterIP, NodePort, LoadBalancer or "+
			"ExternalName", r.svc.Spec.Type)
	}
}

// isLoadBalancer reports whether the Service may have ingress addresses.
func (r *reading) isLoadBalancer() bool { return r.svc.Spec.Type == corev1.ServiceTypeLoadBalancer }

// hasNodePorts reports whether the Service may have node ports.
func (r *reading) hasNodePorts() bool {
	return r.isLoadBalancer() || r.svc.Spec.Type == corev1.ServiceTypeNodePort
}

// clusterIPs returns the Service's addresses, not yet read: spec.clusterIPs, or spec.clusterIP alone.
func (r *reading) clusterIPs() []string {
	spec := &r.svc.Spec
	if len(spec.ClusterIPs) == 0 {
		if spec.ClusterIP == "" {
			return nil
		}
		return []string{spec.ClusterIP}
	}
	if spec.ClusterIP != "" && spec.ClusterIP != spec.ClusterIPs[0] {
		r.add("spec.clusterIP", "ClusterIPsDiffer", "%s is not spec.clusterIPs[0]: spec.clusterIPs counts; make them equal",
			spec.ClusterIP)
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
		r.add("spec.trafficDistribution", "UnknownValue",
			"%q is unknown and not obeyed; use PreferSameZone, PreferSameNode or PreferClose", *spec.TrafficDistribution)
	}
}

// readPolicy reports whether a traffic policy is Local.
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
		r.add("spec.sessionAffinity", "UnknownValue", "%q is unknown: taken as None; use None or ClientIP",
			spec.SessionAffinity)
		return
	}
	seconds := corev1.DefaultClientIPServiceAffinitySeconds
	if c := spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		if t := *c.ClientIP.TimeoutSeconds; t > 0 && t <= 86400 {
			seconds = t
		} else {
			r.add("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "InvalidTimeout",
				"%d is not from 1 to 86400: %d seconds are used; use a number in that range", t, seconds)
		}
	}
	r.out.affinity = time.Duration(seconds) * time.Second
}

// sourceRanges is the field of the permitted sources of ingress addresses.
const sourceRanges = "spec.loadBalancerSourceRanges"

// readSources takes the permitted sources of ingress addresses. A family of which no range is given is not restricted,
// unless one can't be read.
func (r *reading) readSources() {
	const field = sourceRanges
	list := r.svc.Spec.LoadBalancerSourceRanges
	if len(list) == 0 {
		return
	}
	if !r.isLoadBalancer() {
		r.add(field, "SourceRangesLeftOut", "source ranges restrict nothing on a Service whose type is not LoadBalancer; "+
			"remove them, or use a NetworkPolicy")
		return
	}
	r.out.sources = make([]netip.Prefix, 0, len(list))
	for i, s := range list {
		p, err := parsePrefix(strings.TrimSpace(s))
		if err != nil {
			r.flawed(fmt.Sprintf("%s[%d]", field, i), err, "it allows no source; correct it")
			r.out.restricted = families{true, true}
			continue
		}
		r.out.restricted.add(familyOf(p.Addr()))
		r.out.sources = append(r.out.sources, p)
	}
	r.out.sources = outermost(r.out.sources)
}

// warnOpen names ingress addresses that source ranges leave open since none is of their family, unless all ranges are
// of every address.
func (r *reading) warnOpen() {
	if !slices.ContainsFunc(r.out.sources, func(p netip.Prefix) bool { return p.Bits() > 0 }) {
		return
	}
	for _, w := range r.out.ingressAddresses {
		if f := familyOf(w.addr); w.via == viaLoadBalancer && !r.out.restricted.has(f) {
			r.add(sourceRanges, "SourceRangesOneFamily", "no range is of %s: every client is let in at %s; add "+
				"ranges of %[1]s",
				f, w.addr)
		}
	}
}

func (r *reading) readHealth() {
	n := r.svc.Spec.HealthCheckNodePort
	if n == 0 {
		return
	}
	const field = "spec.healthCheckNodePort"
	if !r.isLoadBalancer() || !r.out.external {
		r.add(field, "HealthCheckLeftOut", "a health check is for type LoadBalancer with externalTrafficPolicy Local: none "+
			"is served; remove the port")
		return
	}
	port, err := parsePort(n)
	if err != nil {
		r.flawed(field, err, "no health check is served; correct it")
	}
	r.out.health = port
}

// addAddress adds an address if it can be served.
func (r *reading) addAddress(s string, v via, i int) {
	addr, err := parseAddr(s)
	if err == nil && !r.families.has(familyOf(addr)) {
		err = &flaw{"WrongFamily", fmt.Sprintf("%s is of an IP family that the Service doesn't have", addr)}
	}
	if err != nil {
		r.flawed(field(v, i, 0), err, "it is not served; correct or remove it")
		return
	}
	r.out.ingressAddresses = append(r.out.ingressAddresses, ingressAddress{addr, v, i})
}

// addIngress adds the addresses of load balancers that leave the destination address as it is (KEP-1860: ipMode VIP).
func (r *reading) addIngress() {
	list := r.svc.Status.LoadBalancer.Ingress
	if len(list) > 0 && !r.isLoadBalancer() {
		r.add("status.loadBalancer", "IngressLeftOut",
			"the type is not LoadBalancer: nothing is served at its ingress addresses; set the type, or clear the status")
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
			r.addAddress(list[i].IP, viaLoadBalancer, i)
		default:
			r.add(fmt.Sprintf("status.loadBalancer.ingress[%d].ipMode", i), "UnknownValue",
				"%q is unknown: nothing is served there; use VIP or Proxy", mode)
		}
	}
}
