package nftables

import (
	"encoding/binary"
	"slices"

	"fairlead.dev/fairlead/kernel/nlattr"
	"golang.org/x/sys/unix"
)

// Has says whether there is a table of that name in another family than this package writes, such as NFPROTO_IPV4.
func (c *Conn) Has(family uint8, table string) (there bool, err error) {
	err = c.stable(func() error {
		var names []string
		err := c.dump(msgGetTable, unix.NLM_F_DUMP, of(family, func(*buffer) {}), func(b []byte) { names = append(names, nlattr.Text(nlattr.Find(b, 1))) })
		there = slices.Contains(names, table)
		return err
	})
	return there, err
}

// DelForeign removes a table of another family and everything in it.
func (t *Tx) DelForeign(family uint8, table string) {
	at := header(&t.b, unix.NFNL_SUBSYS_NFTABLES<<8|msgDelTable, 0, uint32(len(t.said)+1), family, 0)
	t.b.str(1, table)
	binary.NativeEndian.PutUint32(t.b[at:], uint32(len(t.b)-at))
	t.said = append(t.said, "delete table "+table)
}
