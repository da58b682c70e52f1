package service

import (
	"fmt"
	"strings"
)

// Count is what became of a pool's clients on this node since the pool was written.
type Count struct {
	Connections uint64 // TCP connections and UDP flows that were forwarded to a backend
	Refused     uint64 // those that were rejected for lack of one
}

// PerService returns the sums of pools' counts by their Services, such as "shop/web:http"; "" leaves a pool out.
func PerService(counts map[uint64]Count, service func(pool uint64) string) map[string]Count {
	sums := map[string]Count{}
	for id, c := range counts {
		if name := service(id); name != "" {
			s := sums[name]
			sums[name] = Count{Connections: s.Connections + c.Connections, Refused: s.Refused + c.Refused}
		}
	}
	return sums
}

// Outcome is how many packets at network devices had an outcome, by its name in snake_case.
type Outcome struct {
	Name    string
	Packets uint64
}

// FastPath is whether packets to pods are redirected, bypassing the host stack, and why not.
type FastPath struct {
	IPv4    FamilyFastPath `json:"ipv4"`
	IPv6    FamilyFastPath `json:"ipv6"`
	Devices []string       `json:"excludedDevices"` // at which another program, a queue or a tap sees packets

	AllReasons []string `json:"-"` // all reasons that there are
}

// FamilyFastPath is the fast path of one family.
type FamilyFastPath struct {
	Enabled bool     `json:"enabled"`
	Reasons []string `json:"reasons"` // why not
	Hooks   []Hook   `json:"hooks"`   // of netfilter that would handle packets
}

// Hook is one of netfilter's that keeps packets on the host stack.
type Hook struct {
	Name    string `json:"name"`    // such as "table ip nat chain POSTROUTING", or a function of the kernel
	Owner   string `json:"owner"`   // the program that made it, as far as that can be told
	Command string `json:"command"` // by which it is listed
}

// String returns the hook, its owner and the command.
func (h Hook) String() string { return fmt.Sprintf("%s of %s: %s", h.Name, h.Owner, h.Command) }

// Netfilter is the reason of a FamilyFastPath that has Hooks.
const Netfilter = "netfilter"

// String returns "on", or "off" and why.
func (f FamilyFastPath) String() string {
	if f.Enabled {
		return "on"
	}
	words := make([]string, len(f.Reasons))
	for i, r := range f.Reasons {
		words[i] = r
		if r == Netfilter && len(f.Hooks) > 0 {
			hooks := make([]string, len(f.Hooks))
			for i, h := range f.Hooks {
				hooks[i] = h.String()
			}
			words[i] += fmt.Sprintf(" (%s)", strings.Join(hooks, ", "))
		}
	}
	return "off: " + strings.Join(words, ", ")
}

// Rejections is how many connections and flows were rejected since their frontend or their client reached its limit.
type Rejections struct{ Frontend, Client uint64 }

// RuleCounts is how many packets rules have matched.
type RuleCounts struct {
	InvalidDropped    uint64 // forwarded packets that connection tracking called invalid
	LocalhostAccepted uint64 // the first ones of connections to node ports at loopback addresses
}

// AffinityUse is how many session affinity entries a plane holds of those of one family that it has capacity for.
// Beyond the limit clients are served, but not remembered.
type AffinityUse struct {
	Family         string // "IPv4" or "IPv6"
	Entries, Limit int
}
