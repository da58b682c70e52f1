package device

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/kernel/bpf"
)

// Folders of one network namespace, by what is pinned below them.
type Folders struct {
	Services string // as bpf.Folder returns
	Policies string // as policy.Folder returns
}

// CurrentFolders returns the folders of the calling thread's network namespace.
func CurrentFolders() (f Folders, err error) {
	if f.Services, _, err = bpf.Folder(); err != nil {
		return f, err
	}
	f.Policies, err = policy.Folder()
	return f, err
}

// policyCalls opens the map by which the programs at devices call that of policies, nil where there is none.
func (f Folders) policyCalls() (*ebpf.Map, error) {
	c, err := forDevices()
	if err != nil {
		return nil, fmt.Errorf("bpf: read the programs' object: %w", err)
	}
	m, err := ebpf.LoadPinnedMap(pin(filepath.Join(f.Services, bpf.LayoutPrefix), c.Maps[deviceMapFlPolicyCalls]), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("bpf: open map %s: %w", deviceMapFlPolicyCalls, err)
	}
	return m, nil
}

// Join has the programs at devices call the program of network policies for packets in the fast path. Where either is
// missing it does nothing: whichever comes second joins them.
func (f Folders) Join() error {
	calls, err := f.policyCalls()
	if calls == nil {
		return err
	}
	defer calls.Close()
	p, err := ebpf.LoadPinnedProgram(filepath.Join(policy.Hooks(f.Policies), policy.PathPinned), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("bpf: open the program of network policies in the fast path: %w", err)
	}
	defer p.Close()
	if err := calls.Put(uint32(0), p); err != nil {
		return fmt.Errorf("bpf: call the program of network policies in the fast path: %w", bpf.Explain(err))
	}
	return nil
}

// Part has the programs at devices call no program of network policies: what policies evaluate uses the host stack.
func (f Folders) Part() error {
	calls, err := f.policyCalls()
	if calls == nil {
		return err
	}
	defer calls.Close()
	if err := calls.Delete(uint32(0)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("bpf: call no program of network policies in the fast path: %w", err)
	}
	return nil
}

// joined returns the ID of the program that the programs at devices call, and of the one that they should; 0 where
// there is none.
func (f Folders) joined() (called, wanted uint32, err error) {
	if wanted, err = bpf.ProgramID(filepath.Join(policy.Hooks(f.Policies), policy.PathPinned)); err != nil {
		return 0, 0, err
	}
	calls, err := f.policyCalls()
	if calls == nil {
		return 0, wanted, err
	}
	defer calls.Close()
	if err := calls.Lookup(uint32(0), &called); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, 0, fmt.Errorf("bpf: read map %s: %w", deviceMapFlPolicyCalls, err)
	}
	return called, wanted, nil
}

// NeedsJoin reports whether Join would change something.
func (f Folders) NeedsJoin() (bool, error) {
	calls, err := f.policyCalls()
	if calls == nil {
		return false, err
	}
	calls.Close()
	called, wanted, err := f.joined()
	return wanted != 0 && called != wanted, err
}

// evaluated returns the ID of the program at netfilter's hooks that the fast path evaluates policies for, 0: none.
func (f Folders) evaluated() (uint32, error) {
	called, wanted, err := f.joined()
	if err != nil || called == 0 || called != wanted {
		return 0, err
	}
	return bpf.ProgramID(filepath.Join(policy.Hooks(f.Policies), policy.Pinned))
}
