package link

import (
	"errors"
	"fmt"
	"strings"
)

// DestroySets removes the IP sets whose names begin with a prefix. Rules must not use them any more.
func (c *Conn) DestroySets(prefix string) error {
	sets, err := c.h.IpsetListAll()
	if err != nil {
		return nil // this kernel has no sets
	}
	var errs []error
	for _, s := range sets {
		if strings.HasPrefix(s.SetName, prefix) {
			if err := c.h.IpsetDestroy(s.SetName); err != nil {
				errs = append(errs, fmt.Errorf("destroy IP set %s: %w", s.SetName, err))
			}
		}
	}
	return errors.Join(errs...)
}
