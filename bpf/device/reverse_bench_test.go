package device

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/service"
)

// dropped is what a program returns of a packet that it drops (TC_ACT_SHOT).
const dropped = 2

// BenchmarkReversePath has a packet that opens a connection run through the program, with the reverse path check and
// without: one that is dropped, since there is no backend, so that it opens one each time.
func BenchmarkReversePath(b *testing.B) {
	runtime.LockOSThread() // for good: the thread's network namespace goes with it
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		b.Fatal(err)
	}
	const wire = `ip link add wire type veth peer name far &&
		ip link set wire up && ip link set far up && ip addr add 192.0.2.1/24 dev wire &&
		ip -6 addr add 2001:db8::1/64 dev wire nodad && sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1`
	if out, err := exec.Command("sh", "-ec", wire).CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	i, err := net.InterfaceByName("wire")
	if err != nil {
		b.Fatal(err)
	}
	for _, checked := range []bool{false, true} {
		w := newWorldOf(b, Options{ReversePath: checked}, service.Frontend{Drop: uint8(outside)}, 0)
		for six, client := range clients {
			p := packet{src: netip.AddrPortFrom(client, 1234), dst: netip.AddrPortFrom(entries[six], 81),
				protocol: unix.IPPROTO_TCP, flags: syn}
			b.Run(fmt.Sprintf("checked=%t/ipv6=%t", checked, six == 1), func(b *testing.B) {
				index := uint32(i.Index)
				o := &ebpf.RunOptions{Data: p.frame(), DataOut: make([]byte, 256), Repeat: uint32(b.N),
					Context: skBuff{IngressIfindex: index, Ifindex: index}}
				if verdict, err := w.programs.by["arrive-14"].Run(o); err != nil || verdict != dropped {
					b.Fatal(verdict, err)
				}
			})
		}
	}
}
