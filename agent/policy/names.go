package policy

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/agent/policy/names"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Resolvers are the resolvers of DNS that teach the addresses of domain names: the addresses and endpoints of
// Services, and further addresses.
type Resolvers struct {
	Services  []model.Owner
	Addresses []netip.AddrPort
	AnyDevice bool // their answers count whatever device they came in by
}

// domainNames is what a node knows of the domain names that policies name. Its fields are under the mutex of Policies,
// but for the learner.
type domainNames struct {
	learner   *names.Learner // nil: none can be had
	unable    error          // why
	resolvers Resolvers
	known     map[netip.AddrPort]int // frontends and backends of the Services
	begun     bool                   // the resolver of policies has what the agent before had recorded
}

// connections is an engine that has flows of its own.
type connections interface {
	// Connections calls a function with the ends of each open connection: the client, and the address that it has
	// reached.
	Connections(func(client, to netip.Addr)) error
}

// openNames opens what learns domain names. Without it rules with a name match nothing, and a problem says so.
func openNames(o Options, engine any, apply func(context.Context, []source.Change),
	log *slog.Logger) *domainNames {
	d := &domainNames{resolvers: o.Resolvers, known: map[netip.AddrPort]int{}}
	options := names.Options{Apply: apply, Floor: o.NameFloor, Hold: o.NameHold, AnyDevice: o.Resolvers.AnyDevice,
		Log: log.With("plane", "dns")}
	if c, ok := engine.(connections); ok {
		options.Connections = c.Connections
	}
	d.learner, d.unable = names.Open(options)
	return d
}

// changes returns changes of objects, the first time with the names that the agent before had recorded.
func (d *domainNames) changes(l []source.Change) []source.Change {
	if d.begun || d.learner == nil {
		return l
	}
	d.begun = true
	return append(d.learner.Known(), l...)
}

// followServices has the addresses and endpoints of the resolvers' Services count as resolvers.
func (d *domainNames) followServices(c model.Change[model.ServicePart]) {
	if d.learner == nil {
		return
	}
	count := func(parts []model.ServicePart, n int) {
		for _, x := range parts {
			for _, a := range d.addressesOf(x) {
				if d.known[a] += n; d.known[a] == 0 {
					delete(d.known, a)
				}
			}
		}
	}
	count(c.Put, 1)
	count(c.Del, -1)
	d.learner.SetResolvers(slices.AppendSeq(slices.Clone(d.resolvers.Addresses), maps.Keys(d.known)))
}

// addressesOf returns the addresses of a part of one of the resolvers' Services.
func (d *domainNames) addressesOf(x model.ServicePart) (l []netip.AddrPort) {
	switch x := x.(type) {
	case *model.Frontend:
		if slices.Contains(d.resolvers.Services, x.Owner) && !x.Entry.AnyAddr() {
			l = append(l, netip.AddrPortFrom(x.Entry.Addr, x.Entry.Port))
		}
	case *model.Pool:
		if slices.Contains(d.resolvers.Services, x.Owner) {
			for _, b := range append(slices.Clone(x.Backends), x.Unselected...) {
				l = append(l, b.Addr)
			}
		}
	}
	return l
}

// follow passes on what policies come to.
func (d *domainNames) follow(c model.Change[model.PolicyPart]) {
	if d.learner != nil {
		d.learner.Follow(c)
	}
}

// run learns until ctx ends.
func (d *domainNames) run(ctx context.Context, log *slog.Logger) {
	if d.learner == nil {
		return
	}
	if !d.learner.Held() {
		log.Warn("this kernel can't hold DNS answers (CONFIG_NETFILTER_XT_TARGET_NFQUEUE): a pod's first packet to a " +
			"domain name that a policy allows may be dropped, and pass when it is sent again")
	}
	if err := d.learner.Run(ctx); err != nil {
		log.Warn("addresses of domain names are no longer learned: restart the agent", "error", err)
	}
}

// holds reports whether answers may wait in a queue.
func (d *domainNames) holds() bool {
	if d.learner == nil || !d.learner.Held() {
		return false
	}
	pods, _ := d.learner.Needed()
	return pods
}

// close ends it.
func (d *domainNames) close() error {
	if d.learner == nil {
		return nil
	}
	return d.learner.Close()
}

// nameProblems returns the problem that rules with domain names match nothing, if there is one. p.mu is held.
func (p *Policies) nameProblems() []source.Problem {
	message := ""
	switch pods, resolvers := p.namesNeeded(); {
	case !pods:
	case p.names.learner == nil:
		message = p.names.unable.Error()
	case !resolvers:
		message = "none of policy.resolvers is known: set it to the addresses of the resolvers that pods use, or to their " +
			"Service"
	default:
		if s := p.names.learner.Status(); s.Error != "" {
			message = s.Error
		}
	}
	if message == "" {
		return nil
	}
	return []source.Problem{{Object: source.Key{Kind: source.Node, Name: p.Resolve.Node}, Reason: "NamesNotLearned",
		Message: "rules with domainNames match nothing that isn't known already: " + message}}
}

// namesNeeded reports whether a pod of this node has a rule with a domain name, and whether there is a resolver. p.mu
// is held.
func (p *Policies) namesNeeded() (pods, resolvers bool) {
	if p.names.learner == nil {
		return p.resolver.NamesInUse(), false
	}
	return p.names.learner.Needed()
}

var (
	namesDesc = prometheus.NewDesc("fairlead_policy_domain_names", "Domain names that policies name and that DNS answers "+
		"have taught, and their addresses.", []string{"kind"}, nil)
	answersDesc = prometheus.NewDesc("fairlead_policy_dns_answers_total", "DNS answers to pods whose policies name "+
		"domain names, by outcome: taught; unsolicited, no query of the pod waits for it; forged, it came in by "+
		"another device than leads back to the resolver; limited, the pod has taught too much of late; late, let go after "+
		"50 ms before its addresses were in force; resent, the kernel dropped it while it waited; copied, taught though "+
		"it was let go at once, as its pod is beyond its share; unread, messages, queries too, that passed unread, as their "+
		"pod is far beyond; lost, a socket was full.",
		[]string{"outcome"}, nil)
	goneDesc = prometheus.NewDesc("fairlead_policy_domain_addresses_removed_total", "Addresses of domain names that "+
		"expired, or were evicted because there are too many of a name or names of a domain.", []string{"reason"}, nil)
)

// collect makes metrics of what was learned.
func (d *domainNames) collect(ch chan<- prometheus.Metric) {
	if d.learner == nil {
		return
	}
	c := d.learner.Counts()
	count := func(desc *prometheus.Desc, kind prometheus.ValueType, n float64, label string) {
		ch <- prometheus.MustNewConstMetric(desc, kind, n, label)
	}
	count(namesDesc, prometheus.GaugeValue, float64(c.Names), "names")
	count(namesDesc, prometheus.GaugeValue, float64(c.Addresses), "addresses")
	for outcome, n := range c.Answers {
		count(answersDesc, prometheus.CounterValue, float64(n), outcome)
	}
	count(goneDesc, prometheus.CounterValue, float64(c.Expired), "expired")
	count(goneDesc, prometheus.CounterValue, float64(c.Evicted), "evicted")
}
