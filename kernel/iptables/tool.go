package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"

	"fairlead.dev/fairlead/kernel/netns"
)

// Variant is which of the two sets of commands, and with it which part of the kernel, holds the rules.
type Variant string

// The variants.
const (
	Legacy Variant = "legacy" // xtables: every change replaces a whole table
	NFT    Variant = "nft"    // nf_tables: a change costs what it changes
)

// Family is an IP family: 4 or 6.
type Family uint8

// The families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// Families are both families.
var Families = []Family{IPv4, IPv6}

// FamilyOf returns an address's family.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// command returns the name of a family's command: "iptables-nft-save".
func (f Family) command(v Variant, verb string) string {
	return fmt.Sprintf("%s-%s-%s", f.tool(), v, verb)
}

// tool returns the name of a family's tool.
func (f Family) tool() string {
	if f == IPv6 {
		return "ip6tables"
	}
	return "iptables"
}

// names returns the file that lists the tables of xtables, which the kernel makes when they are first asked for.
func (f Family) names() string {
	if f == IPv6 {
		return "/proc/thread-self/net/ip6_tables_names"
	}
	return "/proc/thread-self/net/ip_tables_names"
}

// LockWait is how many seconds a restore waits for the lock that all legacy commands of a host share.
const LockWait = 30

// Conn runs commands in one network namespace. Calls may come from any goroutine, one at a time; Watch beside them.
type Conn struct {
	Variant  Variant
	Families []Family // whose commands are installed
	prefix   string   // of our chains' names
	ns       *netns.Namespace
	mu       sync.Mutex
	witness  witness
}

// Open takes up a variant in the calling thread's network namespace, for the families whose commands are installed.
// Chains whose names begin with prefix are ours: a change of those, and of built-in chains, counts for Watch, in those
// tables.
func Open(v Variant, prefix string, tables ...string) (*Conn, error) {
	families, err := Installed(v)
	if len(families) == 0 {
		return nil, err
	}
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	c := &Conn{Variant: v, Families: families, prefix: prefix, ns: ns}
	if v == NFT {
		c.witness, err = newEvents(prefix, tables)
	} else {
		c.witness, err = newCounts(tables, c.used)
	}
	if err != nil {
		ns.Close()
		return nil, err
	}
	return c, nil
}

// Installed returns the families for which a variant is installed, and what is missing of the others.
func Installed(v Variant) (families []Family, err error) {
	var errs []error
	for _, f := range Families {
		if err := installed(f, v); err != nil {
			errs = append(errs, err)
		} else {
			families = append(families, f)
		}
	}
	return families, errors.Join(errs...)
}

// installed returns what is missing of a variant.
func installed(f Family, v Variant) error {
	for _, verb := range []string{"save", "restore"} {
		if _, err := exec.LookPath(f.command(v, verb)); err != nil {
			return fmt.Errorf("iptables: %w; install the package iptables", err)
		}
	}
	return nil
}

// Close closes the handles. Rules stay.
func (c *Conn) Close() error { return errors.Join(c.witness.close(), c.ns.Close()) }

// Do runs f on a thread in the connection's network namespace.
func (c *Conn) Do(f func() error) error { return c.ns.Do(f) }

// Mark forgets what others have changed so far: the caller is about to read everything.
func (c *Conn) Mark() error { return c.witness.mark() }

// Watch sends when another program may have changed our chains or a built-in one since Mark, until ctx ends; then it
// closes the channel. The nft variant learns it from the kernel. The legacy kernel has no event: there the sizes of the
// tables are looked at once a second, which takes microseconds but misses a change that leaves a table's size as it
// was.
func (c *Conn) Watch(ctx context.Context) (<-chan struct{}, error) { return c.witness.watch(ctx) }

// Save reads tables, with one command however many they are. Those that were never used are empty, and reading them
// makes none. Of a table with rules of other owners that save can't print, only our chains and those are there that are
// built in or lead to ours: see Unreadable.
func (c *Conn) Save(ctx context.Context, f Family, tables ...string) (map[string]*Table, error) {
	is := map[string]*Table{}
	for _, t := range tables {
		is[t] = &Table{}
	}
	if c.Variant == Legacy {
		names, err := c.used(f)
		if err != nil || !slices.ContainsFunc(tables, func(t string) bool { return strings.Contains(names, "\n"+t+"\n") }) {
			return is, err
		}
	}
	name := f.command(c.Variant, "save")
	text, err := c.output(ctx, nil, name)
	if err != nil {
		return nil, err
	}
	all, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("iptables: %s: %w", name, err)
	}
	for t := range is {
		switch there, ok := all[t]; {
		case !ok:
		case there != nil:
			is[t] = there
		default:
			if is[t], err = c.saveOwn(ctx, f, t); err != nil {
				return nil, fmt.Errorf("iptables: %s: table %s: %w: %w", name, t, ErrForeign, err)
			}
		}
	}
	return is, nil
}

// output returns what a command prints that is given input.
func (c *Conn) output(ctx context.Context, input []byte, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var out, said bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &out, &said
	err := c.ns.Do(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return "", fmt.Errorf("iptables: %s: %w: %s", name, err, bytes.TrimSpace(said.Bytes()))
	}
	return out.String(), nil
}

// used returns the tables of xtables that are in use, each on a line of its own, with a line's end before the first.
func (c *Conn) used(f Family) (names string, err error) {
	err = c.ns.Do(func() error {
		b, err := os.ReadFile(f.names())
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("iptables: read the names of tables: %w", err)
		}
		names = "\n" + string(b)
		return nil
	})
	return names, err
}

// Restore makes the changes of input, in the form of iptables-restore; what input does not name stays. Each table's
// changes come true at once or not at all.
func (c *Conn) Restore(ctx context.Context, f Family, input []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := f.command(c.Variant, "restore")
	input, err := c.removeUnreadable(f, input)
	if err != nil {
		return fmt.Errorf("iptables: %s: %w", name, err)
	}
	cmd := exec.CommandContext(ctx, name, "--noflush", "--wait", fmt.Sprint(LockWait))
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	in, err := cmd.StdinPipe()
	if err != nil {
		return fmt.Errorf("iptables: %s: %w", name, err)
	}
	if err := c.ns.Do(cmd.Start); err != nil {
		return fmt.Errorf("iptables: %s: %w", name, err)
	}
	c.witness.begin(cmd.Process.Pid) // before the command has anything to do
	_, broken := io.Copy(in, bytes.NewReader(input))
	in.Close()
	err = cmd.Wait()
	if err == nil && broken != nil {
		err = broken
	}
	ended := c.witness.end(f, err == nil)
	if err != nil {
		return fmt.Errorf("iptables: %s: %w: %s%s", name, err, bytes.TrimSpace(said.Bytes()), advice(said.String()))
	}
	return ended
}

// advice returns the way out of a known trouble.
func advice(said string) string {
	switch {
	case strings.Contains(said, "xtables lock"):
		return fmt.Sprintf("; another program has held /run/xtables.lock for %d s: find it with `fuser -v /run/xtables.lock`",
			LockWait)
	case strings.Contains(said, "Permission denied"), strings.Contains(said, "Operation not permitted"):
		return "; run as root or with CAP_NET_ADMIN and CAP_NET_RAW"
	case strings.Contains(said, "missing kernel module"):
		return "; the kernel lacks a match or target that the rules need"
	case strings.Contains(said, "do you need to insmod"):
		return "; the kernel lacks that table of xtables: use the variant nft, or the data plane nftables"
	case strings.Contains(said, "Failed to initialize nft"):
		return "; the kernel lacks nf_tables: use the variant legacy"
	}
	return ""
}
