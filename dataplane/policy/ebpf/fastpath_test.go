package ebpf

import (
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/bpf/service"
	deviceplane "fairlead.dev/fairlead/dataplane/device"
	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/kernel/bpf"
)

// devicePath is the programs at the devices of a network's node, as Services' mode ebpf has them, without a Service.
type devicePath struct {
	n           *policytest.Network
	maps, links string
	devices     []device.Device
}

// newDevicePath attaches the programs and joins them with that of policies, where there is one.
func newDevicePath(n *policytest.Network) *devicePath {
	n.Helper()
	d := &devicePath{n: n}
	n.Must(n.Node.Do(func() error {
		f, err := device.CurrentFolders()
		n.Must(err)
		d.maps, d.links = filepath.Join(f.Services, "maps-"+rand.Text()), filepath.Join(f.Services, "devices")
		n.Cleanup(func() { n.Must(bpf.RemoveFolder(f.Services)) })
		m, err := device.CreateMaps(d.maps, service.Sizes{Frontends: 16, Pools: 16, Slots: 64, Flows: 64})
		n.Must(err)
		defer m.Close()
		p, err := m.LoadForDevices(device.Options{}, 14)
		n.Must(err)
		defer p.Close()
		n.Must(p.Pin(d.links))
		plane, err := deviceplane.Open(d.links)
		n.Must(err)
		defer plane.Close()
		all, err := plane.Devices()
		n.Must(err)
		for _, x := range all {
			x.Pod = x.Pod && !(across && x.Index%2 == 1)
			if d.devices = append(d.devices, x); !x.Own {
				n.Must(errors.Join(p.AttachDevice(d.links, x, false), p.AttachDevice(d.links, x, true)))
			}
		}
		return errors.Join(device.WritePods(d.maps, d.links, d.devices), f.Join())
	}))
	return d
}

// slow returns what keeps packets to pods on the host stack.
func (d *devicePath) slow() (reasons []device.SlowReason) {
	d.n.Helper()
	d.n.Must(d.n.Node.Do(func() error {
		f, err := device.ReadFastPath(d.maps, d.devices, false)
		d.n.Must(err)
		if !slices.Equal(f.IPv4, f.IPv6) || len(f.Devices) > 0 {
			d.n.Errorf("IPv4 %v, IPv6 %v, devices %v", f.IPv4, f.IPv6, f.Devices)
		}
		reasons = f.IPv4
		return nil
	}))
	return reasons
}

// inFastPath has newNode make nodes with programs at devices, across has these take every second pod's device for one
// that leads to another node; redirected is how many packets these redirected.
var (
	inFastPath, across bool
	redirected         uint64
)

// TestInFastPath has flows evaluated by the program that redirects them. What isn't redirected, such as fragments, ICMP
// and forged sources, is evaluated at the hooks by the same flows.
func TestInFastPath(t *testing.T) {
	inFastPath = true
	defer func() { inFastPath, across = false, false }()
	for _, across = range []bool{false, true} {
		t.Run(map[bool]string{false: "pods of the node", true: "pods of other nodes"}[across], evaluatesInFastPath)
	}
}

func evaluatesInFastPath(t *testing.T) {
	redirected = 0
	for name, test := range map[string]func(*testing.T){
		"verdict": TestFlowsFollowVerdict, "reset": resetWithdrawn, "forgotten": TestForgottenFlows,
		"replaced": TestProgramIsReplacedWithoutAGap, "forged": TestForgedSourceIsDropped, "fragments": TestFragments,
		"errors": TestErrorsPass, "error's source": TestErrorPassesToItsSource, "sources": suite.Sources,
		"injections": suite.Injections, "devices": TestFlowIsCheckedOnceItsDeviceIsKnown,
	} {
		t.Run(name, test)
	}
	if redirected < 100 {
		t.Errorf("%d packets were redirected", redirected)
	}
}

// resetWithdrawn has permission withdrawn in the fast path: whichever end speaks first, both are reset, but not by
// entries that are being written. What is allowed stays.
func resetWithdrawn(t *testing.T) {
	n := newNode(t)
	n.hold("audit.yaml")
	for i := range web {
		byClient, byServer := n.connect(client[i], web[i]), n.connect(client[i], web[i])
		stays := n.connect(web[i], client[i])
		n.hold("deny-ingress.yaml")
		n.maps.Set(policy.Changing, true)
		before := n.count(policy.CutFlow)
		byClient[0].Write(make([]byte, 3000))
		byServer[1].Write([]byte{1})
		for deadline := time.Now().Add(10 * time.Second); n.count(policy.CutFlow) < before+2; {
			if time.Now().After(deadline) {
				t.Fatal("packets of two connections are not evaluated")
			}
		}
		for _, end := range slices.Concat(byClient[:], byServer[:]) {
			if err := read(end, 20*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s > %s: cut while entries are written: %v", end.LocalAddr(), end.RemoteAddr(), err)
			}
		}
		n.maps.Set(policy.Changing, false) // both send again
		for _, end := range slices.Concat(byClient[:], byServer[:]) {
			if err := read(end, 10*time.Second); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("%s > %s is not reset: %v", end.LocalAddr(), end.RemoteAddr(), err)
			}
		}
		if !arrives(stays[0], stays[1], true) || !arrives(stays[1], stays[0], true) {
			t.Error("a connection that is allowed was cut")
		}
		n.hold("audit.yaml")
	}
}

