package iptables

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

// named returns the devices of so many pods, by names as others' networks make them.
func named(form string, count int) (parts []*model.Device) {
	for i := range count {
		name := fmt.Sprintf(form, i)
		if strings.Contains(form, "x") {
			h := fnv.New32a()
			fmt.Fprint(h, "pod ", i)
			name = fmt.Sprintf(form, h.Sum32())
		}
		d := &model.Device{Name: name, Sources: []netip.Prefix{
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32)}}
		if i%16 == 0 {
			d.Sources = append(d.Sources, netip.MustParsePrefix("203.0.113.0/24"))
		}
		parts = append(parts, d)
	}
	return parts
}

// testedFrom returns how many rules a packet from a device is tested against from a chain on, and whether it ends in
// the one for what isn't admitted. admitted: its source is.
func testedFrom(chains map[string][]string, chain, device string, admitted bool) (n int, foreign bool) {
	for _, rule := range chains[chain] {
		n++
		words := strings.Fields(rule)
		if target := words[len(words)-1]; words[0] == "-i" {
			prefix, many := strings.CutSuffix(words[1], "+")
			switch {
			case device != prefix && !(many && strings.HasPrefix(device, prefix)):
			case target == chainForeign:
				return n, true
			default:
				more, foreign := testedFrom(chains, target, device, admitted)
				return n + more, foreign
			}
		} else if admitted {
			return n, false
		}
	}
	return n, false
}

func TestRulesOfPodsDevices(t *testing.T) {
	for _, form := range []string{"veth%08x", "cali0%010x", "pod%d", "v%d-h"} {
		for _, c := range []struct{ count, most int }{{1, 4}, {3, 6}, {110, 25}, {250, 30}} {
			t.Run(fmt.Sprint(form, " ", c.count), func(t *testing.T) {
				of := trees{family: iptables.IPv4, unknown: passes, devices: map[string]bool{"eni0": true}}
				devices := named(form, c.count)
				for _, d := range devices {
					of.devices[d.Name] = true
				}
				chains, most, sum := of.build(), 0, 0
				for _, d := range devices {
					n, foreign := testedFrom(chains, chainPods, d.Name, false)
					if sum, most = sum+n, max(most, n); !foreign {
						t.Errorf("%s admits anything", d.Name)
					}
					if n, foreign := testedFrom(chains, chainPods, d.Name, true); foreign || n > 3 {
						t.Errorf("%s admits nothing, or by %d rules: want at most 3", d.Name, n)
					}
				}
				uplink, foreign := testedFrom(chains, chainPods, "wlan0", false)
				t.Logf("%d rules where the source is foreign, at most %d, from an uplink %d", sum/c.count, most, uplink)
				if most > c.most || uplink > 2 || foreign {
					t.Errorf("at most %d rules, from an uplink %d: want %d and 2", most, uplink, c.most)
				}
			})
		}
	}
}

// Devices of all shapes of names come back as they were written, by either variant, and go one by one. What another
// program changes is seen.
func TestDevicesAreReadAsWritten(t *testing.T) {
	eachVariant(t, func(t *testing.T, v Variant) {
		n := policytest.Bare(t)
		p := open(n, v)
		parts := []model.PolicyPart{&model.PolicyNode{}}
		for _, form := range []string{"veth%08x", "pod%d", "abcdefghijkl%d"} {
			for _, d := range named(form, 40) {
				parts = append(parts, d)
			}
		}
		for i := range 15 {
			parts = append(parts, &model.Device{Name: "zzzzzzzzzzzzzzz"[:i+1]})
		}
		held := map[Key]Fact(nil)
		for _, last := range []int{len(parts), 30, 2, 1} {
			wanted := policytest.Facts(t, p, joined(parts[:last]))
			policytest.Move(t, p, held, wanted)
			held = wanted
		}
		wanted := policytest.Facts(t, p, joined(parts))
		policytest.Move(t, p, held, wanted)
		run(n, "iptables-"+string(v), "-D", chainPods, "1")
		if missing, extra := policytest.Read(t, p, wanted); len(missing) == 0 || len(extra) == 0 {
			t.Errorf("a rule is gone: missing %v, extra %v", missing, extra)
		}
	})
}

// A device whose name stands for others is refused by name, and all else is written.
func TestWildcardDeviceIsRefused(t *testing.T) {
	n := policytest.Bare(t)
	p := open(n, NFT)
	wild := &model.Device{Name: "pod+"}
	var put []Fact
	for _, f := range policytest.Facts(t, p, joined([]model.PolicyPart{&model.PolicyNode{}, wild})) {
		put = append(put, f)
	}
	if err := p.Write(t.Context(), put, nil); err == nil || !strings.Contains(err.Error(), "rename it") {
		t.Errorf("a name that ends in +: %v", err)
	}
	missing, extra := policytest.Read(t, p, policytest.Facts(t, p, joined([]model.PolicyPart{&model.PolicyNode{}})))
	if len(missing) > 0 || len(extra) != 2 { // the sets, which have no element
		t.Errorf("missing %v, extra %v", missing, extra)
	}
}

// Where the kernel lacks sets of prefixes by a device, that is named, and all else is written.
func TestKernelWithoutSetsByDevice(t *testing.T) {
	n := policytest.Bare(t)
	p := open(n, NFT)
	p.hasDevices = func() error { return errors.New("no such type") }
	var put []Fact
	for _, f := range policytest.Facts(t, p, joined(policytest.Everything())) {
		put = append(put, f)
	}
	if err := p.Write(t.Context(), put, nil); err == nil || !strings.Contains(err.Error(), "no such type") {
		t.Errorf("%v", err)
	}
	missing, extra := policytest.Read(t, p, policytest.Facts(t, p, joined(policytest.Everything())))
	for _, f := range missing {
		if !f.Key.isEntry() {
			t.Errorf("%v is missing", f.Key)
		}
	}
	if len(missing) == 0 || len(extra) > 0 {
		t.Errorf("%d facts are missing, extra %v", len(missing), extra)
	}
}
