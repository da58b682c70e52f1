package bpf

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// ErrForm is the error of maps of another form: another version's, or pinned there by others.
var ErrForm = errors.New("bpf: a map of another form")

// Absent reports whether an error is that maps are not there, not all, or others in their place (ErrForm).
func Absent(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrForm) }

// Full reports whether an error is that a map is full.
func Full(err error) bool { return errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) }

// Shared reports whether a map is one that agents share: not the programs' constants.
func Shared(name string) bool { return name[0] != '.' }

// LayoutPrefix begins the names of layouts.
const LayoutPrefix = "maps-"

// IsLayout reports whether a name is one that LayoutName returns, in any version.
func IsLayout(name string) bool { return strings.HasPrefix(name, LayoutPrefix) }

// LayoutName returns a name for the form of maps, by a digest of names, types and sizes: programs can't use maps of
// another.
func LayoutName(specs map[string]*ebpf.MapSpec) string {
	h := sha256.New()
	for _, n := range slices.Sorted(maps.Keys(specs)) {
		m := specs[n]
		fmt.Fprintf(h, "%s %v %d %d %d %d %99v %99v\n", n, m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags, m.Key,
			m.Value) // 99: the names of all fields
	}
	return LayoutPrefix + hex.EncodeToString(h.Sum(nil)[:5])
}

// StateFolder is the folder of state maps, which packets and sockets write, beside the layouts' folders: they don't go
// with a layout, and an upgrade finds what it needs to go on.
const StateFolder = "state"

// stateOf returns the folder of state maps beside that of a layout.
func stateOf(folder string) string { return filepath.Join(filepath.Dir(folder), StateFolder) }

// StatePin returns the path of a state map's pin beside the folder of a layout: its name says of what form the map is.
func StatePin(folder, name string, m *ebpf.MapSpec, entries uint32) string {
	form := sha256.Sum256(fmt.Appendf(nil, "%v %d %d %d %d %s %s", m.Type, m.KeySize, m.ValueSize, entries, m.Flags,
		typeName(m.Key), typeName(m.Value)))
	return filepath.Join(stateOf(folder), name+"-"+hex.EncodeToString(form[:4]))
}

// MapSet is the maps of a layout, opened, by their names.
type MapSet map[string]*ebpf.Map

// OpenSet opens maps that are pinned in the folder of a layout and beside it, each by open.
func OpenSet(folder string, specs map[string]*ebpf.MapSpec, pin func(folder string, m *ebpf.MapSpec) string,
	open func(path string, m *ebpf.MapSpec) (*ebpf.Map, error)) (MapSet, error) {
	if err := errors.Join(checkFolder(folder), checkFolder(stateOf(folder))); err != nil {
		return nil, err
	}
	s := MapSet{}
	for name, spec := range specs {
		m, err := open(pin(folder, spec), spec)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("bpf: map %s: %w", name, err), s.Close())
		}
		s[name] = m
	}
	return s, nil
}

// MakeFolders creates the folder of a layout, and that of state maps beside it.
func MakeFolders(folder string) error {
	if err := MakeFolder(folder); err != nil {
		return err
	}
	return MakeFolder(stateOf(folder))
}

// OpenMap opens a pinned map. One of another type, size or flags, which no version of ours pins there, is an ErrForm.
func OpenMap(path string, m *ebpf.MapSpec) (*ebpf.Map, error) {
	held, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, err
	}
	if err := m.Compatible(held); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %s: %w", ErrForm, path, err), held.Close())
	}
	return held, nil
}

// CreateMap creates a map and pins it, in place of what is there.
func CreateMap(path string, m *ebpf.MapSpec) (*ebpf.Map, error) {
	if err := Unpin(path); err != nil {
		return nil, err
	}
	made, err := ebpf.NewMap(m)
	if err != nil {
		return nil, Explain(err)
	}
	if err := made.Pin(path); err != nil {
		return nil, errors.Join(err, made.Close())
	}
	return made, nil
}

// RemoveLayout removes the maps of a layout; with the last layout, also the state maps, and then last is true.
func RemoveLayout(folder string) (last bool, err error) {
	if err := os.RemoveAll(folder); err != nil {
		return false, fmt.Errorf("bpf: remove maps: %w", err)
	}
	if others, _ := filepath.Glob(filepath.Join(filepath.Dir(folder), LayoutPrefix+"*")); len(others) > 0 {
		return false, nil
	}
	return true, RemoveFolder(stateOf(folder))
}

// Load loads an object's programs to work on the maps.
func (s MapSet) Load(c *ebpf.CollectionSpec) (*ebpf.Collection, error) {
	ours := map[string]*ebpf.Map{}
	for n := range c.Maps {
		if Shared(n) {
			ours[n] = s[n]
		}
	}
	return ebpf.NewCollectionWithOptions(c, ebpf.CollectionOptions{MapReplacements: ours})
}

// Serves reports whether a program that uses maps of those IDs works on these: all but one, its constants, must be
// ours.
func (s MapSet) Serves(program []ebpf.MapID) bool {
	ours := map[ebpf.MapID]bool{}
	for _, n := range s {
		if i, err := n.Info(); err == nil {
			if id, ok := i.ID(); ok {
				ours[id] = true
			}
		}
	}
	others := 0
	for _, id := range program {
		if !ours[id] {
			others++
		}
	}
	return others <= 1
}

// Memory maps an array of T into memory, and adds that to mapped, for Unmap.
func Memory[T any](s MapSet, name string, mapped *[][]byte) ([]T, error) {
	var each T
	page := uintptr(os.Getpagesize())
	n := s[name].MaxEntries()
	size := (uintptr(n)*unsafe.Sizeof(each) + page - 1) &^ (page - 1)
	b, err := unix.Mmap(s[name].FD(), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("bpf: map the memory of map %s: %w", name, err)
	}
	*mapped = append(*mapped, b)
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), n), nil
}

// Unmap undoes Memory.
func Unmap(mapped [][]byte) error {
	var errs []error
	for _, b := range mapped {
		errs = append(errs, unix.Munmap(b))
	}
	return errors.Join(errs...)
}

// Close closes the maps. Pinned, they stay.
func (s MapSet) Close() error {
	var errs []error
	for name, m := range s {
		if err := m.Close(); err != nil {
			errs = append(errs, fmt.Errorf("bpf: close map %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// Pinned opens a map of K to V, nil where there is none.
func Pinned[K, V any](path string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("bpf: open %s: %w", path, err)
	}
	var k K
	var v V
	if int(m.KeySize()) != binary.Size(k) || int(m.ValueSize()) != binary.Size(v) {
		m.Close()
		return nil, fmt.Errorf("%w: %s", ErrForm, path)
	}
	return m, nil
}

// batch is the number of elements read at once.
const batch = 4096

// ReadAll reads a whole hash map.
func ReadAll[K, V any](m *ebpf.Map, yield func(K, V)) error {
	keys, values := make([]K, batch), make([]V, batch)
	var at ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&at, keys, values, nil)
		for i := range n {
			yield(keys[i], values[i])
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("bpf: read %v: %w", m, err)
		}
	}
}
