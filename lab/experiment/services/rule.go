package services

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/lab/testbed"
)

// translate writes one rule into the node's kernel: what it sends to one TCP port goes to another address.
func translate(p *testbed.Pair, from, to netip.AddrPort) error {
	addr, port := from.Addr().As4(), func(a netip.AddrPort) []byte { return binary.BigEndian.AppendUint16(nil, a.Port()) }
	is := func(load nft.Expr, v []byte) []nft.Expr { return []nft.Expr{load, nft.Cmp(nft.Eq, nft.R(0), v)} }
	var tx nft.Tx
	tx.AddTable("lab")
	tx.AddChain("lab", nft.Chain{Name: "output", Hook: &nft.Hook{Type: "nat", Number: unix.NF_INET_LOCAL_OUT,
		Priority: -100}})
	tx.AddRule("lab", "output", nft.Rule{Comment: "the only one", Exprs: slices.Concat(
		is(nft.Meta(nft.MetaNFProto, nft.R(0)), []byte{unix.NFPROTO_IPV4}),
		is(nft.Payload(nft.NetworkHeader, 16, 4, nft.R(0)), addr[:]),
		is(nft.Meta(nft.MetaL4Proto, nft.R(0)), []byte{unix.IPPROTO_TCP}),
		is(nft.Payload(nft.TransportHeader, 2, 2, nft.R(0)), port(from)),
		[]nft.Expr{nft.Load(nft.R(0), to.Addr().AsSlice()), nft.Load(nft.R(1), port(to)),
			nft.DNAT(unix.NFPROTO_IPV4, nft.R(0), nft.R(1))},
	)})
	err := p.Near.Do(func() error {
		c, err := nft.Open()
		if err != nil {
			return err
		}
		return errors.Join(c.Commit(&tx), c.Close())
	})
	if err != nil {
		return fmt.Errorf("write the one rule of %s: %w", p.Near.Name, err)
	}
	return nil
}
