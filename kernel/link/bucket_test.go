package link

import (
	"math"
	"os/exec"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// TestBuckets reads back just the rates that were written, up to the greatest, and leaves others' queueing disciplines
// alone.
func TestBuckets(t *testing.T) {
	ns, c := space(t)
	other, _ := space(t)
	dev, err := c.AddVeth(End{Name: "eth0"}, End{Name: "eth0"}, other)
	check(t, err)
	s, err := netlink.OpenIn(ns, unix.NETLINK_ROUTE)
	check(t, err)
	defer s.Close()
	do := func(f func(*netlink.Batch, ...Bucket), l Bucket) {
		t.Helper()
		var b netlink.Batch
		f(&b, l)
		check(t, s.Apply(&b))
	}
	held := func(want ...Bucket) {
		t.Helper()
		if got, err := Buckets(s); err != nil || !slices.Equal(got, want) {
			t.Errorf("%v, %v; want %v", got, err, want)
		}
	}
	held()
	do(DeleteBuckets, Bucket{Dev: dev}) // there is none
	for _, rate := range []uint64{125, 1_000_003, math.MaxUint32 - 1, math.MaxUint32, math.MaxUint32 + 1, 1 << 40,
		math.MaxUint64 / 8} {
		do(PutBuckets, Bucket{dev, rate})
		held(Bucket{dev, rate})
	}
	do(DeleteBuckets, Bucket{Dev: dev})
	held()
	check(t, ns.Do(func() error { return exec.Command("tc", "qdisc", "add", "dev", "eth0", "root", "pfifo").Run() }))
	held()
	do(DeleteBuckets, Bucket{Dev: dev})
	check(t, ns.Do(func() error { return exec.Command("tc", "qdisc", "del", "dev", "eth0", "root").Run() })) // it is there
}
