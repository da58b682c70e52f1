package model

import (
	"net/netip"
	"slices"
	"testing"
)

// The pod of a refused subject is closed, and its address is then one of a pod that isn't known, if those are dropped.
func TestRefusedSubjectIsUnknown(t *testing.T) {
	a := netip.MustParseAddr("192.0.2.7")
	pod, other := &Subject{Pod: "shop/web", Addr: a}, &Subject{Pod: "shop/db", Addr: a.Next()}
	pods := []netip.Prefix{netip.MustParsePrefix("10.0.1.0/24")}
	for _, unknown := range []Verdict{VerdictDrop, VerdictAccept} {
		node := &PolicyNode{Pods: pods, Unknown: unknown}
		wanted := []PolicyPart{node, pod, other}
		in := FailClosed([]PolicyPart{pod}, wanted, nil)
		if s, _ := in[pod].(*Subject); s == nil || s.In[StageAdmin] != Closed || s.Out[StageLast] != Closed {
			t.Errorf("%+v in place of the pod, want it closed", in[pod])
		}
		n, _ := in[node].(*PolicyNode)
		if drops := unknown == VerdictDrop; drops != (n != nil) || in[other] != nil {
			t.Fatalf("unknown pods: %v: %+v in place of the node, %+v of another pod", unknown, n, in[other])
		}
		if n == nil {
			continue
		}
		if want := append(pods[:1:1], netip.PrefixFrom(a, 32)); !slices.Equal(n.Pods, want) {
			t.Errorf("pods %v, want %v", n.Pods, want)
		}
		if again := FailClosed([]PolicyPart{pod}, wanted, in); again[node] != in[node] || again[pod] != in[pod] {
			t.Error("parts that are equal to those of before are others")
		}
	}
}
