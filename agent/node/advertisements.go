package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
)

// AdvertisementsFile is the name of the file in the agent's folder with what Advertisements changed.
const AdvertisementsFile = "router-advertisements.json"

// Advertisements has the devices of a node that forwards IPv6 accept router advertisements. Where accept_ra of a device
// is 1, as it is by default, the kernel ignores them as soon as it forwards (addrconf.c), and removes the routes that
// were made of them; 2 accepts them nevertheless.
type Advertisements struct {
	ns      *netns.Namespace
	s       *netlink.Socket
	file    string
	changed changed
}

// changed is what was changed, as the file has it.
type changed struct {
	Forwarding string   `json:"forwarding"` // before the first change
	Devices    []string `json:"devices"`    // whose accept_ra was 1
}

const forwardingIPv6 = "net/ipv6/conf/all/forwarding"

func acceptRA(device string) string { return "net/ipv6/conf/" + device + "/accept_ra" }

// OpenAdvertisements opens those of the calling thread's namespace. The file has what was changed before.
func OpenAdvertisements(file string) (*Advertisements, error) {
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	s, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	a := &Advertisements{ns: ns, s: s, file: file}
	if a.changed, err = readChanged(file); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

// Close closes the handles. The settings stay.
func (a *Advertisements) Close() error { return errors.Join(a.s.Close(), a.ns.Close()) }

// Accept has devices accept router advertisements, where accept_ra is 1: before the node forwards IPv6, or nothing is
// left of those that came before. The error names the devices that lose routes or addresses, since they can't. The
// agent's own, by which pods' packets come, stay as they are.
func (a *Advertisements) Accept(devices []string) error {
	var waiting []string
	forwarding := ""
	err := a.ns.Do(func() (err error) {
		for _, d := range devices {
			if d == "lo" || strings.HasPrefix(d, "fl-") {
				continue
			}
			if n, err := sysctl.Number(acceptRA(d)); err == nil && n == 1 {
				waiting = append(waiting, d)
			}
		}
		if len(waiting) > 0 {
			forwarding, err = value(forwardingIPv6)
		}
		return err
	})
	for _, d := range waiting {
		if failed := a.accept(d, forwarding); failed != nil && a.uses(d) {
			err = errors.Join(err, fmt.Errorf("device %s has routes or addresses by router advertisements, which the kernel "+
				"ignores where the node forwards IPv6: %w; set net.ipv6.conf.%s.accept_ra to 2 on the node", d, failed, d))
		}
	}
	return err
}

// accept records a device, then has it accept router advertisements.
func (a *Advertisements) accept(device, forwarding string) error {
	if !slices.Contains(a.changed.Devices, device) {
		now := a.changed
		if len(now.Devices) == 0 {
			now.Forwarding = forwarding
		}
		now.Devices = append(slices.Clone(now.Devices), device)
		b, err := json.Marshal(now)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(a.file), 0o755)
		}
		if err == nil {
			err = os.WriteFile(a.file+".new", b, 0o600)
		}
		if err == nil {
			err = os.Rename(a.file+".new", a.file)
		}
		if err != nil {
			return err
		}
		a.changed = now
	}
	return sysctl.Set(a.ns, sysctl.Setting{Name: acceptRA(device), Value: "2"})
}

// uses reports whether a device has a route or an address by router advertisements.
func (a *Advertisements) uses(device string) bool {
	index, _, err := link.VethNamed(a.s, device)
	if err != nil || index == 0 {
		return false
	}
	routes, err := route.List(a.s, unix.RTPROT_RA)
	of := func(r route.Route) bool { return r.Dev == index }
	if err != nil || slices.ContainsFunc(routes, of) {
		return true
	}
	temporary, err := link.Temporary(a.s)
	return err != nil || temporary[index]
}

// RestoreAdvertisements puts back in the calling thread's namespace what the file says was changed, and removes it.
// With advertisements that are ignored again, the node doesn't forward IPv6 any more, if it didn't before. Devices that
// have gone, and what others have changed since, are passed over.
func RestoreAdvertisements(file string) error {
	was, err := readChanged(file)
	if err != nil || len(was.Devices) == 0 {
		return err
	}
	if was.Forwarding == "0" {
		_, _, err = sysctl.Ensure(forwardingIPv6, was.Forwarding)
	}
	for _, d := range was.Devices {
		if n, missing := sysctl.Number(acceptRA(d)); missing == nil && n == 2 {
			_, _, failed := sysctl.Ensure(acceptRA(d), "1")
			err = errors.Join(err, failed)
		}
	}
	if err != nil {
		return fmt.Errorf("put back how devices accept router advertisements: %w", err)
	}
	return os.Remove(file)
}

// readChanged reads the file; one that isn't there says that nothing was changed.
func readChanged(file string) (c changed, err error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err != nil {
		return c, fmt.Errorf("read what was changed for router advertisements: %s: %w; remove that file", file, err)
	}
	return c, nil
}
