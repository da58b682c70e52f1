package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// ErrForm says that maps are of another form: another version's, or pinned there by others.
var ErrForm = errors.New("bpf: a map of another form")

// Retire empties the maps of every layout in a folder of frontends, and gives the number of TCP connections that have ways at
// devices, and so go on. Those of another version's form are an ErrForm.
func Retire(folder string) (connections int, err error) {
	list, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("bpf: look for maps: %w", err)
	}
	for _, e := range list {
		if IsLayout(e.Name()) {
			err = errors.Join(err, empty(filepath.Join(folder, e.Name())))
		}
	}
	if err != nil {
		return 0, err
	}
	for name, first := range map[string]packetsWayState{packetsMapDestinations: packetsWayStateASKS, packetsMapSources: packetsWayStateLEARNT} {
		ways, err := filepath.Glob(filepath.Join(folder, stateFolder, name+"-*"))
		if err != nil {
			return 0, err
		}
		for _, path := range ways {
			n, err := alive(path, first)
			if err != nil {
				return 0, err
			}
			connections += n
		}
	}
	return connections, nil
}

// empty leaves a layout's maps without frontends and pods' devices, and has flows of UDP notice.
func empty(folder string) error {
	frontends, err := pinned[Entry, Frontend](filepath.Join(folder, serviceMapFrontends))
	if frontends == nil {
		return err
	}
	defer frontends.Close()
	var keys []Entry
	if err := all(frontends, func(k Entry, _ Frontend) { keys = append(keys, k) }); err != nil {
		return err
	}
	for _, k := range keys {
		if err := frontends.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("bpf: delete a frontend: %w", err)
		}
	}
	if err := KeepPods(folder, "", nil); err != nil {
		return err
	}
	changes, err := pinned[uint32, uint32](filepath.Join(folder, packetsMapChanges))
	if changes == nil {
		return err
	}
	defer changes.Close()
	var n uint32
	if err := changes.Lookup(uint32(0), &n); err != nil {
		return fmt.Errorf("bpf: read the number of changes: %w", err)
	}
	return changes.Put(uint32(0), n+1)
}

// pinned opens a map of K to V, nil where there is none.
func pinned[K, V any](path string) (*ebpf.Map, error) {
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

// alive counts the TCP connections among ways, each by that of its ways which has the state.
func alive(path string, first packetsWayState) (n int, err error) {
	ways, err := pinned[Tuple, Way](path)
	if ways == nil {
		return 0, err
	}
	defer ways.Close()
	now, err := seconds()
	if err != nil {
		return 0, err
	}
	err = all(ways, func(t Tuple, w Way) {
		state := packetsWayState(w.State)
		if t.Protocol == unix.IPPROTO_TCP && state&first != 0 && now < w.Seen+lasts(state) {
			n++
		}
	})
	return n, err
}

// seconds reads the programs' clock.
func seconds() (uint32, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now); err != nil {
		return 0, fmt.Errorf("bpf: read the clock: %w", err)
	}
	return uint32(now.Sec), nil
}

// expired returns whether programs take an entry of a protocol for expired; of TCP that is known a minute late at most.
func expired(w Way, protocol uint8, now uint32) bool {
	state, last := packetsWayState(w.State), uint32(120)
	switch {
	case protocol == unix.IPPROTO_UDP && state&packetsWayStateANSWERED == 0:
		last = 30
	case protocol == unix.IPPROTO_TCP:
		last = max(lasts(state), last) // 120 s where it is over
	}
	return w.Seen+last < now
}

// lasts gives for how many seconds a TCP connection's way without packets lasts: lifetime of bpf/packets.c, but nothing for one that is over.
func lasts(s packetsWayState) uint32 {
	const bothEnds, oneSided = packetsWayStateENDS | packetsWayStateENDED, packetsWayStateDIRECT | packetsWayStateLEARNT
	switch {
	case s&packetsWayStateRESET != 0 || s&bothEnds == bothEnds || s&oneSided != 0 && s&packetsWayStateENDS != 0:
		return 0
	case s&packetsWayStateUNASSURED != 0 && s&packetsWayStateANSWERED != 0:
		return 60
	case s&packetsWayStateUNASSURED == 0 && s&packetsWayStateANSWERED != 0:
		return 5 * 24 * 3600
	}
	return 120
}
