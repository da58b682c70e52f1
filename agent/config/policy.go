package config

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// PolicyMode returns what to do with network policies.
type PolicyMode string

// EnvPolicyMode is the environment variable that has the mode where neither flags nor a file say it.
const EnvPolicyMode = "FAIRLEAD_POLICY_MODE"

// The choices.
const (
	PoliciesIgnore  PolicyMode = "Ignore"
	PoliciesAudit   PolicyMode = "Audit"
	PoliciesEnforce PolicyMode = "Enforce"
)

// Established is what becomes of open connections that policies no longer allow.
type Established string

// The choices.
const (
	CutEstablished   Established = "Cut"
	AllowEstablished Established = "Keep"
)

// DefaultCutMark is the bit of the connection mark by which connections are cut unless another is configured.
const DefaultCutMark = 1 << 31

// DefaultResolvers is the Service of the resolvers that teach domain names unless others are configured.
const DefaultResolvers = "kube-system/kube-dns"

// defaultResolvers sets the resolvers where none are configured.
func (p *PolicyConfiguration) defaultResolvers() {
	if p.Resolvers == nil {
		p.Resolvers = []string{DefaultResolvers}
	}
}

// Resolvers returns the Services and the addresses of the resolvers that teach domain names.
func (c *Config) Resolvers() (services []model.Owner, addresses []netip.AddrPort) {
	for _, text := range c.Own.Policy.Resolvers {
		if o, a, err := resolver(text); err == nil && a.IsValid() {
			addresses = append(addresses, a)
		} else if err == nil {
			services = append(services, o)
		}
	}
	return services, addresses
}

// resolver reads an item of policy.resolvers: a Service, or an address with or without a port.
func resolver(text string) (o model.Owner, a netip.AddrPort, err error) {
	const port = 53
	if namespace, name, found := strings.Cut(text, "/"); found && namespace != "" && name != "" &&
		!strings.Contains(name, "/") {
		return model.Owner{Kind: model.KindService, Namespace: namespace, Name: name}, a, nil
	}
	if ip, err := netip.ParseAddr(text); err == nil && ip.Zone() == "" {
		return o, netip.AddrPortFrom(ip.Unmap(), port), nil
	}
	if a, err = netip.ParseAddrPort(text); err == nil && a.Addr().Zone() == "" && a.Port() != 0 {
		return o, netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), nil
	}
	return o, a, errors.New("must be an address, such as 169.254.20.10, or a Service, such as kube-system/kube-dns")
}

// Policies reports whether network policies are read.
func (c *Config) Policies() bool { return c.Own.Policy.Mode != PoliciesIgnore }

// ChecksSources reports whether policies check by which device pods' packets come in.
func (c *Config) ChecksSources() bool { return c.Own.Policy.SourceCheck != IgnoreSources }

// ResolvePolicies returns what the resolver of policies is told, beside what that of Services is told.
func (c *Config) ResolvePolicies(services resolve.Config) policy.Config {
	bit := c.Own.Policy.CutMark
	if c.Own.Policy.Established == AllowEstablished {
		bit = 0
	}
	return policy.Config{Node: services.Node, Addresses: services.Addresses, PodRanges: c.clusterCIDRs(), CutMark: bit,
		Audit: c.Own.Policy.Mode == PoliciesAudit, UnknownPods: c.Own.Policy.UnknownPods,
		ImpliedNamespaces: c.Own.Source != ""}
}

// clusterCIDRs returns the ranges of the cluster's pods, as far as the configuration names them.
func (c *Config) clusterCIDRs() (ranges []netip.Prefix) {
	for text := range strings.SplitSeq(c.Proxy.ClusterCIDR, ",") {
		if r, err := resolve.ParsePrefix(strings.TrimSpace(text)); err == nil {
			ranges = append(ranges, r)
		}
	}
	return ranges
}

// policy checks the settings of policies.
func (k *checks) policy(c *PolicyConfiguration) {
	at := field.NewPath("policy")
	k.oneOf(at.Child("mode"), string(c.Mode), string(PoliciesIgnore), string(PoliciesAudit), string(PoliciesEnforce))
	k.oneOf(at.Child("unknownPods"), string(c.UnknownPods), string(policy.DenyUnknownPods),
		string(policy.AllowUnknownPods))
	k.oneOf(at.Child("established"), string(c.Established), string(CutEstablished), string(AllowEstablished))
	k.oneOf(at.Child("sourceCheck"), string(c.SourceCheck), string(CheckSources), string(IgnoreSources))
	if c.CutMark == 0 || c.CutMark&(c.CutMark-1) != 0 {
		k.ours(at.Child("cutMark"), "policy-cut-mark", fmt.Sprintf("%#x", c.CutMark), "use one bit, such as 0x80000000")
	}
	for i, text := range c.Resolvers {
		if _, _, err := resolver(text); err != nil {
			k.errs = append(k.errs, field.Invalid(at.Child("resolvers").Index(i), text, err.Error()))
		}
	}
	if c.Engine == mode.Auto {
		return
	}
	if _, err := mode.EngineOf(c.Engine); err != nil {
		k.ours(at.Child("engine"), "policy-engine", c.Engine, err.Error())
	}
}
