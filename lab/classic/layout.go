package classic

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
)

// Layout is a way in which kube-proxy lays out its rules.
type Layout uint8

// The layouts.
const (
	IPTables19 Layout = iota
	IPTables
	NFTables
)

// Layouts are all of them.
var Layouts = []Layout{IPTables19, IPTables, NFTables}

// String returns the layout's name in results, such as "ipt-classic19".
func (l Layout) String() string { return [...]string{"ipt-classic19", "ipt-classic", "nft-classic"}[l] }

// Variant is which of the kernel's interfaces the iptables command speaks to.
type Variant string

// The variants. Legacy is ip_tables, NFT is nf_tables, which is also what nft-classic takes.
const (
	Legacy Variant = "legacy"
	NFT    Variant = "nft"
)

// Text returns everything that the layout writes of c, as a sync of kube-proxy does, but for the rules that lead from
// the hooks. It is input for `iptables-restore --noflush`, or for `nft -f`.
func (l Layout) Text(c *Cluster) string {
	if l != NFTables {
		return l.filter(c) + l.nat(c)
	}
	var b strings.Builder
	b.WriteString(nftBase(c))
	for i := range c.Services {
		b.WriteString(nftService(c, &c.Services[i]))
	}
	return b.String()
}

// Save returns the whole rule set as iptables-save would, without a kernel, for layouts of iptables.
func (l Layout) Save(c *Cluster) string { return l.base() + l.Text(c) }

// Restore passes a text to iptables-restore of that variant, or to nft where it is nft-classic's, in the calling
// thread's network namespace. What the text doesn't name stays.
func (l Layout) Restore(ctx context.Context, v Variant, text string) error {
	if l == NFTables {
		return run(ctx, text, "nft", "-f", "-")
	}
	return run(ctx, text, "iptables-"+string(v)+"-restore", "-w", "300", "--noflush", "--counters")
}

func run(ctx context.Context, in, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(in)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s (Debian has the command in its packages iptables and nftables)", name,
			strings.Join(args, " "), err, strings.TrimSpace(string(out[:min(len(out), 2000)])))
	}
	return nil
}

// Rules are a cluster's rules in a kernel. Its methods work in the calling thread's network namespace.
type Rules struct {
	Layout  Layout
	Variant Variant
	Cluster *Cluster
}

// Install writes the rules of c into the calling thread's network namespace, where there must be none of kube-proxy's.
func Install(ctx context.Context, l Layout, v Variant, c *Cluster) (*Rules, error) {
	if l == NFTables {
		v = NFT
	} else if err := l.Restore(ctx, v, l.base()); err != nil {
		return nil, err
	}
	r := &Rules{l, v, c}
	return r, r.Resync(ctx)
}

// Resync writes everything again, as kube-proxy did every syncPeriod (30 s in 2019).
func (r *Rules) Resync(ctx context.Context) error {
	return r.Layout.Restore(ctx, r.Variant, r.Layout.Text(r.Cluster))
}
