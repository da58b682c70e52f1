// Package node makes the settings of the node's system that a service proxy is expected to make, as kube-proxy makes
// them (pkg/proxy/conntrack/sysctls.go): connection tracking's size and timeouts, ARP for IPVS, the process's OOM
// score. Only what was asked for is touched, and it is left so at the end: others may count on it by then. It also
// knows the node's own addresses.
package node

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"fairlead.dev/fairlead/kernel/sysctl"
)

// Settings are what to set.
type Settings struct {
	OOMScore  int32      // of this process
	StrictARP bool       // answer ARP only for addresses of the interface that is asked
	Conntrack *Conntrack // nil: connection tracking is not touched
}

// Conntrack are settings of connection tracking. Zero values leave the kernel's own.
type Conntrack struct {
	MaxPerCore, Min                        int // connections; Min counts only beside MaxPerCore
	Liberal                                bool
	Established, CloseWait, UDP, UDPStream time.Duration
}

// most is kube-proxy's limit of connections, however many processors there are.
const most = 1 << 20

// Max returns how many connections are to be tracked at most on so many processors, 0 to leave that.
func (c Conntrack) Max(processors int) int {
	if c.MaxPerCore <= 0 {
		return 0
	}
	scaled := c.MaxPerCore * processors
	if scaled > most {
		return most
	}
	return max(scaled, c.Min)
}

// setting is a sysctl and its value.
type setting struct{ name, value string }

// wanted lists the sysctls to set, but for the number of connections.
func (s Settings) wanted() (list []setting) {
	add := func(yes bool, name, value string) {
		if yes {
			list = append(list, setting{"net/" + name, value})
		}
	}
	add(s.StrictARP, "ipv4/conf/all/arp_ignore", "1")
	add(s.StrictARP, "ipv4/conf/all/arp_announce", "2")
	if c := s.Conntrack; c != nil {
		add(c.Liberal, "netfilter/nf_conntrack_tcp_be_liberal", "1")
		for name, d := range map[string]time.Duration{"tcp_timeout_established": c.Established,
			"tcp_timeout_close_wait": c.CloseWait, "udp_timeout": c.UDP, "udp_timeout_stream": c.UDPStream} {
			add(d >= time.Second, "netfilter/nf_conntrack_"+name, strconv.Itoa(int(d/time.Second)))
		}
	}
	return list
}

// Apply makes the settings in the calling thread's network namespace. What can't be set is in the error; the rest is.
func (s Settings) Apply(log *slog.Logger) error {
	var errs []error
	for _, w := range s.wanted() {
		errs = append(errs, ensure(log, w.name, w.value))
	}
	if s.Conntrack != nil {
		if n := s.Conntrack.Max(processors()); n > 0 {
			errs = append(errs, track(log, n))
		}
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(int(s.OOMScore))), 0); err != nil {
		log.Info("the process's OOM score is unchanged", "error", err) // a lower one needs CAP_SYS_RESOURCE
	}
	return errors.Join(errs...)
}

func ensure(log *slog.Logger, name, value string) error {
	was, changed, err := sysctl.Ensure(name, value)
	if err != nil {
		return err
	}
	if changed {
		log.Info("set a sysctl", "name", strings.ReplaceAll(name, "/", "."), "value", value, "was", was)
	}
	return nil
}

const hashSize = "/sys/module/nf_conntrack/parameters/hashsize"

// track has the kernel track n connections or more. What an administrator has set higher stays. In a network namespace
// of its own the number can only be read: the first namespace's counts there too (nf_conntrack_standalone.c).
func track(log *slog.Logger, n int) error {
	const name = "net/netfilter/nf_conntrack_max"
	if now, err := sysctl.Number(name); err != nil {
		return err
	} else if now < n {
		if err := ensure(log, name, strconv.Itoa(n)); err != nil {
			return fmt.Errorf("at most %d connections are tracked, not %d: %w: set it on the host", now, n, err)
		}
	}
	b, err := os.ReadFile(hashSize)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("read how large connection tracking's table is: %w", err)
	}
	if size, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && size < n/4 {
		if err := os.WriteFile(hashSize, []byte(strconv.Itoa(n/4)), 0); err != nil {
			log.Warn("connection tracking's hash table is small for its connections and was not resized", "buckets", size,
				"connections", n, "error", err)
			return nil
		}
		log.Info("resized connection tracking's hash table", "buckets", n/4, "was", size)
	}
	return nil
}
