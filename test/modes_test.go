package test_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/mode"
)

// configured starts an agent that a file configures, and returns what changes that file.
func (l *lives) configured() (write func(format string, args ...any)) {
	l.t.Helper()
	l.config = filepath.Join(l.t.TempDir(), "config.yaml")
	write = func(format string, args ...any) {
		l.t.Helper()
		text := "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\n" + fmt.Sprintf(format, args...)
		next := l.config + ".next"
		if err := errors.Join(os.WriteFile(next, []byte(text), 0o644), os.Rename(next, l.config)); err != nil {
			l.t.Fatal(err)
		}
	}
	write("mode: %s\n", l.mode)
	l.hire()
	return write
}

// page returns a page of the agent, "" while there is none.
func (l *lives) page(path string) string {
	r, err := l.web.Get("http://127.0.0.1:10249" + path)
	if err != nil {
		return ""
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body)
	if r.StatusCode != http.StatusOK {
		return ""
	}
	return string(b)
}

// dial has each client connect again and again, a millisecond apart, until stop, which returns what was refused by
// client. Other failures are logged: a connection whose handshake has begun through an agent of mode userspace ends
// with that.
func (l *lives) dial() (stop func() map[string][]string) {
	failed, ended := map[string][]string{}, make(chan struct{})
	var mu sync.Mutex
	var wg sync.WaitGroup
	connect := func(c *prober) error {
		conn, err := net.DialTimeout("tcp", c.to.String(), 3*time.Second)
		if err == nil {
			conn.Close()
		}
		return err
	}
	for _, c := range l.clients {
		wg.Go(func() {
			err := c.host.Do(func() error {
				for begin := time.Now(); ; time.Sleep(time.Millisecond) {
					select {
					case <-ended:
						return nil
					default:
					}
					err := connect(c)
					if err != nil && !errors.Is(err, unix.ECONNREFUSED) {
						l.t.Logf("%s: opening while the mode changed: %v", c.host.Name, err)
						err = nil
					}
					if err != nil {
						mu.Lock()
						failed[c.host.Name] = append(failed[c.host.Name], fmt.Sprintf("after %s: %v",
							time.Since(begin).Round(time.Millisecond), err))
						mu.Unlock()
					}
				}
			})
			if err != nil {
				l.t.Error(err)
			}
		})
	}
	return func() map[string][]string { close(ended); wg.Wait(); return failed }
}

// Clients in a pod, on the node and outside are never refused while the agent changes from each mode to
// another, out of mode userspace too, whose listeners end with it.
func TestNewModeServesBeforeTheOldEnds(t *testing.T) {
	l := newLife(t, "userspace")
	defer l.logOnFailure()
	write := l.configured()
	for _, mode := range []string{"nftables", "userspace", "iptables", "userspace", "ebpf", "userspace", "nftables"} {
		from := l.mode
		stop := l.dial()
		write("mode: %s\n", mode)
		l.mode = mode
		eventually(t, "mode "+mode+" serves", func() bool {
			return l.page("/proxyMode") == mode && strings.HasPrefix(l.page("/readyz"), "ok") && l.cleared(from)
		})
		for client, failures := range stop() {
			t.Errorf("%s to %s: %d connections from %s were refused, the first %s, the last %s", from, mode, len(failures),
				client, failures[0], failures[len(failures)-1])
		}
	}
}

// cleared reports whether nothing of a mode is left that a new connection meets.
func (l *lives) cleared(mode string) bool {
	show := map[string][]string{"nftables": {"nft", "list", "tables"}, "iptables": {"iptables-save"},
		"userspace": {"ip", "rule"}}[mode]
	if show == nil {
		return true
	}
	mark := map[string]string{"nftables": "inet fairlead\n", "iptables": "FAIRLEAD", "userspace": "dport 80"}[mode]
	var out string
	err := l.node.Do(func() (err error) { out, err = try(show...); return err })
	return err == nil && !strings.Contains(out, mark)
}

// A changed configuration that can't come into force leaves the agent and what it serves as they are, says so, and is
// forgotten once the file is good again. One that only fails when it is started gives way to the last good one.
func TestRefusedConfiguration(t *testing.T) {
	l := newLife(t, "nftables")
	defer l.logOnFailure()
	write := l.configured()
	refused := func(reason string) {
		t.Helper()
		eventually(t, "/status says "+reason, func() bool {
			status := l.page("/status")
			return strings.Contains(status, `"ConfigurationRefused"`) && strings.Contains(status, reason)
		})
		l.settled()
	}
	good := func() {
		t.Helper()
		write("mode: nftables\n")
		eventually(t, "nothing is refused any more", func() bool {
			return l.page("/readyz") != "" && !strings.Contains(l.page("/status"), "ConfigurationRefused")
		})
	}
	write("mode: nftabels\n")
	refused("invalid mode")
	good()
	if m, err := mode.Of("ipvs"); err != nil {
		t.Fatal(err)
	} else if l.node.Do(func() error { return m.Check(t.Context()) }) != nil { // not in this kernel
		write("mode: ipvs\n")
		refused("mode ipvs")
	}
	var occupied net.Listener
	err := l.node.Do(func() (err error) { occupied, err = net.Listen("tcp", "127.0.0.1:10250"); return err })
	if err != nil {
		t.Fatal(err)
	}
	defer occupied.Close()
	proxy := "---\napiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
	write("mode: iptables\n" + proxy + "bindAddressHardFail: true\nhealthzBindAddress: 127.0.0.1:10250\n")
	refused("--healthz-bind-address")
	if mode := l.page("/proxyMode"); mode != "nftables" {
		t.Errorf("the mode is %q", mode)
	}
	write("mode: nftables\n" + proxy + "metricsBindAddress: 127.0.0.1:10249\nclientConnection: {kubeconfig: /nowhere}\n")
	good()
	select {
	case <-l.ended:
		t.Error("the agent has ended")
	default:
	}
}
