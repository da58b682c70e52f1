package ipvs

import (
	"fmt"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/rule"
)

// owner marks our rules and routes (FRA_PROTOCOL, rtm_protocol), and is the priority of our rules and the number of our
// table.
const owner = 0x5e

// delivery has packets of a family that a frontend takes delivered to this host, whatever their address: a rule that
// leads what carries a mark to a table, and a local route to everything there.
type delivery struct {
	rule  rule.Rule
	route route.Route
}

func deliveryOf(f *proto) delivery {
	return delivery{
		rule.Rule{Owner: owner, Six: f.Any.Is6(), Priority: owner, Table: owner, Mark: claimed, Mask: ourBits},
		route.Route{Owner: owner, Table: owner, Type: route.Local, To: netip.PrefixFrom(f.Any, 0), Dev: 1},
	}
}

// String returns the value of its fact.
func (d delivery) String() string { return d.rule.String() }

// put makes the route, then the rule. What is there already is no error.
func (d delivery) put(s *netlink.Socket) error {
	b := route.NewBatch()
	route.Put(b, d.route)
	rule.Put(b, d.rule)
	return s.Apply(b)
}

// remove removes all of our rules and routes of the family, in this order. That there are none is no error.
func (d delivery) remove(s *netlink.Socket) error {
	rules, routes, err := d.list(s)
	if err != nil {
		return err
	}
	b := route.NewBatch()
	rule.Delete(b, rules...)
	route.Delete(b, routes...)
	return s.Apply(b)
}

// read describes our rules and routes of the family: as String where they are as put makes them, "" where there are
// none, and otherwise with something else.
func (d delivery) read(s *netlink.Socket) (string, error) {
	rules, routes, err := d.list(s)
	if err != nil || len(rules)+len(routes) == 0 {
		return "", err
	}
	if len(rules) != 1 || len(routes) != 1 || routes[0].Type != route.Local {
		return fmt.Sprintf("%d rules, %d routes", len(rules), len(routes)), nil
	}
	return rules[0].String(), nil
}

// list lists our rules and routes of the family.
func (d delivery) list(s *netlink.Socket) ([]rule.Rule, []route.Route, error) {
	rules, err := rule.List(s, d.rule.Owner)
	if err != nil {
		return nil, nil, err
	}
	routes, err := route.List(s, d.route.Owner)
	if err != nil {
		return nil, nil, err
	}
	rules = slices.DeleteFunc(rules, func(r rule.Rule) bool { return r.Six != d.rule.Six || r.Table != d.rule.Table })
	routes = slices.DeleteFunc(routes, func(r route.Route) bool {
		return r.To.Addr().Is6() != d.rule.Six || r.Table != d.route.Table
	})
	return rules, routes, nil
}
