package config

import (
	"fmt"
	"net/netip"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"fairlead.dev/fairlead/agent/mode"
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

// Policies reports whether network policies are read.
func (c *Config) Policies() bool { return c.Own.Policy.Mode != PoliciesIgnore }

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
	if c.CutMark == 0 || c.CutMark&(c.CutMark-1) != 0 {
		k.ours(at.Child("cutMark"), "policy-cut-mark", fmt.Sprintf("%#x", c.CutMark), "use one bit, such as 0x80000000")
	}
	if c.Engine == mode.Auto {
		return
	}
	if _, err := mode.EngineOf(c.Engine); err != nil {
		k.ours(at.Child("engine"), "policy-engine", c.Engine, err.Error())
	}
}
