package nftables

import (
	"slices"

	"fairlead.dev/fairlead/kernel/netlink"
)

// Has reports whether there is a table of that name in another family than this package writes, such as NFPROTO_IPV4.
func (c *Conn) Has(family uint8, table string) (there bool, err error) {
	tables, err := c.tables(family)
	return slices.Contains(tables, table), err
}

// DelForeign removes a table of another family and everything in it.
func (t *Tx) DelForeign(family uint8, table string) {
	t.add(msgDelTable, 0, family, func() string { return "delete table " + table },
		func(b *netlink.Buffer) { b.Text(1, table) })
}

// DelRule removes a rule of a table of another family.
func (t *Tx) DelRule(family uint8, table, chain string, handle uint64) {
	t.add(msgDelRule, 0, family, func() string { return "delete rule of chain " + chain }, func(b *netlink.Buffer) {
		b.Text(1, table)
		b.Text(2, chain)
		b.BE64(3, handle)
	})
}
