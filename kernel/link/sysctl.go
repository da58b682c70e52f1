package link

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"fairlead.dev/fairlead/kernel/netns"
)

// Setting is one kernel setting of a network namespace.
type Setting struct {
	Name  string // path under /proc/sys/net, such as "ipv4/ip_forward"; a leading "-": a kernel without it is fine
	Value string
}

// Set writes settings in ns, in order, up to the first that fails.
func Set(ns *netns.Namespace, settings ...Setting) error {
	return ns.Do(func() error {
		for _, s := range settings {
			if err := s.write(); err != nil {
				return fmt.Errorf("in network namespace %s: %w", ns.Name, err)
			}
		}
		return nil
	})
}

// write sets s in the calling thread's namespace.
func (s Setting) write() error {
	name, optional := strings.CutPrefix(s.Name, "-")
	f, err := os.OpenFile("/proc/sys/net/"+name, os.O_WRONLY, 0)
	if optional && errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("set net/%s to %s: %w", name, s.Value, err)
	}
	_, err = f.WriteString(s.Value)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("set net/%s to %s: %w", name, s.Value, err)
	}
	return nil
}

// Get reads a setting of ns by its name.
func Get(ns *netns.Namespace, name string) (value string, err error) {
	err = ns.Do(func() error {
		b, err := os.ReadFile("/proc/sys/net/" + name)
		value = strings.TrimSpace(string(b))
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read net/%s: %w", name, err)
	}
	return value, nil
}
