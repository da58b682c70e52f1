package migrate

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/kernel/nftables"
)

// Options returns what to do about a kube-proxy's rules.
type Options struct {
	Remove  bool           // remove them once no kube-proxy runs
	Exclude []netip.Prefix // IPVS services at these addresses stay
}

const (
	table    = "kube-proxy"  // of mode nftables, in the families ip and ip6
	dummy    = "kube-ipvs0"  // the interface of mode ipvs
	services = "service-ips" // the map of mode nftables that leads to Services
	period   = time.Second   // between two looks for a kube-proxy
	resync   = 30 * time.Second
	// by then a kube-proxy that is not seen here has missed its rules, and written them again
	afterward = resync + 5*time.Second
)

// Left is what a kube-proxy has written: what to tell people.
type Left []string

// Scan finds what a kube-proxy has written into the calling thread's network namespace.
func Scan(ctx context.Context) (l Left, err error) {
	err = eachTable(ctx, func(c *iptables.Conn, f iptables.Family, t *iptables.Table, _ string) error {
		l = append(l, fmt.Sprintf("chains of iptables (%s, IPv%d)", c.Variant, f))
		return nil
	})
	nerr := eachFamily(func(c *nftables.Conn, family uint8) error {
		l = append(l, "the table "+table+" of nf_tables")
		return nil
	})
	if _, missing := net.InterfaceByName(dummy); missing == nil {
		l = append(l, "the interface "+dummy+" and services of IPVS")
	}
	return compact(l), errors.Join(err, nerr)
}

func compact(l Left) (out Left) {
	seen := map[string]bool{}
	for _, s := range l {
		if !seen[s] {
			out = append(out, s)
		}
		seen[s] = true
	}
	return out
}

// Run takes over from a kube-proxy once the caller serves: it says what one has left, and if asked to removes that as
// soon as none runs here any more. It returns when there is nothing left to do.
func Run(ctx context.Context, log *slog.Logger, o Options) error {
	left, err := Scan(ctx)
	if err != nil || len(left) == 0 {
		return err
	}
	what := strings.Join(left, ", ")
	if !o.Remove {
		log.Warn("kube-proxy's rules are present and become stale once it has stopped; remove them with "+
			"--migrate-from-kube-proxy Remove or kube-proxy --cleanup", "found", what)
		return nil
	}
	if err := Gone(ctx, log); err != nil {
		return err
	}
	if err := remove(ctx, o); err != nil {
		return err
	}
	log.Info("removed kube-proxy's rules", "removed", what)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(afterward):
	}
	if left, err = Scan(ctx); err == nil && len(left) > 0 {
		err = fmt.Errorf("kube-proxy restored its rules (%s), so one runs that is not visible from here: stop it, then "+
			"restart Fairlead", strings.Join(left, ", "))
	}
	return err
}

// Gone waits until no kube-proxy runs in the calling thread's network namespace.
func Gone(ctx context.Context, log *slog.Logger) error {
	for reported := false; ; reported = true {
		pids, err := Running()
		if err != nil || len(pids) == 0 {
			return err
		}
		if !reported {
			log.Warn("kube-proxy is running and would restore its rules; they are removed once it has stopped", "pid", pids)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(period):
		}
	}
}

// Running returns the processes that are a kube-proxy in this process's network namespace, as far as /proc shows them:
// a container needs the host's process namespace to see them, and CAP_SYS_PTRACE to know their network namespace.
func Running() (pids []string, err error) {
	here, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("find the network namespace: %w", err)
	}
	all, err := filepath.Glob("/proc/[0-9]*/comm")
	for _, comm := range all {
		name, err := os.ReadFile(comm)
		if err != nil || !strings.HasPrefix(string(name), "kube-proxy") {
			continue
		}
		dir := filepath.Dir(comm)
		there, err := os.Readlink(dir + "/ns/net")
		if errors.Is(err, fs.ErrPermission) {
			return nil, fmt.Errorf("find the network namespace of a kube-proxy, process %s: %w: that takes "+
				"CAP_SYS_PTRACE", filepath.Base(dir), err)
		}
		if err == nil && there == here {
			pids = append(pids, filepath.Base(dir))
		}
	}
	return pids, err
}

// Serves reports whether a kube-proxy's rules for Services are in the calling thread's network namespace. It writes
// those of a family all at once, with its first sync.
func Serves(ctx context.Context) (yes bool, err error) {
	err = eachTable(ctx, func(_ *iptables.Conn, _ iptables.Family, t *iptables.Table, _ string) error {
		yes = yes || len(t.Rules["KUBE-SERVICES"]) > 1 // the last one leads to node ports, from the start
		return nil
	})
	if err != nil || yes {
		return yes, err
	}
	return yes, eachFamily(func(c *nftables.Conn, family uint8) error {
		sets, err := c.FullSets()
		if err != nil {
			return err
		}
		for _, s := range sets {
			if s.Table == table && s.Name == services {
				if err := c.Fill(s); err != nil {
					return err
				}
				yes = yes || len(s.Elements) > 0
			}
		}
		return nil
	})
}

// Await waits until a kube-proxy serves in the calling thread's network namespace.
func Await(ctx context.Context) error {
	for {
		yes, err := Serves(ctx)
		if err != nil || yes {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("kube-proxy did not start to serve: %w", ctx.Err())
		case <-time.After(period / 4):
		}
	}
}
