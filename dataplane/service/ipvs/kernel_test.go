package ipvs

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/dataplane/service/servicetest"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/vm/vmtest"
)

// internal reports that these tests run in the second kernel, which has IPVS.
var internal = flag.Bool("second-kernel", false, "run the tests that need IPVS here")

func TestInSecondKernel(t *testing.T) {
	if !*internal {
		vmtest.Run(t, "fairlead.dev/fairlead/dataplane/service/ipvs", "^TestInSecondKernel$", "-second-kernel")
		return
	}
	t.Run("kernel holds what is written", kernelReturnsWhatIsWritten)
	t.Run("thousands", thousands)
	t.Run("IPv6 is off", withoutIPv6)
	t.Run("NET_ADMIN alone", unprivileged)
	t.Run("cases", cases)
}

// unprivileged has a node whose sysctls an init container has set, and an agent with CAP_NET_ADMIN alone and a
// read-only /proc/sys.
func unprivileged(t *testing.T) {
	inNamespace(t, func() {
		here, err := netns.Current()
		if err = errors.Join(err, Prepare()); err != nil {
			t.Error(err)
			return
		}
		defer here.Close()
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends without its capabilities
			done <- errors.Join(here.Enter(), asContainer(), serves(t))
		}()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// serves writes services and reads them back.
func serves(t *testing.T) error {
	p, err := New()
	if err != nil {
		return err
	}
	defer p.Close()
	facts, err := rendered(p, services(3, 0))
	if err == nil {
		err = p.Write(t.Context(), facts, nil)
	}
	held, err2 := p.Read(t.Context())
	if missing, extra := servicetest.Difference(facts, held), servicetest.Difference(held,
		facts); len(missing)+len(extra) > 0 {
		return fmt.Errorf("%w, %w; %v missing, %v extra", err, err2, missing, extra)
	}
	return errors.Join(err, err2, p.Clean(t.Context()))
}

// asContainer has the calling thread see /proc/sys read-only, and drops all of its capabilities but CAP_NET_ADMIN.
func asContainer() error {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	admin := [2]unix.CapUserData{{Effective: 1 << unix.CAP_NET_ADMIN, Permitted: 1 << unix.CAP_NET_ADMIN}}
	return errors.Join(unix.Unshare(unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""), unix.Mount("", "/proc/sys", "",
			unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""),
		unix.Capset(&h, &admin[0]))
}

// withoutIPv6 has a node whose loopback device has no IPv6, as many have it: all else is written and read as it is.
func withoutIPv6(t *testing.T) {
	inNamespace(t, func() {
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/lo/disable_ipv6", []byte("1"), 0); err != nil {
			t.Error(err)
			return
		}
		p, err := New()
		if err != nil {
			t.Error(err)
			return
		}
		defer p.Close()
		facts, err := rendered(p, services(3, 0))
		if err == nil {
			err = p.Write(t.Context(), facts, nil)
		}
		held, err2 := p.Read(t.Context())
		if missing, extra := servicetest.Difference(facts, held), servicetest.Difference(held, facts); err != nil ||
			err2 != nil || len(missing)+len(extra) > 0 {
			t.Errorf("%v, %v; %v missing, %v extra", err, err2, missing, extra)
		}
	})
}

// thousands of Services of ten endpoints are written in several batches, read as they are, changed and left. The times
// are an emulated processor's: at most their ratios say something.
func thousands(t *testing.T) {
	for _, n := range []int{10, 3000} {
		inNamespace(t, func() {
			p, err := New()
			if err != nil {
				t.Error(err)
				return
			}
			defer p.Close()
			facts, err := rendered(p, services(n, 0))
			if err != nil {
				t.Error(err)
				return
			}
			timed := func(what string, f func() error) {
				begin := time.Now()
				if err := f(); err != nil {
					t.Errorf("%d Services: %s: %v", n, what, err)
				}
				t.Logf("%5d Services: %-10s %v", n, what, time.Since(begin))
			}
			timed("write", func() error {
				for c := range slices.Chunk(facts, 4096) {
					if err := p.Write(t.Context(), c, nil); err != nil {
						return err
					}
				}
				return nil
			})
			var held []Fact
			timed("read", func() (err error) { held, err = p.Read(t.Context()); return err })
			if missing, extra := servicetest.Difference(facts, held),
				servicetest.Difference(held, facts); len(missing)+len(extra) > 0 {
				t.Errorf("%d missing, %d extra", len(missing), len(extra))
			}
			const changes = 50
			timed(fmt.Sprint(changes, " changes"), func() error {
				for i := range changes {
					old, now := p.Render(services(1, i%2)[1]), p.Render(services(1, 1-i%2)[1])
					if err := p.Write(t.Context(), servicetest.Difference(now, old), servicetest.Difference(old, now)); err != nil {
						return err
					}
				}
				return nil
			})
			timed("clean", func() error { return p.Clean(t.Context()) })
			if held, err := p.Read(t.Context()); len(held) > 0 || err != nil {
				t.Errorf("after clean: %d facts, %v", len(held), err)
			}
		})
	}
}

// services returns a node and n pools of ten backends with a frontend each. shift moves the last backend of the first.
func services(n, shift int) []model.ServicePart {
	parts := []model.ServicePart{&model.ServiceNode{Node: &model.Node{Name: "a"},
		NodePorts: []model.Range{{First: address("0.0.0.0"), Last: address("126.255.255.255")}}}}
	for i := range n {
		p := &model.Pool{ID: uint64(i + 1), Name: fmt.Sprint(i), Protocol: model.TCP, Scheduler: model.RoundRobin}
		for j := range 10 {
			at := netip.AddrFrom4([4]byte{10, 128 + byte(i>>8), byte(i), byte(j)})
			if i == 0 && j == 9 {
				at = netip.AddrFrom4([4]byte{10, 250, 0, byte(shift)})
			}
			p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(at, 8080)})
		}
		to := model.Target{Pool: p}
		e := model.Entry{Addr: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Port: 80, Protocol: model.TCP}
		parts = append(parts, p, &model.Frontend{Entry: e, Internal: to, External: to,
			Masquerade: model.OriginsOf(model.FromNode, model.FromExternal)})
	}
	return parts
}

