package names

import (
	"net/netip"

	"fairlead.dev/fairlead/kernel/conntrack"
)

// tracked is the connections that the kernel tracks in one network namespace.
type tracked struct{ *conntrack.Conn }

// connections calls f with the ends of each that is open: the client, and the address that it has reached.
func (t tracked) connections(f func(client, to netip.Addr)) error {
	_, err := t.Remark(0, func(c conntrack.Tracked) uint32 {
		if !c.Ended {
			f(c.Source.Addr(), c.ReplySource.Addr())
		}
		return c.Mark
	})
	return err
}
