package ebpf_test

import (
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
)

// BenchmarkNewDevices has 30 devices a second come, as with pods, for 3 seconds, and reports how long it takes until
// programs are attached to both directions of one (served-ms), and how long others wait for the kernel's RTNL lock
// meanwhile (rtnl-ms).
func BenchmarkNewDevices(b *testing.B) {
	const rate, devices = 30, 90
	inside(b, func(o ebpf.Options) {
		p := opened(b, o)
		defer clean(b, p)
		_, stop := followed(b, p, []model.ServicePart{theNode})
		defer stop()
		folder, _, err := bpf.Folder()
		if err != nil {
			b.Fatal(err)
		}
		name := "fl-far-" + rand.Text()[:8]
		pods, err := netns.New(name)
		if err != nil {
			b.Fatal(err)
		}
		defer func() { pods.Close(); netns.Delete(name) }()
		h, err := netlink.NewHandle()
		if err != nil {
			b.Fatal(err)
		}
		defer h.Close()
		waits := waitForRTNL(b)
		served, waiting := make([]time.Duration, devices), sync.WaitGroup{}
		begin := time.Now()
		for i := range devices {
			time.Sleep(time.Until(begin.Add(time.Duration(i) * time.Second / rate)))
			name := fmt.Sprint("new", i)
			veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, Flags: net.FlagUp}, PeerName: name,
				PeerNamespace: netlink.NsFd(pods.FD())}
			if err := h.LinkAdd(veth); err != nil {
				b.Fatal(err)
			}
			at, index := time.Now(), veth.Index
			if d, err := net.InterfaceByName(name); err == nil {
				index = d.Index
			}
			waiting.Go(func() {
				awaitPrograms(b, folder, index)
				served[i] = time.Since(at)
			})
		}
		waiting.Wait()
		elapsed := time.Since(begin)
		report(b, "served", served)
		report(b, "rtnl", waits())
		b.ReportMetric(devices/elapsed.Seconds(), "devices/s")
	})
}

// report reports the median, the mean and the 99th percentile.
func report(b *testing.B, what string, l []time.Duration) {
	slices.Sort(l)
	var sum time.Duration
	for _, d := range l {
		sum += d
	}
	ms := func(d time.Duration) float64 { return d.Seconds() * 1000 }
	b.ReportMetric(ms(l[len(l)/2]), what+"-ms")
	b.ReportMetric(ms(sum)/float64(len(l)), what+"-mean-ms")
	b.ReportMetric(ms(l[len(l)*99/100]), what+"-p99-ms")
}

// waitForRTNL has a thread take the kernel's RTNL lock again and again. The function that it returns ends that, and
// returns how long each elapsed.
func waitForRTNL(b *testing.B) func() []time.Duration {
	h, err := netlink.NewHandle()
	if err != nil {
		b.Fatal(err)
	}
	lo, err := h.LinkByIndex(1)
	if err != nil {
		b.Fatal(err)
	}
	done, waits := make(chan struct{}), make(chan []time.Duration)
	go func() {
		defer h.Close()
		var l []time.Duration
		for {
			select {
			case <-done:
				waits <- l
				return
			case <-time.After(time.Millisecond):
			}
			begin := time.Now()
			if err := h.LinkSetUp(lo); err != nil {
				b.Error(err)
			}
			l = append(l, time.Since(begin))
		}
	}()
	return func() []time.Duration {
		close(done)
		return <-waits
	}
}

// awaitPrograms waits until both directions of a device have a program.
func awaitPrograms(b *testing.B, folder string, index int) {
	for _, pin := range []string{"leave", "arrive"} {
		path := filepath.Join(folder, "devices", fmt.Sprintf("%s-%d", pin, index))
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			if _, err := os.Lstat(path); err == nil {
				break
			}
			if time.Now().After(end) {
				b.Errorf("device %d has no program", index)
				return
			}
		}
	}
}
