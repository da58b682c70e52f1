package service

import (
	"net/netip"
	"testing"

	netutils "k8s.io/utils/net"
)

// What kube-proxy reads is read as the same address or range.
func FuzzParseAddr(f *testing.F) {
	for _, s := range []string{"010.096.000.001", "10.96.0.1", "::ffff:10.096.0.1", "fd00::010.0.0.1", "10.0.0.0256",
		"1.2.3", "010.0.0.0/08", "::ffff:10.0.0.0/104", "::ffff:0:0/90", "fd00::/8", "::/0", "10.0.0.0/33"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if ip, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(s)); ok {
			if a, err := ParseAddr(s); err != nil || a != ip.Unmap() {
				t.Errorf("%q is %v, %v; kube-proxy reads %v", s, a, err, ip)
			}
		}
		if _, n, err := netutils.ParseCIDRSloppy(s); err == nil {
			p, err := ParsePrefix(s)
			if ip, _ := netip.AddrFromSlice(n.IP); err != nil || !p.Addr().Is4In6() && p.Masked().Addr() != ip.Unmap() {
				t.Errorf("%q is %v, %v; kube-proxy reads %v", s, p, err, n)
			}
		}
	})
}
