package link

import (
	"flag"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/sandbox/vm/vmtest"
)

// secondKernel reports that these tests run in the second kernel, which has ipvlan, netkit and IPIP.
var secondKernel = flag.Bool("second-kernel", false, "run the tests that need ipvlan, netkit and IPIP here")

func TestInSecondKernel(t *testing.T) {
	if !*secondKernel {
		vmtest.Run(t, "fairlead.dev/fairlead/kernel/link", "^TestInSecondKernel$", "-second-kernel")
		return
	}
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 9}
	for _, kind := range []string{"ipvlan l2", "ipvlan l3", "netkit"} {
		_, c := space(t)
		pod, inPod := space(t)
		wire, _ := space(t)
		dev, err := c.AddVeth(End{Name: "eth0"}, End{Name: "eth0"}, wire)
		check(t, err)
		switch kind {
		case "netkit":
			_, err = c.AddNetkit(End{Name: "near", MAC: mac}, End{Name: "eth0", MAC: mac}, pod)
		default:
			err = c.AddIPVLAN(dev, kind == "ipvlan l3", End{Name: "eth0"}, pod)
		}
		check(t, err)
		check(t, inPod.Up(index(t, inPod, "eth0")))
	}
	_, c := space(t)
	dev, err := c.AddIPIP("tunnel", netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"))
	if check(t, err); index(t, c, "tunnel") != dev {
		t.Error("the tunnel has another index")
	}
}

// TestMarkReversePath sets src_valid_mark of one device.
func TestMarkReversePath(t *testing.T) {
	ns, c := space(t)
	wire, _ := space(t)
	_, err := c.AddVeth(End{Name: "eth0"}, End{Name: "eth0"}, wire)
	check(t, err)
	s, err := netlink.OpenIn(ns, unix.NETLINK_ROUTE)
	check(t, err)
	defer s.Close()
	for _, want := range []bool{false, true} {
		for name, marks := range map[string]bool{"eth0": want, "lo": false, "none": false} {
			if got, err := MarksReversePath(s, name); err != nil || got != marks {
				t.Errorf("%s: %t, %v; want %t", name, got, err, marks)
			}
		}
		var b netlink.Batch
		MarkReversePath(&b, "eth0")
		check(t, s.Apply(&b))
	}
	if text, err := sysctl.Get(ns, "net/ipv4/conf/eth0/src_valid_mark"); err != nil || text != "1" {
		t.Errorf("the setting is %q, %v", text, err)
	}
}

func TestMACVLAN(t *testing.T) {
	_, c := space(t)
	pod, inPod := space(t)
	wire, _ := space(t)
	dev, err := c.AddVeth(End{Name: "eth0"}, End{Name: "eth0"}, wire)
	check(t, err, c.AddMACVLAN(dev, End{Name: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}}, pod))
	check(t, inPod.Up(index(t, inPod, "eth0")))
	if err := c.AddMACVLAN(dev, End{Name: "eth0"}, pod); err == nil {
		t.Error("two devices have one name")
	}
}
