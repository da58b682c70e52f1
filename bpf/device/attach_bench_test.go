package device

import (
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/netns"
)

// BenchmarkAttach attaches programs to both directions of a device that is up, as of a pod, and reports how long that
// takes, nearly all of it under the kernel's RTNL lock; with grace periods as they are, and expedited.
func BenchmarkAttach(b *testing.B) {
	name := "fl-tcx-" + rand.Text()[:8]
	ns, err := netns.New(name)
	if err != nil {
		b.Fatalf("this benchmark needs root: %v", err)
	}
	defer func() { ns.Close(); netns.Delete(name) }()
	w, links := newWorld(b), filepath.Join(bpf.Mount, "fl-bpf-"+rand.Text()[:8])
	if err := bpf.MakeFolder(links); err != nil {
		b.Fatal(err)
	}
	defer os.RemoveAll(links)
	ours, _, err := bpf.Folder()
	if err != nil {
		b.Fatal(err)
	}
	if err := bpf.MakeFolder(filepath.Dir(ours)); err != nil { // Expedited's mark is there
		b.Fatal(err)
	}
	for _, how := range []struct {
		name string
		do   func(func() error) error
	}{{"normal", func(f func() error) error { return f() }}, {"expedited", bpf.Expedited}} {
		b.Run(how.name, func(b *testing.B) {
			var elapsed time.Duration
			for i := range b.N {
				err := ns.Do(func() error {
					d, err := addUp(fmt.Sprint(how.name, i%1000))
					if err != nil {
						return err
					}
					begin := time.Now()
					err = how.do(func() error { return w.programs.Attach(links, Device{Index: d.Index, Header: 14}) })
					elapsed += time.Since(begin)
					if err != nil {
						return err
					}
					for _, ingress := range []bool{false, true} {
						if err := Detach(links, d.Index, ingress); err != nil {
							return err
						}
					}
					return netlink.LinkDel(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: d.Index}})
				})
				if err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(elapsed.Seconds()*1000/float64(b.N), "attach-ms")
		})
	}
}

// addUp adds a pair of devices that are up, and returns the first.
func addUp(name string) (*net.Interface, error) {
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, Flags: net.FlagUp}, PeerName: "p" + name}
	if err := netlink.LinkAdd(veth); err != nil {
		return nil, err
	}
	return net.InterfaceByName(name)
}
