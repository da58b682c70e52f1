package ipvs

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

func TestDeliveryIsMadeReadAndDeleted(t *testing.T) {
	netnstest.With(t, netns.Current, func(ns *netns.Namespace) {
		c, err := link.Dial(ns)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		s, err := netlink.Open(unix.NETLINK_ROUTE, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer s.Close()
		check := func(errs ...error) {
			t.Helper()
			if err := errors.Join(errs...); err != nil {
				t.Error(err)
			}
		}
		check(c.Up(1))
		for _, f := range protos {
			d := deliveryOf(f)
			is := func(want string) {
				t.Helper()
				if got, err := d.read(s); got != want || err != nil {
					t.Errorf("IPv%s: %q, %v, want %q", f.Name, got, err, want)
				}
			}
			is("")
			check(d.put(s), d.put(s))
			is(d.String())
			other := d
			other.rule.Mark++
			check(other.put(s))
			is("2 rules, 1 routes")
			check(d.remove(s), d.remove(s))
			is("")
			other.rule.Owner, other.route.Owner = owner+1, owner+1
			check(other.put(s))
			is("") // another's
			check(other.remove(s))
		}
	})
}
