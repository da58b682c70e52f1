package flows

import (
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Kept is the name of the table of nf_tables that Keep makes.
const Kept = "fairlead-kept"

const chain = "translate"

// tracks is a rule that does nothing: it has the kernel track connections.
var tracks = nftables.Rule{Comment: "translates connections that began with others' rules", Exprs: nftables.Exprs(nftables.Ct(nftables.CtStatus, 1))}

// translating has the kernel translate them, at all hooks.
var translating = nftables.Hook{Type: "nat", Number: unix.NF_INET_PRE_ROUTING, Priority: -100}

// translators are tables of ours and of a kube-proxy whose chains have the kernel translate.
var translators = []string{"fairlead", "kube-proxy"}

// Keep has the kernel go on translating the TCP connections that it tracks in the calling thread's network namespace, when what began them
// goes: with the last chain of type nat, whosever it is, all translation would end (net/netfilter/nf_nat_core.c, nf_nat_unregister_fn).
// Where there are none, and nobody who could begin any, nothing is changed.
func Keep() error {
	return change(func(tx *nftables.Tx, tables []string) error {
		n, err := translated()
		begin := slices.ContainsFunc(tables, func(t string) bool { return slices.Contains(translators, t) })
		if !slices.Contains(tables, Kept) && (n > 0 || begin) {
			tx.AddTable(Kept)
			tx.AddChain(Kept, nftables.Chain{Name: chain, Hook: &translating})
			tx.AddRule(Kept, chain, tracks)
		}
		return err
	})
}

// Release undoes Keep once there are no such connections any more, or at once. It gives how many there are, if it waits for them.
func Release(atOnce bool) (connections int, err error) {
	err = change(func(tx *nftables.Tx, tables []string) (err error) {
		if !slices.Contains(tables, Kept) {
			return nil
		}
		if !atOnce {
			connections, err = translated()
		}
		if connections == 0 {
			tx.DelTable(Kept)
		}
		return err
	})
	return connections, err
}

// translated gives the number of TCP connections whose destination the kernel translates.
func translated() (connections int, err error) {
	flows, err := conntrack.Open()
	if err != nil {
		return 0, err
	}
	defer flows.Close()
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		n, err := flows.Count(family, func(f conntrack.Flow) bool { return f.Protocol == uint8(model.TCP) && f.Answers != f.Destination })
		if err != nil {
			return 0, err
		}
		connections += n
	}
	return connections, nil
}

// change writes what f says, who learns which tables there are.
func change(f func(tx *nftables.Tx, tables []string) error) error {
	conn, err := nftables.Open()
	if err != nil {
		return err
	}
	tables, err := conn.Tables()
	var tx nftables.Tx
	if err == nil {
		err = f(&tx, tables)
	}
	if err == nil && !tx.Empty() {
		err = conn.Commit(&tx)
	}
	return errors.Join(err, conn.Close())
}
