package network

import (
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// TestConcernsRoutes passes messages about routes of several owners.
func TestConcernsRoutes(t *testing.T) {
	const others = 4 // RTPROT_STATIC
	for _, c := range []struct {
		kind, flags     uint16
		owner, protocol uint8
		want            bool
	}{
		{unix.RTM_NEWROUTE, 0, NodeRoutes, NodeRoutes, true},
		{unix.RTM_DELROUTE, 0, NodeRoutes, NodeRoutes, true},
		{unix.RTM_NEWROUTE, unix.NLM_F_REPLACE, NodeRoutes, NodeRoutes, true},
		{unix.RTM_NEWROUTE, unix.NLM_F_REPLACE, PodRoutes, NodeRoutes, false},
		{unix.RTM_NEWROUTE, unix.NLM_F_REPLACE, NodeRoutes, PodRoutes, false},
		{unix.RTM_DELROUTE, 0, PodRoutes, NodeRoutes, false},
		{unix.RTM_NEWROUTE, 0, others, NodeRoutes, false},
		{unix.RTM_NEWROUTE, unix.NLM_F_REPLACE, others, NodeRoutes, true},
		{unix.RTM_NEWLINK, 0, NodeRoutes, NodeRoutes, false},
	} {
		body := make([]byte, unix.SizeofRtMsg)
		body[0], body[5] = unix.AF_INET, c.owner
		if got := ConcernsRoutes(netlink.Message{Type: c.kind, Flags: c.flags, Body: body}, c.protocol); got != c.want {
			t.Errorf("%+v: got %t", c, got)
		}
	}
}
