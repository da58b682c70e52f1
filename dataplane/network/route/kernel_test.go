package route

import (
	"errors"
	"flag"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/sandbox/vm/vmtest"
)

// internal reports that these tests run in the second kernel, which has IPIP.
var internal = flag.Bool("second-kernel", false, "run the tests that need IPIP here")

// TestInSecondKernel has an overlay of IPIP.
func TestInSecondKernel(t *testing.T) {
	if !*internal {
		vmtest.Run(t, "fairlead.dev/fairlead/dataplane/network/route", "^TestInSecondKernel$", "-second-kernel")
		return
	}
	c := newClusterOf(t, model.IPIP)
	reachEachOther(c)
	longestByIPIP(c)
	a := c.nodes["a"]
	for name, broken := range map[string]func(){
		"device deleted":      func() { c.ip(a, "link", "del", IPIPDevice) },
		"device down":         func() { c.ip(a, "link", "set", IPIPDevice, "down") },
		"MTU changed":         func() { c.ip(a, "link", "set", IPIPDevice, "mtu", "1300") },
		"own address deleted": func() { c.ip(a, "addr", "flush", "dev", IPIPDevice) },
		"routes flushed":      func() { c.ip(a, "route", "flush", "proto", "250") },
		"source changed":      func() { c.ip(a, "link", "set", IPIPDevice, "type", "ipip", "local", "192.168.0.9") },
		"another kind of device": func() {
			c.command(a, "sh", "-c", "until ip link add fl-ipip type bridge; do ip link del fl-ipip; done")
		},
	} {
		t.Log(name)
		broken()
		c.repaired(a)
	}
	c.connected()
	c.tunnel = model.VXLAN
	c.switchTo(resolve.Always)
	for _, n := range c.nodes {
		c.holds(n)
	}
	c.connected()
}

// longestByIPIP sends packets as long as they fit, and longer ones, which are cut.
func longestByIPIP(c *cluster) {
	a, b := c.nodes["a"], c.nodes["c"]
	for _, size := range []int{1480 - 28, 4000} {
		for _, p := range served {
			if _, err := c.request(a.podNS, p, b.pod[0], size, 10*time.Second); err != nil {
				c.Errorf("%d bytes to %s %s: %v", size, b.pod[0], p, err)
			}
		}
	}
	c.command(a, "sh", "-c", "ip link show dev "+IPIPDevice+" | grep -q 'mtu 1480 '")
}

// TestKernelWithoutIPIPIsNamed is for this machine's kernel, which lacks it.
func TestKernelWithoutIPIPIsNamed(t *testing.T) {
	netnstest.With(t, New, func(p *Plane) {
		device := Fact{Key: Key{Kind: KindDevice, Name: nameOf(IPIPDevice)},
			Value: Value{Device: "lo", Via: netip.MustParseAddr("127.0.0.1"), MTU: 1480}}
		err := p.Write(t.Context(), []Fact{device}, nil)
		refused := (*dataplane.Refused[Key])(nil)
		switch {
		case err == nil: // this kernel has it
			facts, err := p.Read(t.Context())
			if err != nil || len(facts) != 1 || !facts[0].Equal(device) {
				t.Errorf("%v, %v", facts, err)
			}
		case !errors.As(err, &refused) || !errors.Is(refused.Facts[device.Key], unix.EOPNOTSUPP) ||
			!strings.Contains(refused.Facts[device.Key].Error(), "set network.encapsulation to VXLAN on all nodes"):
			t.Errorf("%v", err)
		}
	})
}
