package flows

import (
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/nft"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// PreservedTable is the name of the table of nf_tables that Keep makes.
const PreservedTable = "fairlead-kept"

const chain = "translate"

// retained is that table. Its one chain has the kernel translate connections, at all hooks.
var retained = &nft.Table[nft.Key]{
	Name: PreservedTable, Layout: "layout 1", Comment: "translates connections that began with others' rules",
	Hooks: map[string]*nftables.Hook{chain: {Type: "nat", Number: unix.NF_INET_PRE_ROUTING, Priority: -100}},
	Of:    func(k nft.Key) nft.Key { return k },
}

// tracks is a rule that does nothing: it has the kernel track connections.
var tracks = [][]nftables.Expr{{nftables.Ct(nftables.CtStatus, nftables.R(0))}}

// Preserve has the kernel go on translating the TCP connections that it tracks in the calling thread's network
// namespace, when what began them goes: with the last chain of type nat, whosever it is, all translation would end
// (net/netfilter/nf_nat_core.c, nf_nat_unregister_fn). Where there are none, and none of the tables named, from which
// some may begin yet, nothing is changed.
func Preserve(tables ...string) error {
	return change(func(conn *nftables.Conn, c *conntrack.Conn, held []string) error {
		if slices.Contains(held, PreservedTable) {
			return nil
		}
		n, err := each(c, func(f conntrack.Flow) (counts, cuts bool) { return translated(f) && lives(f), false })
		if n > 0 || slices.ContainsFunc(tables, func(t string) bool { return slices.Contains(held, t) }) {
			err = errors.Join(err, retained.Write(conn, append(retained.Frame(), retained.Chain(chain, tracks)), nil))
		}
		return err
	})
}

// Entries are where frontends are, and, without a port, other nodes' addresses at which node ports are served.
type Entries map[model.Entry]bool

// EntriesOf returns those of a model's parts.
func EntriesOf(parts []model.ServicePart) Entries {
	l := Entries{}
	for _, p := range parts {
		switch v := p.(type) {
		case *model.Frontend:
			l[v.Entry] = true
		case *model.ServiceNode:
			for _, a := range v.RemoteNodePorts {
				l[model.Entry{Addr: a}] = true
			}
		}
	}
	return l
}

// has reports whether a flow goes to one. own are the node's addresses.
func (l Entries) has(f conntrack.Flow, own map[netip.Addr]bool) bool {
	e := model.Entry{Addr: f.Destination.Addr(), Port: f.Destination.Port(), Protocol: model.Protocol(f.Protocol)}
	if l[e] || !own[e.Addr] && !l[model.Entry{Addr: e.Addr}] {
		return l[e]
	}
	e.Addr = inet.Unspecified(e.Addr)
	return l[e]
}

// Release undoes Keep once no TCP connection to one of the entries is translated any more, and returns how many are.
// Flows of UDP that are it cuts: whoever serves the entries now selects their clients' backend. With masqueraded it
// waits for TCP connections with a translated source, too. Without entries it waits for nothing.
func Release(entries Entries, masqueraded bool) (connections int, err error) {
	err = change(func(conn *nftables.Conn, c *conntrack.Conn, tables []string) error {
		if !slices.Contains(tables, PreservedTable) {
			return nil
		}
		if entries != nil {
			own, err := c.Addresses()
			if err != nil {
				return err
			}
			connections, err = each(c, func(f conntrack.Flow) (counts, cuts bool) {
				ours := translated(f) && entries.has(f, own)
				return (ours || masqueraded && f.Reply != f.Source) && lives(f), ours && f.Protocol == uint8(model.UDP)
			})
			if err != nil || connections > 0 {
				return err
			}
		}
		return retained.Clean(conn)
	})
	return connections, err
}

// CutUntranslated deletes the connection tracking entries of connections to and from the frontends at entries that are
// not translated, such as a proxy leaves behind: of TCP those that are closing or still opening, of other protocols
// all. Left there, such an entry keeps a client that reuses its port from being translated, and each packet renews it.
func CutUntranslated(entries Entries) error {
	c, err := conntrack.Open()
	if err != nil {
		return err
	}
	defer c.Close()
	own, err := c.Addresses()
	if err != nil {
		return err
	}
	_, err = c.Cut(func(f conntrack.Flow) bool { return f.ReplySource == f.Destination && entries.lost(f, own) })
	return err
}

// lost reports whether CutUntranslated deletes an untranslated flow.
func (l Entries) lost(f conntrack.Flow, own map[netip.Addr]bool) bool {
	if f.Protocol == uint8(model.TCP) {
		return (f.Opening || f.Closing) && l.has(f, own)
	}
	reversed := f // of a proxy, where the kernel saw these first
	reversed.Destination = f.Source
	return l.has(f, own) || l.has(reversed, own)
}

// lives reports whether a flow is a TCP connection that has not ended.
func lives(f conntrack.Flow) bool { return f.Protocol == uint8(model.TCP) && !f.Ended }

// translated reports whether the kernel translates a flow's destination.
func translated(f conntrack.Flow) bool { return f.ReplySource != f.Destination }

// each queries about every flow, cuts those that are to be, and counts those that count.
func each(c *conntrack.Conn, classify func(conntrack.Flow) (counts, cuts bool)) (n int, err error) {
	_, err = c.Cut(func(f conntrack.Flow) (cuts bool) {
		counts, cuts := classify(f)
		if counts {
			n++
		}
		return cuts
	})
	return n, err
}

// change calls f with the tables that there are. Where the kernel has no nf_tables there is nothing to change.
func change(f func(conn *nftables.Conn, c *conntrack.Conn, tables []string) error) error {
	conn, err := nftables.Open()
	if errors.Is(err, nftables.ErrAbsent) {
		return nil
	}
	if err != nil {
		return err
	}
	defer conn.Close()
	tables, err := conn.Tables()
	if err != nil {
		return err
	}
	flows, err := conntrack.Open()
	if err != nil {
		return err
	}
	defer flows.Close()
	return f(conn, flows, tables)
}