// cases judges the plane by cases of its own, of where IPVS has gone wrong before.
func cases(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d cases, %v", len(files), err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			c, err := conformance.Parse(f, text)
			if err != nil {
				t.Fatal(err)
			}
			conformance.RunCase(t, conformance.Implementation{Capabilities: Capabilities, Start: start}, c)
		})
	}
}

// inNamespace runs the test's body in a network namespace of its own. The thread is thrown away with it.
func inNamespace(t testing.TB, body func()) {
	t.Helper()
	netnstest.Do(t, func() {
		if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			t.Errorf("ip link set lo up: %v: %s", err, out)
			return
		}
		body()
	})
}

func kernelReturnsWhatIsWritten(t *testing.T) {
	inNamespace(t, func() {
		p, err := New()
		if err != nil {
			t.Error(err)
			return
		}
		defer p.Close()
		before := settings(t, p)
		var held []Fact
		for seed := range 12 {
			s := rapid.Custom(func(t *rapid.T) *model.Snapshot { return randomServices(t) }).Example(seed)
			p.Timeouts = []Timeouts{{TCP: timeoutTCP}, {TCP: time.Hour, FIN: time.Minute}}[seed%2] // another configuration
			want, err := rendered(p, s.Parts())
			if err != nil {
				t.Error(err)
				return
			}
			if seed%4 == 3 {
				want = nil
			}
			if err := p.Write(t.Context(), servicetest.Difference(want, held), servicetest.Difference(held, want)); err != nil {
				t.Errorf("world %d: %v", seed, err)
				return
			}
			if held, err = p.Read(t.Context()); err != nil {
				t.Errorf("world %d: read: %v", seed, err)
				return
			}
			if missing, extra := servicetest.Difference(want, held),
				servicetest.Difference(held, want); len(missing)+len(extra) > 0 {
				t.Errorf("world %d: missing %v, extra %v", seed, missing, extra)
				return
			}
			if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil {
				t.Errorf("nft list: %v: %s", err, out)
			}
		}
		s := rapid.Custom(func(t *rapid.T) *model.Snapshot { return randomServices(t) }).Example(100)
		want, _ := rendered(p, s.Parts())
		if err := p.Write(t.Context(), want, nil); err != nil {
			t.Error(err)
		}
		if err := p.Clean(t.Context()); err != nil {
			t.Error(err)
		}
		if held, err := p.Read(t.Context()); len(held) > 0 || err != nil {
			t.Errorf("after clean: %v, %v", held, err)
		}
		if after := settings(t, p); after != before {
			t.Errorf("after clean: settings are %v, were %v", after, before)
		}
	})
}

// settings returns all settings that the plane may change.
func settings(t *testing.T, p *Plane) (all string) {
	for _, name := range []string{"timeout", "timeoutFIN", "timeoutUDP", "conntrack", "expire_nodest_conn",
		"conn_reuse_mode", "sloppy_tcp", "run_estimation"} {
		v, err := p.setting(name)
		if err != nil {
			t.Error(err)
		}
		all += name + "=" + v + " "
	}
	return all
}
