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

// Retire empties the maps of every layout in a folder of frontends, and returns how many TCP connections of the
// programs at devices have not ended. Maps of another version's form are an ErrForm.
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
	if err := settle(); err != nil {
		return 0, err
	}
	counted := map[string]func(packetsWayState) bool{packetsMapDestinations: opensFlow, packetsMapSources: learnt}
	for name, counts := range counted {
		ways, err := filepath.Glob(filepath.Join(folder, stateFolder, name+"-*"))
		if err != nil {
			return 0, err
		}
		for _, path := range ways {
			n, err := alive(path, counts)
			if err != nil {
				return 0, err
			}
			connections += n
		}
	}
	return connections, nil
}

// settle waits until no program runs any more that has seen a frontend: it may have begun a connection.
func settle() error {
	g, err := NewGrace()
	if err != nil {
		return err
	}
	defer g.Close()
	return g.Wait()
}

// empty leaves a layout's maps without frontends and pods' devices, and has flows of UDP notice.
func empty(folder string) error {
	if err := rejectNothing(folder); err != nil {
		return err
	}
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

// rejectNothing has the programs of a layout reject and drop no packet that matches no frontend: others serve it.
func rejectNothing(folder string) error {
	unmatched, err := pinned[servicePrefix, uint32](filepath.Join(folder, packetsMapUnmatched))
	if unmatched == nil {
		return err
	}
	defer unmatched.Close()
	var keys []servicePrefix
	if err := all(unmatched, func(k servicePrefix, _ uint32) { keys = append(keys, k) }); err != nil {
		return err
	}
	for _, k := range keys {
		if err := unmatched.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("bpf: delete a prefix of unmatched packets: %w", err)
		}
	}
	return nil
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

// alive counts the TCP connections among entries that have not ended, each by that of its entries which counts.
func alive(path string, counts func(packetsWayState) bool) (n int, err error) {
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
		if t.Protocol == unix.IPPROTO_TCP && counts(state) && !ended(state) && !expired(w, t.Protocol, now) {
			n++
		}
	})
	return n, err
}

// opensFlow reports whether an entry of destinations stands for its flow: a client's, or that of a port which clashes
// gave to a connection that is not ours.
func opensFlow(s packetsWayState) bool {
	return s&packetsWayStateASKS != 0 || s&(packetsWayStateOURS|packetsWayStateHIDDEN) == 0
}

// learnt reports whether an entry of sources stands for its flow, as another node has the client's.
func learnt(s packetsWayState) bool { return s&packetsWayStateLEARNT != 0 }

// seconds reads the programs' clock.
func seconds() (uint32, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now); err != nil {
		return 0, fmt.Errorf("bpf: read the clock: %w", err)
	}
	return uint32(now.Sec), nil
}

// expired returns whether programs take an entry of a protocol for expired.
func expired(w Way, protocol uint8, now uint32) bool {
	return w.Seen+lifetime(packetsWayState(w.State), protocol) < now
}

const (
	bothEnds = packetsWayStateENDS | packetsWayStateENDED
	oneSided = packetsWayStateDIRECT | packetsWayStateLEARNT
)

// ended reports whether a TCP connection has ended: it was reset, or both FINs were acknowledged. With direct server
// return each node sees one FIN.
func ended(s packetsWayState) bool {
	return s&packetsWayStateRESET != 0 || s&bothEnds == bothEnds && s&packetsWayStateACKED != 0 ||
		s&oneSided != 0 && s&packetsWayStateENDS != 0
}

// lifetime returns for how many seconds an entry without packets lasts: lifetime of bpf/packets.c.
func lifetime(s packetsWayState, protocol uint8) uint32 {
	const established = 5 * 24 * 3600
	has := func(bits packetsWayState) bool { return s&bits != 0 }
	answered, acked := has(packetsWayStateANSWERED), has(packetsWayStateACKED)
	switch {
	case protocol == unix.IPPROTO_UDP && !answered:
		return 30
	case protocol == unix.IPPROTO_UDP:
		return 120
	case has(packetsWayStateRESET):
		return 10
	case s&bothEnds == bothEnds && !acked:
		return 30
	case s&bothEnds == bothEnds:
		return 120
	case has(bothEnds) && acked && !has(oneSided):
		return 60
	case has(bothEnds):
		return 120
	case has(packetsWayStateUNASSURED) && answered:
		return 60
	case has(packetsWayStateUNASSURED) || !answered:
		return 120
	case has(packetsWayStateCLIENT_UNACKED | packetsWayStateBACKEND_UNACKED):
		return 300
	}
	return established
}
