package link

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// TestChangesOfInterest passes messages about interfaces to the filters of those who watch them.
func TestChangesOfInterest(t *testing.T) {
	message := func(kind uint16, index uint32, name string, mtu uint32) netlink.Message {
		b := make(netlink.Buffer, unix.SizeofIfInfomsg)
		binary.NativeEndian.PutUint32(b[4:], index)
		b.Text(unix.IFLA_IFNAME, name)
		b.Uint32(unix.IFLA_MTU, mtu)
		return netlink.Message{Type: kind, Body: b}
	}
	renamed, other := Renamed(), differing(interfaceOf)
	for i, c := range []struct {
		netlink.Message
		gone, renamed, other bool
	}{
		{message(unix.RTM_NEWLINK, 7, "eth7", 1500), false, true, true},
		{message(unix.RTM_NEWLINK, 7, "eth7", 1500), false, false, false}, // its carrier
		{message(unix.RTM_NEWLINK, 7, "eth7", 1400), false, false, true},
		{message(unix.RTM_NEWLINK, 8, "eth8", 1400), false, true, true},
		{message(unix.RTM_NEWLINK, 7, "wan", 1400), false, true, true},
		{message(unix.RTM_DELLINK, 7, "wan", 1400), true, true, true},
		{message(unix.RTM_NEWLINK, 7, "wan", 1400), false, true, true},
		{message(unix.RTM_NEWLINK, 8, "eth8", 1400), false, false, false},
	} {
		if Gone(c.Message) != c.gone || renamed(c.Message) != c.renamed || other(c.Message) != c.other {
			t.Errorf("message %d is not of interest as it should be", i)
		}
	}
}
