package migrate

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/kernel/nftables"
)

// eachFamily returns the families in which there is a kube-proxy's table of nf_tables.
func eachFamily(do func(c *nftables.Conn, family uint8) error) error {
	c, err := nftables.Open()
	if err != nil {
		return nil // this kernel has no nf_tables
	}
	defer c.Close()
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		there, err := c.Has(family, table)
		if err != nil {
			return err
		}
		if there {
			if err := do(c, family); err != nil {
				return err
			}
		}
	}
	return nil
}

// remove removes everything of a kube-proxy's, each table at once. What can't be removed doesn't keep the rest.
func remove(ctx context.Context, o Options) error {
	var errs []error
	err := eachTable(ctx, func(c *iptables.Conn, f iptables.Family, _ *iptables.Table, text string) error {
		errs = append(errs, c.Restore(ctx, f, []byte(text)))
		return nil
	})
	errs = append(errs, err, eachFamily(func(c *nftables.Conn, family uint8) error {
		var tx nftables.Tx
		tx.DelForeign(family, table)
		return c.Commit(&tx)
	}))
	return errors.Join(append(errs, removeIPVS(o.Exclude))...)
}
