package device

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
)

// Drain empties the maps of every layout in a folder of frontends, and that of masquerading, and returns how many TCP
// connections of the programs at devices have not ended. Maps of another version's form are an ErrForm.
func Drain(folder string) (connections int, err error) {
	list, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("bpf: look for maps: %w", err)
	}
	for _, e := range list {
		if bpf.IsLayout(e.Name()) {
			err = errors.Join(err, empty(filepath.Join(folder, e.Name())))
		}
	}
	if err != nil {
		return 0, err
	}
	if err := CleanMasqueradeRanges(folder); err != nil {
		return 0, err
	}
	if err := settle(); err != nil {
		return 0, err
	}
	counted := map[string]func(deviceNatState) bool{deviceMapFlNatDst: opensFlow, deviceMapFlNatSrc: learnt}
	for name, counts := range counted {
		entries, err := filepath.Glob(filepath.Join(folder, bpf.StateFolder, pinNames[name]+"-*"))
		if err != nil {
			return 0, err
		}
		for _, path := range entries {
			n, err := alive(path, counts)
			if err != nil {
				return 0, err
			}
			connections += n
		}
	}
	return connections, nil
}

// settle waits until all programs that have seen a frontend have ended: they may have begun a connection.
func settle() error {
	g, err := bpf.NewGrace()
	if err != nil {
		return err
	}
	defer g.Close()
	return g.Wait()
}

// empty removes frontends and pods' devices from a layout's maps, and has UDP flows checked again.
func empty(folder string) error {
	if err := clearUnmatched(folder); err != nil {
		return err
	}
	there, err := service.Empty(folder)
	if !there || err != nil {
		return err
	}
	if err := WritePods(folder, "", nil); err != nil {
		return err
	}
	changes, err := bpf.Pinned[uint32, uint32](filepath.Join(folder, pinNames[deviceMapFlChanges]))
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

// clearUnmatched has the programs of a layout reject and drop no packet that matches no frontend: another plane
// serves it.
func clearUnmatched(folder string) error {
	unmatched, err := bpf.Pinned[service.Prefix, uint32](filepath.Join(folder, pinNames[deviceMapFlUnmatched]))
	if unmatched == nil {
		return err
	}
	defer unmatched.Close()
	var keys []service.Prefix
	if err := bpf.ReadAll(unmatched, func(k service.Prefix, _ uint32) { keys = append(keys, k) }); err != nil {
		return err
	}
	for _, k := range keys {
		if err := unmatched.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("bpf: delete a prefix of unmatched packets: %w", err)
		}
	}
	return nil
}

// alive counts the TCP connections among entries that have not ended, each by that of its entries which counts.
func alive(path string, counts func(deviceNatState) bool) (n int, err error) {
	entries, err := bpf.Pinned[Tuple, NatEntry](path)
	if entries == nil {
		return 0, err
	}
	defer entries.Close()
	now, err := bpf.Seconds()
	if err != nil {
		return 0, err
	}
	err = bpf.ReadAll(entries, func(t Tuple, w NatEntry) {
		state := deviceNatState(w.State)
		if t.Protocol == unix.IPPROTO_TCP && counts(state) && !ended(state) && !expired(w, t.Protocol, now) {
			n++
		}
	})
	return n, err
}

// CutFlows removes the NAT entries of the programs at devices, of maps in a folder of frontends, that lead packets to
// addresses or translate packets from them. What comes of such a flow later is the first packet of a new one.
func CutFlows(folder string, of func(netip.Addr) bool) error {
	var errs []error
	for _, name := range []string{deviceMapFlNatDst, deviceMapFlNatSrc} {
		held, err := filepath.Glob(filepath.Join(folder, bpf.StateFolder, pinNames[name]+"-*"))
		errs = append(errs, err)
		for _, path := range held {
			errs = append(errs, cutFlows(path, of))
		}
	}
	return errors.Join(errs...)
}

// cutFlows removes the entries of a map that have one of the addresses. A map of another version's form stays as it is.
func cutFlows(path string, of func(netip.Addr) bool) error {
	entries, err := bpf.Pinned[Tuple, NatEntry](path)
	if entries == nil {
		if errors.Is(err, bpf.ErrForm) {
			return nil
		}
		return err
	}
	defer entries.Close()
	var cut []Tuple
	err = bpf.ReadAll(entries, func(t Tuple, w NatEntry) {
		isOf := func(words [4]uint32) bool { return of(bpf.Addr(words)) }
		if isOf(t.Source.Word) || isOf(t.Destination.Word) || isOf(w.To.Address.Word) || isOf(w.From.Address.Word) {
			cut = append(cut, t)
		}
	})
	for _, t := range cut {
		if e := entries.Delete(t); e != nil && !errors.Is(e, ebpf.ErrKeyNotExist) {
			err = errors.Join(err, fmt.Errorf("bpf: delete a NAT entry: %w", e))
		}
	}
	return err
}

// opensFlow reports whether an entry of fl_nat_dst stands for its flow: a client's, or that of a port which
// port_clashes assigned to a connection that is not ours. What pods began out of the cluster isn't awaited: who
// masquerades next translates it anew.
func opensFlow(s deviceNatState) bool {
	return s&deviceNatStateDIR_ORIGINAL != 0 ||
		s&(deviceNatStateNODE_CLIENT|deviceNatStateMASQUERADED|deviceNatStatePOD_FLOW) == 0
}

// learnt reports whether an entry of fl_nat_src stands for its flow: another node has the client's.
func learnt(s deviceNatState) bool { return s&deviceNatStateDSR_LEARNT != 0 }

// expired reports whether programs treat an entry of a protocol as expired.
func expired(w NatEntry, protocol uint8, now uint32) bool {
	return w.Seen+lifetime(deviceNatState(w.State), protocol) < now
}

const (
	bothEnds = deviceNatStateFIN_SENDER | deviceNatStateFIN_PEER
	oneSided = deviceNatStateDSR | deviceNatStateDSR_LEARNT
)

// ended reports whether a TCP connection has ended: it was reset, or both FINs were acknowledged. With direct server
// return each node sees one FIN.
func ended(s deviceNatState) bool {
	return s&deviceNatStateRESET != 0 || s&bothEnds == bothEnds && s&deviceNatStateFIN_ACKED != 0 ||
		s&oneSided != 0 && s&deviceNatStateFIN_SENDER != 0
}

// lifetime returns for how many seconds an entry without packets lasts: lifetime of nat.h.
func lifetime(s deviceNatState, protocol uint8) uint32 {
	const established = 5 * 24 * 3600
	has := func(bits deviceNatState) bool { return s&bits != 0 }
	answered, acked := has(deviceNatStateSEEN_REPLY), has(deviceNatStateFIN_ACKED)
	switch {
	case protocol != unix.IPPROTO_TCP && !answered:
		return 30
	case protocol != unix.IPPROTO_TCP:
		return 120
	case has(deviceNatStateRESET):
		return 10
	case s&bothEnds == bothEnds && !acked:
		return 30
	case s&bothEnds == bothEnds:
		return 120
	case has(bothEnds) && acked && !has(oneSided):
		return 60
	case has(bothEnds):
		return 120
	case has(deviceNatStateUNASSURED) && answered:
		return 60
	case has(deviceNatStateUNASSURED) || !answered:
		return 120
	case has(deviceNatStateCLIENT_UNACKED | deviceNatStateBACKEND_UNACKED):
		return 300
	}
	return established
}