// read returns the error of reading a byte that never comes.
func read(c net.Conn, wait time.Duration) error {
	c.SetReadDeadline(time.Now().Add(wait))
	_, err := c.Read(make([]byte, 1))
	return err
}

// TestFastPathEvaluates: a packet is redirected while policies allow it and the only hook in forwarding is theirs, and
// dropped while they don't, whatever path it takes.
func TestFastPathEvaluates(t *testing.T) {
	n := newNode(t)
	d := newDevicePath(n.Network)
	for _, c := range []struct {
		name      string
		do        func()
		redirects bool
	}{
		{"joined by the engine", func() { n.hold("deny-ingress.yaml") }, true},
		{"another hook", func() { n.hook("add") }, false},
		{"that hook gone", func() { n.hook("delete") }, true},
		{"not joined", func() { n.Must(n.pins.Part()) }, false},
		{"joined by Services", func() { n.Must(n.pins.Join()) }, true},
		{"another program of policies", func() { n.Must(n.Write(t.Context(), []Fact{n.hooksFact()}, nil)) }, true},
	} {
		c.do()
		slow := d.slow()
		for end := time.Now().Add(5 * time.Second); c.redirects && len(slow) > 0 && time.Now().Before(end); slow = d.slow() {
			time.Sleep(time.Millisecond) // the kernel removes the hook of a program that was replaced in the background
		}
		if (len(slow) == 0) != c.redirects {
			t.Errorf("%s: the fast path is off: %v", c.name, slow)
		}
		for i := range web {
			redirected, denied := n.count(policy.Redirected), n.count(policy.Denied)
			if !n.Passes(n.Packet(web[i], client[i], policytest.Served[0]), true) {
				t.Errorf("%s: %s > %s does not pass", c.name, web[i], client[i])
			}
			if (n.count(policy.Redirected) > redirected) != c.redirects {
				t.Errorf("%s: %s > %s: %d packets are redirected", c.name, web[i], client[i],
					n.count(policy.Redirected)-redirected)
			}
			if n.Passes(n.Packet(client[i], web[i], policytest.Served[0]), false) {
				t.Errorf("%s: %s > %s passes", c.name, client[i], web[i])
			}
			if n.count(policy.Denied) == denied {
				t.Errorf("%s: %s > %s was not denied", c.name, client[i], web[i])
			}
		}
	}
	if missing, extra := policytest.Read(t, n.Plane, n.held); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
	n.Must(n.pins.Part())
	if missing, _ := policytest.Read(t, n.Plane, n.held); len(missing) != 1 || missing[0].Key.Kind != KindHooks {
		t.Errorf("missing %v, want the hooks, which aren't in the fast path", missing)
	}
	n.Must(n.pins.Join())
	n.Must(n.Write(t.Context(), nil, slices.Collect(maps.Values(n.held)))) // no policies any more
	n.held = map[Key]Fact{}
	slow := d.slow()
	for end := time.Now().Add(10 * time.Second); len(slow) > 0 && time.Now().Before(end); slow = d.slow() {
		time.Sleep(time.Millisecond) // the kernel lets go of a link's hook in the background
	}
	if len(slow) > 0 {
		t.Errorf("without policies the fast path is off: %v", slow)
	}
	if joined, err := n.pins.NeedsJoin(); joined || err != nil {
		t.Errorf("without policies there is a program to join: %v", err)
	}
}

// hook adds a hook of nftables in forwarding, or deletes it.
func (n *node) hook(verb string) {
	n.T.Helper()
	script := "delete table inet other"
	if verb == "add" {
		script = "add table inet other; add chain inet other f { type filter hook forward priority 100; }; " +
			"add rule inet other f counter"
	}
	n.Must(n.Node.Do(func() error {
		out, err := exec.Command("nft", script).CombinedOutput()
		if err != nil {
			return fmt.Errorf("nft %s: %w: %s", script, err, out)
		}
		return nil
	}))
}
