package ipvs

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/sandbox/vm/vmtest"
)

// secondKernel reports that these tests run in the second kernel, which has IPVS.
var secondKernel = flag.Bool("second-kernel", false, "run the tests that need IPVS here")

func TestInSecondKernel(t *testing.T) {
	if !*secondKernel {
		vmtest.Run(t, "fairlead.dev/fairlead/kernel/ipvs", "^TestInSecondKernel$", "-second-kernel")
		return
	}
	for _, test := range []struct {
		name string
		f    func(*testing.T, *Conn)
	}{{"read as written", readAsWritten}, {"refusals", rejections}, {"timeout", timeout}, {"many", many}} {
		t.Run(test.name, func(t *testing.T) { inNamespace(t, test.f) })
	}
}

// inNamespace runs f in a network namespace of its own. The thread is thrown away with it.
func inNamespace(t *testing.T, f func(*testing.T, *Conn)) {
	t.Helper()
	netnstest.Do(t, func() {
		if err := loopbackUp(); err != nil { // before, the kernel takes no destination
			t.Errorf("bring lo up: %v", err)
			return
		}
		c, err := Open()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		f(t, c)
	})
}

func loopbackUp() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	r, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, r)
}

func run(t *testing.T, c *Conn, fill func(*Batch)) {
	t.Helper()
	var b Batch
	fill(&b)
	if err := c.Run(&b); err != nil {
		t.Error(err)
	}
}

// holds compares all that the kernel holds, a line for each thing.
func holds(t *testing.T, c *Conn, want ...string) {
	t.Helper()
	var got []string
	services, err := c.Services()
	if err != nil {
		t.Error(err)
	}
	slices.SortFunc(services, func(a, b Service) int { return cmp.Compare(a.Mark, b.Mark) })
	for _, s := range services {
		got = append(got, fmt.Sprintf("%v %d %s %#x", s.Six, s.Mark, s.Scheduler, s.Flags))
		ds, err := c.Destinations(s.ServiceID)
		if err != nil {
			t.Error(err)
		}
		slices.SortFunc(ds, func(a, b Destination) int { return a.Addr.Compare(b.Addr) })
		for _, d := range ds {
			got = append(got, fmt.Sprintf("%s %d %d %d", d.Addr, d.Weight, d.Active, d.Idle))
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func readAsWritten(t *testing.T, c *Conn) {
	a, b := netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("[fd00::1]:8080")
	four, six := ServiceID{Mark: 1}, ServiceID{Six: true, Mark: 2}
	holds(t, c)
	for range 2 { // the second time, all is there
		run(t, c, func(l *Batch) {
			l.SetService(Service{four, "wrr", 0})
			l.SetDestination(four, Destination{Addr: a, Weight: 256})
			l.SetService(Service{six, "mh", Fallback | WithPort})
			l.SetDestination(six, Destination{Addr: b, Weight: 1})
		})
		holds(t, c, "false 1 wrr 0x0", "10.0.0.1:80 256 0 0", "true 2 mh 0x18", "[fd00::1]:8080 1 0 0")
	}
	run(t, c, func(l *Batch) {
		l.SetService(Service{six, "sh", Fallback})
		l.SetDestination(four, Destination{Addr: a, Weight: 3})
		l.Weigh(six, Destination{Addr: b})
		l.Weigh(six, Destination{Addr: netip.MustParseAddrPort("[fd00::9]:8080")}) // not there
	})
	holds(t, c, "false 1 wrr 0x0", "10.0.0.1:80 3 0 0", "true 2 sh 0x8", "[fd00::1]:8080 0 0 0")
	for range 2 {
		run(t, c, func(l *Batch) { l.DelDestination(four, a); l.DelService(six); l.DelDestination(six, b) })
		holds(t, c, "false 1 wrr 0x0")
	}
	for _, name := range []string{"rr", "wrr", "lc", "wlc", "sh", "dh", "sed", "nq", "mh"} {
		run(t, c, func(l *Batch) { l.SetService(Service{four, name, 0}) })
		holds(t, c, "false 1 "+name+" 0x0")
	}
}

// A refused request names what was tried, and those around it are made.
func rejections(t *testing.T, c *Conn) {
	var b Batch
	one, two := ServiceID{Mark: 1}, ServiceID{Mark: 2}
	b.SetService(Service{one, "rr", 0})
	b.SetService(Service{ServiceID{Mark: 9}, "nosuch", 0})
	b.SetDestination(ServiceID{Mark: 10}, Destination{Addr: netip.MustParseAddrPort("10.0.0.1:80"), Weight: 1})
	b.SetService(Service{two, "rr", 0})
	err := c.Run(&b)
	if err == nil || !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), "fwmark 0x9") ||
		!strings.Contains(err.Error(), "nosuch") {
		t.Errorf("%v, want it to name the service and its scheduler", err)
	}
	holds(t, c, "false 1 rr 0x0", "false 2 rr 0x0")
}

// Timeouts are set one by one: zero leaves one as it is.
func timeout(t *testing.T, c *Conn) {
	was, err := c.Timeouts()
	if err != nil || was.TCP == 0 || was.FIN == 0 || was.UDP == 0 {
		t.Fatalf("at first: %+v, %v", was, err)
	}
	want := was
	for _, set := range []Timeouts{{TCP: 25 * time.Hour}, {FIN: 66 * time.Second}, {UDP: 77 * time.Second},
		{TCP: time.Hour, UDP: time.Minute}} {
		if err := c.SetTimeouts(set); err != nil {
			t.Error(err)
		}
		want = Timeouts{cmp.Or(set.TCP, want.TCP), cmp.Or(set.FIN, want.FIN), cmp.Or(set.UDP, want.UDP)}
		if is, err := c.Timeouts(); is != want || err != nil {
			t.Errorf("after %+v: %+v, %v, want %+v", set, is, err, want)
		}
	}
}

// Batches larger than one send and dumps larger than one answer lose nothing.
func many(t *testing.T, c *Conn) {
	const services, each = 3000, 5
	fill := func(l *Batch) {
		for i := range uint32(services) {
			id := ServiceID{Mark: i + 1}
			l.SetService(Service{id, "rr", 0})
			for j := range byte(each) {
				l.SetDestination(id, Destination{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), j}),
					80), Weight: uint32(j) + 1})
			}
		}
	}
	for range 2 {
		begin := time.Now()
		run(t, c, fill)
		t.Logf("%d services with %d destinations: %v", services, each, time.Since(begin))
	}
	begin := time.Now()
	list, err := c.Services()
	if len(list) != services || err != nil {
		t.Errorf("%d services, %v", len(list), err)
	}
	for _, s := range list {
		if ds, err := c.Destinations(s.ServiceID); len(ds) != each || err != nil {
			t.Errorf("%s: %v, %v", s, ds, err)
		}
	}
	t.Logf("read: %v", time.Since(begin))
	run(t, c, func(l *Batch) {
		for _, s := range list {
			l.DelService(s.ServiceID)
		}
	})
	holds(t, c)
}
