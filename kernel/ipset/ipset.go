// Package ipset removes IP sets of the calling thread's network namespace.
package ipset

import (
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
)

// Destroy removes the IP sets whose names begin with a prefix. Rules must not use them any more. Where the kernel has
// no sets there is nothing to remove.
func Destroy(prefix string) error {
	sets, err := netlink.IpsetListAll()
	if err != nil {
		return nil // this kernel has no sets
	}
	var errs []error
	for _, s := range sets {
		if strings.HasPrefix(s.SetName, prefix) {
			if err := netlink.IpsetDestroy(s.SetName); err != nil {
				errs = append(errs, fmt.Errorf("destroy IP set %s: %w", s.SetName, err))
			}
		}
	}
	return errors.Join(errs...)
}
