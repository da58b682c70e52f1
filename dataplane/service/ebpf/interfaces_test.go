package ebpf_test

import (
	"net"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/model"
)

// Pods are known by the interface that their packets come in by for the node's stack: behind a bridge, by the bridge.
// Sockets that a hook sees fare as those that none does, and a pod's are translated there.
func TestPodsByInterface(t *testing.T) {
	root, err := cgroup.Root()
	if err != nil {
		t.Fatal(err)
	}
	withPods(t, func(w *twoPods) {
		held := []model.ServicePart{theNode}
		check := func(pods model.Interfaces, want bool) {
			t.Helper()
			n := copyOfNode()
			n.Pods, n.PodInterfaces = nil, pods
			parts := append(attackedParts(&n), &model.Pool{ID: 9, Name: "none", Protocol: model.TCP})
			for _, p := range parts {
				if f, ok := p.(*model.Frontend); ok {
					b := &f.Internal.Pool.Backends[0]
					b.Addr = netip.AddrPortFrom(b.Addr.Addr(), 8080) // what answers
					f.External.Pool = parts[len(parts)-1].(*model.Pool)
				}
			}
			change(t, w.plane, held, parts)
			held = parts
			for _, six := range []bool{false, true} {
				for _, beyond := range []bool{false, true} {
					var c net.Conn
					request := func() (err error) {
						w.in("a", func() { c, err = net.DialTimeout("tcp", attacked[six].String(), patience) })
						return err
					}
					before := w.counts().Began
					if beyond {
						err = cgroup.Do(root, request)
					} else {
						err = request()
					}
					if (err == nil) != want {
						t.Errorf("pods' interfaces %q, IPv6 %t, beyond hooks %t: served %t: %v", pods, six, beyond,
							!want, err)
					}
					if err != nil {
						continue
					}
					c.Close()
					if atDevices := w.counts().Began > before; atDevices != beyond {
						t.Errorf("pods' interfaces %q, IPv6 %t, beyond hooks %t: at devices %t", pods, six, beyond,
							atDevices)
					}
				}
			}
		}
		check(model.Interfaces{Name: "a"}, true)
		check(model.Interfaces{Name: "a", Prefix: true}, true)
		check(model.Interfaces{Name: "b"}, false)
		check(model.Interfaces{}, false)
		w.run(`ip link add br0 address 02:00:00:00:01:01 type bridge && ip link set dev br0 up
			ip addr add fe80::1/64 dev br0 nodad
			ip addr flush dev a; ip link set dev a master br0
			ip route replace 10.244.1.1 dev br0 && ip -6 route replace fd00:244::a dev br0
			ip -6 route del fd00:244::a dev a || true`)
		attach(t, w.plane)
		await(t, "a bridge", func(l map[string]bool) bool { return len(l) == 2*4+1 })
		check(model.Interfaces{Name: "a"}, false)
		check(model.Interfaces{Name: "br", Prefix: true}, true)
		check(model.Interfaces{Name: "br0"}, true)
	})
}
