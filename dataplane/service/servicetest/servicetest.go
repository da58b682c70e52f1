// Package servicetest makes models for tests and benchmarks of service planes, and compares facts.
package servicetest

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Services returns a node and n Services with ten backends each.
func Services(n int) []model.ServicePart {
	at := make([]uint32, n)
	for i := range at {
		at[i] = uint32(i)
	}
	return ServicesAt(at)
}

// ServicesAt returns a node and Services at addresses counted from 10.96.0.0.
func ServicesAt(at []uint32) []model.ServicePart {
	parts := []model.ServicePart{&model.ServiceNode{Node: &model.Node{Name: "a",
		Pods: []netip.Prefix{netip.MustParsePrefix("10.128.0.0/9")}},
		NodePorts: []model.Range{{First: netip.MustParseAddr("0.0.0.0"), Last: netip.MustParseAddr("126.255.255.255")}}}}
	for i, a := range at {
		p := Pool(i, 0)
		parts = append(parts, p, Frontend(int(a), p))
	}
	return parts
}

// Address returns the i-th address from base.
func Address(base uint32, i int) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, base+uint32(i))))
}

// Pool returns the i-th Service's pool of ten backends; a shift replaces the last one.
func Pool(i, shift int) *model.Pool {
	p := &model.Pool{ID: uint64(i) << 16, Name: fmt.Sprint(i), Protocol: model.TCP}
	for j := range 10 {
		if j == 9 {
			j += shift * 1_000_000
		}
		p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(Address(10<<24|128<<16, i*10+j), 8080)})
	}
	return p
}

// Frontend returns the i-th address's frontend, which a pool serves.
func Frontend(i int, p *model.Pool) *model.Frontend {
	t := model.Target{Pool: p}
	return &model.Frontend{Entry: model.Entry{Addr: Address(10<<24|96<<16, i), Port: 80, Protocol: model.TCP}, Internal: t,
		External: t, Masquerade: model.OriginsOf(model.FromNode, model.FromExternal)}
}

// Facts renders parts, each fact once.
func Facts[K dataplane.Key, V comparable](t testing.TB, p dataplane.Plane[model.ServicePart, K, V],
	parts []model.ServicePart) (l []dataplane.Fact[K, V]) {
	t.Helper()
	seen := map[K]V{}
	for _, part := range parts {
		for _, f := range p.Render(part) {
			v, twice := seen[f.Key]
			if twice && v != f.Value {
				t.Errorf("%v is wanted as %v and as %v", f.Key, f.Value, v)
			}
			if !twice {
				seen[f.Key] = f.Value
				l = append(l, f)
			}
		}
	}
	return l
}

// Difference returns the facts of a that b doesn't have.
func Difference[K dataplane.Key, V comparable](a, b []dataplane.Fact[K, V]) (l []dataplane.Fact[K, V]) {
	in := make(map[K]V, len(b))
	for _, f := range b {
		in[f.Key] = f.Value
	}
	for _, f := range a {
		if v, has := in[f.Key]; !has || v != f.Value {
			l = append(l, f)
		}
	}
	return l
}
