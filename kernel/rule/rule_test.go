package rule

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

func check(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func TestRulesThatMatchMore(t *testing.T) {
	ns := netnstest.New(t)
	s, err := netlink.OpenIn(ns, unix.NETLINK_ROUTE)
	check(t, err)
	t.Cleanup(func() { s.Close() })
	const owner = 0xee
	for _, more := range []string{"", "fwmark 5", "oif lo", "uidrange 5-7", "tos 0x10", "not"} {
		check(t, ns.Do(func() error {
			args := append([]string{"rule", "add"},
				strings.Fields(more+" dport 80 ipproto tcp lookup 7 pref 60 protocol 238")...)
			if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
				return fmt.Errorf("%q: %w: %s", args, err, out)
			}
			return nil
		}))
		rules, err := List(s, owner)
		check(t, err)
		want := Rule{Owner: owner, Priority: 60, Protocol: 6, ToPort: PortRange{80, 80}, Table: 7,
			More: more != "" && more != "fwmark 5"}
		if more == "fwmark 5" {
			want.Mark, want.Mask = 5, ^uint32(0)
		}
		if len(rules) != 1 || rules[0] != want {
			t.Errorf("%q: rules %v, want %v", more, rules, want)
		}
		b := netlink.Batch{}
		Delete(&b, want)
		check(t, s.Apply(&b))
		if rules, err := List(s, owner); err != nil || len(rules) != 0 {
			t.Errorf("%q: left %v, %v", more, rules, err)
		}
	}
}
