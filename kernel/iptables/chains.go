package iptables

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/nftables"
)

// Chains reports whether nf_tables has a chain whose name begins so, also in tables that the iptables commands can't
// read.
func (c *Conn) Chains(prefix string) (there bool, err error) {
	chains, err := c.fullChains()
	return slices.ContainsFunc(chains, func(f *nftables.FullChain) bool { return strings.HasPrefix(f.Name, prefix) }), err
}

// fullChains returns all chains of nf_tables.
func (c *Conn) fullChains() (chains []*nftables.FullChain, err error) {
	err = c.nftables(func(n *nftables.Conn) error {
		chains, err = n.FullChains()
		return err
	})
	return chains, err
}

// nftables calls do with a connection to nf_tables.
func (c *Conn) nftables(do func(*nftables.Conn) error) error {
	return c.Do(func() error {
		n, err := nftables.Open()
		if err != nil {
			return err
		}
		defer n.Close()
		return do(n)
	})
}

// Unreadable begins a rule that matches something, or leads nowhere, in a chain that the commands can't print. Its
// handle follows, and where it leads, if it leads to a chain.
const Unreadable = "-m unreadable --handle "

// family returns the number of a family in nf_tables.
func (f Family) family() uint8 {
	if f == IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// saveOwn reads a table that save refuses since another owner put rules there, by nft, that it can't print. Chains are
// printed one by one; of those that can't be, the kernel says where the rules lead.
func (c *Conn) saveOwn(ctx context.Context, f Family, table string) (*Table, error) {
	all, err := c.fullChains()
	if err != nil {
		return nil, err
	}
	t := &Table{Rules: map[string][]string{}}
	concerns := func(rule string) bool { return strings.Contains(rule, c.prefix) }
	var known []*nftables.FullChain // by the commands
	for _, n := range all {
		switch {
		case n.Family != f.family() || n.Table != table:
		case strings.HasPrefix(n.Name, c.prefix), slices.Contains(builtIn, n.Name):
			known = append(known, n)
		case n.Hook != nil, slices.ContainsFunc(goals(n), concerns):
			t.addUnprintable(n)
		}
	}
	return t, c.list(ctx, f, table, t, known)
}

// addUnprintable adds a chain that the commands can't print.
func (t *Table) addUnprintable(n *nftables.FullChain) {
	t.Chains = append(t.Chains, n.Name)
	t.Rules[n.Name] = goals(n)
}

// list adds chains to t, as far as the command prints them: restore lists many at once, or none if it can't print one.
func (c *Conn) list(ctx context.Context, f Family, table string, t *Table, chains []*nftables.FullChain) error {
	var input bytes.Buffer
	fmt.Fprintf(&input, "*%s\n", table)
	for _, n := range chains {
		fmt.Fprintf(&input, "-S %s\n", n.Name)
	}
	input.WriteString("COMMIT\n")
	name := f.command(c.Variant, "restore")
	text, err := c.output(ctx, input.Bytes(), name, "--noflush", "--wait", fmt.Sprint(LockWait))
	switch half := len(chains) / 2; {
	case err == nil:
		return t.listed(text)
	case !strings.Contains(err.Error(), "incompatible"):
		return err
	case half > 0:
		if err := c.list(ctx, f, table, t, chains[:half]); err != nil {
			return err
		}
		return c.list(ctx, f, table, t, chains[half:])
	}
	for _, n := range chains {
		t.addUnprintable(n)
	}
	return nil
}

// goals returns for each rule of a chain where it leads, as save prints a rule that matches every packet.
func goals(n *nftables.FullChain) []string {
	rules := make([]string, len(n.Rules))
	for i, r := range n.Rules {
		goal, every := "", true
		for _, is := range r.Instructions {
			v := is.Verdict(immediateData)
			switch {
			case is.Kind != "immediate" || v == nil || v.Chain == "":
				every = every && is.Kind == "counter"
			case v.Code == unix.NFT_GOTO:
				goal = "-g " + v.Chain
			default:
				goal = "-j " + v.Chain
			}
		}
		if rules[i] = goal; !every || goal == "" {
			rules[i] = fmt.Sprintf("%s%d %s", Unreadable, r.Handle, goal)
		}
	}
	return rules
}

// removeUnreadable removes the rules that input removes and the commands can't, and returns the rest of input.
func (c *Conn) removeUnreadable(f Family, input []byte) (rest []byte, err error) {
	if !bytes.Contains(input, []byte(Unreadable)) {
		return input, nil
	}
	var tx nftables.Tx
	table := ""
	for line := range bytes.Lines(input) {
		var chain string
		var handle uint64
		if name, is := bytes.CutPrefix(line, []byte("*")); is {
			table = string(bytes.TrimSpace(name))
		}
		if n, _ := fmt.Sscanf(string(line), "-D %s "+Unreadable+"%d", &chain, &handle); n == 2 {
			tx.DelRule(f.family(), table, chain, handle)
			continue
		}
		rest = append(rest, line...)
	}
	return rest, c.nftables(func(n *nftables.Conn) error { return n.Commit(&tx) })
}

// immediateData is the attribute of an instruction "immediate" that has its verdict (linux/netfilter/nf_tables.h).
const immediateData = 2
