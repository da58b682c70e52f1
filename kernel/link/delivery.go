package link

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Delivery has packets of a family that carry a mark delivered to this host, whatever their address: a rule that leads them
// to a table, and a local route to everything there. Owner marks both (FRA_PROTOCOL, rtm_protocol).
type Delivery struct {
	Owner      uint8
	Six        bool // IPv6
	Priority   int  // of the rule
	Table      int
	Mark, Mask uint32
}

// String gives "rule 90 mark 0x5e/0xfff table 94".
func (d Delivery) String() string {
	return fmt.Sprintf("rule %d mark %#x/%#x table %d", d.Priority, d.Mark, d.Mask, d.Table)
}

func ipFamily(six bool) int {
	if six {
		return netlink.FAMILY_V6
	}
	return netlink.FAMILY_V4
}

func (d Delivery) route() *netlink.Route {
	to := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if d.Six {
		to = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return &netlink.Route{
		Dst: ipNet(to), Table: d.Table, Protocol: netlink.RouteProtocol(d.Owner), Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, LinkIndex: 1,
	}
}

func (d Delivery) rule() *netlink.Rule {
	r := netlink.NewRule()
	r.Family, r.Priority, r.Table, r.Protocol = ipFamily(d.Six), d.Priority, d.Table, d.Owner
	r.Mark, r.Mask = d.Mark, &d.Mask
	return r
}

// PutDelivery makes the route, then the rule. What is there already is no error.
func (c *Conn) PutDelivery(d Delivery) error {
	if err := c.h.RouteReplace(d.route()); err != nil {
		return fmt.Errorf("set the local route of table %d: %w", d.Table, err)
	}
	if err := c.h.RuleAdd(d.rule()); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add %v: %w", d, err)
	}
	return nil
}

// DeleteDeliveries removes an owner's rules and local routes of a family and a table, in this order. That there are none is no error.
func (c *Conn) DeleteDeliveries(owner uint8, six bool, table int) error {
	rules, routes, err := c.delivering(owner, six, table)
	if err != nil {
		return err
	}
	for _, r := range rules {
		if err := c.h.RuleDel(&r); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete rule %d for table %d: %w", r.Priority, table, err)
		}
	}
	for _, r := range routes {
		if err := c.h.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("delete route to %s of table %d: %w", r.Dst, table, err)
		}
	}
	return nil
}

// Deliveries describes an owner's rules for a table and its local routes there: as d.String() for a Delivery d that is whole
// and alone, "" where there is nothing, and something else where it is not as PutDelivery makes it.
func (c *Conn) Deliveries(owner uint8, six bool, table int) (string, error) {
	rules, routes, err := c.delivering(owner, six, table)
	if err != nil || len(rules)+len(routes) == 0 {
		return "", err
	}
	if len(rules) != 1 || len(routes) != 1 || routes[0].Type != unix.RTN_LOCAL || rules[0].Mask == nil {
		return fmt.Sprintf("%d rules, %d routes", len(rules), len(routes)), nil
	}
	return Delivery{Priority: rules[0].Priority, Table: table, Mark: rules[0].Mark, Mask: *rules[0].Mask}.String(), nil
}

// delivering lists what an owner has for a table.
func (c *Conn) delivering(owner uint8, six bool, table int) ([]netlink.Rule, []netlink.Route, error) {
	family := ipFamily(six)
	all, err := c.h.RuleListFiltered(family, &netlink.Rule{Table: table}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, nil, fmt.Errorf("list rules for table %d: %w", table, err)
	}
	var rules []netlink.Rule
	for _, r := range all {
		if r.Protocol == owner {
			r.Family = family
			rules = append(rules, r)
		}
	}
	routes, err := c.h.RouteListFiltered(family, &netlink.Route{Table: table, Protocol: netlink.RouteProtocol(owner)}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return nil, nil, fmt.Errorf("list routes of table %d: %w", table, err)
	}
	return rules, routes, nil
}
