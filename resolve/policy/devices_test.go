package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// own is one end of a pair that leads to hosts.
func own(name string, hosts ...string) Device {
	d := Device{Name: name, Peer: true}
	for _, h := range hosts {
		d.Hosts = append(d.Hosts, netip.MustParseAddr(h))
	}
	return d
}

func ranges(l ...string) (out []netip.Prefix) {
	for _, s := range l {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// wantDevices compares the parts of devices, such as "pod1 of tenant/pod: 10.0.1.1/32".
func (s *stage) wantDevices(want ...string) {
	s.Helper()
	s.sum.apply(seedDice{T: s.T}, s.Apply(nil))
	got := []string{}
	for _, d := range s.sum.now.Devices {
		text := strings.Trim(fmt.Sprint(d.Sources), "[]")
		got = append(got, fmt.Sprintf("%s of %s: %s", d.Name, d.Pod, text))
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		s.Errorf("devices %q, want %q", got, want)
	}
	if p := s.Policies(); len(p.Devices) != len(want) || s.sum.now.Node.Devices != (len(want) > 0) {
		s.Errorf("a snapshot has devices %v, the node says %v", p.Devices, s.sum.now.Node.Devices)
	}
}

// Subjects have the devices of their addresses, whichever is known first, and lose them again.
func TestDevicesOfSubjects(t *testing.T) {
	s := newStage(t, Config{Devices: []Device{own("pod1", "10.0.1.1")}})
	want := func(pod, other string) {
		t.Helper()
		s.sum.apply(seedDice{T: t}, s.Apply(nil))
		for a, want := range map[string]string{"10.0.1.1": pod, "10.0.1.2": other} {
			if p := s.sum.now.Subjects[netip.MustParseAddr(a)]; p == nil && want != "none" || p != nil && p.Device != want {
				t.Errorf("%s: %+v, want device %q", a, p, want)
			}
		}
	}
	want("pod1", "none")
	s.SetDevices([]Device{own("pod2", "10.0.1.2")})
	want("", "none")
	s.put(somePod("tenant", "other", "10.0.1.2", nil))
	want("", "pod2")
	s.SetDevices(nil)
	want("", "")
	s.SetDevices([]Device{own("pod3", "10.0.1.1")})
	want("pod3", "")
	s.SetDevices([]Device{own("pod3", "10.0.1.1"), own("pod4", "10.0.1.1")}) // which of both isn't known
	want("", "")
}

// What the node's routes lead to by a device of one pod alone may come in by it, and nothing else.
func TestDeviceAdmitsWhatRoutesLeadTo(t *testing.T) {
	s := newStage(t, Config{Pods: ranges("10.0.1.0/24")})
	pod := own("pod1", "10.0.1.1", "fd00:1::1")
	s.SetDevices([]Device{pod, own("eth0", "192.168.0.2"), {Name: "dummy0", Hosts: []netip.Addr{netip.MustParseAddr(
		"10.0.1.9")}}})
	s.wantDevices("pod1 of tenant/pod: 10.0.1.1/32 fd00:1::1/128")
	pod.Links, pod.Behind = ranges("10.0.1.0/30"), ranges("203.0.113.0/24", "10.0.1.0/31")
	s.SetDevices([]Device{pod})
	s.wantDevices("pod1 of tenant/pod: 10.0.1.0/30 203.0.113.0/24 fd00:1::1/128")
	s.SetDevices([]Device{own("pod1", "10.0.1.1"), own("pod2", "10.0.1.1", "10.0.1.2")}) // pod2's pod is not known
	s.wantDevices("pod2 of : 10.0.1.1/32 10.0.1.2/32")
	s.SetDevices(nil)
	s.wantDevices()
}

// Where every policy is audited nothing is dropped for its source, either.
func TestAuditChecksNoSource(t *testing.T) {
	s := newStage(t, Config{Audit: true, Devices: []Device{own("pod1", "10.0.1.1")}})
	s.wantDevices()
	if p := s.sum.now.Subjects[netip.MustParseAddr("10.0.1.1")]; p == nil || p.Device != "" {
		t.Errorf("%+v", p)
	}
}

// A device that pods share is no pod's alone, nor is one that leads to none, as long as that is so.
func TestDeviceThatPodsShare(t *testing.T) {
	s := newStage(t, Config{Devices: []Device{own("pod1", "10.0.1.1", "10.0.1.2")}})
	s.wantDevices("pod1 of tenant/pod: 10.0.1.1/32 10.0.1.2/32")
	other := somePod("tenant", "other", "10.0.1.2", nil)
	s.put(other)
	s.wantDevices()
	s.remove(other)
	s.wantDevices("pod1 of tenant/pod: 10.0.1.1/32 10.0.1.2/32")
	s.remove(somePod("tenant", "pod", "10.0.1.1", nil))
	s.wantDevices()
	away := somePod("tenant", "pod", "10.0.1.1", nil)
	away.Spec.NodeName = "n2"
	s.put(away)
	s.wantDevices()
	s.put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.config.Node}, Spec: corev1.NodeSpec{
		PodCIDRs: []string{"10.0.1.2/32"}}})
	s.wantDevices("pod1 of : 10.0.1.1/32 10.0.1.2/32") // of a pod that isn't known
}

// Pods on a bridge are named, with what doesn't hold for them, as long as there are any.
func TestBridgeProblems(t *testing.T) {
	bridge := Device{Name: "cni0", Bridge: true, Links: ranges("10.0.0.0/16", "fd00:1::/64")}
	s := newStage(t, Config{})
	want := func(bridged string, reasons ...string) {
		t.Helper()
		s.sum.apply(seedDice{T: t}, s.Apply(nil))
		var got []string
		for _, p := range s.Problems() {
			got = append(got, p.Reason)
			if p.Object.Name != "n1" || !strings.Contains(p.Message, "cni0") ||
				p.Reason == BridgeNotFiltered && !strings.Contains(p.Message, bridge.Bypass[0]) {
				t.Errorf("problem %v", p)
			}
		}
		if !slices.Equal(got, reasons) {
			t.Errorf("problems %q, want %q", got, reasons)
		}
		if p := s.sum.now.Subjects[netip.MustParseAddr("10.0.1.1")]; p != nil && p.Bridge != bridged {
			t.Errorf("%+v, want bridge %q", p, bridged)
		}
	}
	want("")
	s.SetDevices([]Device{bridge, {Name: "br1", Bridge: true, Links: ranges("10.0.0.0/8"), Bypass: [2]string{"x", "x"}}})
	want("", SourcesNotChecked)
	bridge.Bypass[1] = "bridge-nf-call-ip6tables is 0" // there is no pod of IPv6
	s.SetDevices([]Device{bridge})
	want("", SourcesNotChecked)
	bridge.Bypass[0] = "bridge-nf-call-iptables is 0"
	s.SetDevices([]Device{bridge})
	want("cni0", BridgeNotFiltered, SourcesNotChecked)
	s.SetDevices([]Device{bridge, own("pod1", "10.0.1.1")}) // the longest prefix counts
	want("")
	s.SetDevices([]Device{bridge})
	want("cni0", BridgeNotFiltered, SourcesNotChecked)
	s.remove(somePod("tenant", "pod", "10.0.1.1", nil))
	want("")
	s.put(somePod("tenant", "pod", "10.0.1.1", nil))
	want("cni0", BridgeNotFiltered, SourcesNotChecked)
	s.SetDevices(nil)
	want("")
}
