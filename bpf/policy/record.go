package policy

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Recorded is connections from one address to a port of another.
type Recorded struct {
	Client   netip.Addr
	Server   netip.AddrPort // port 0: the protocol has none
	Protocol uint8
	Denied   bool   // by policies
	Count    uint64 // 0: one that is open, and is counted elsewhere or is older than the recording
}

// Recorder has the program of network policies count new connections, accepted and denied, for one reader.
type Recorder struct {
	folder              string
	recording, recorded *ebpf.Map
	before              uint64 // connections lost by recordings before this one
}

// OpenRecorder opens that of the calling thread's network namespace. The caller closes it. Where the program isn't
// attached the error is fs.ErrNotExist.
func OpenRecorder() (r *Recorder, err error) {
	folder, err := Folder()
	if err != nil {
		return nil, err
	}
	digest, err := Attached(Hooks(folder), nil)
	if err == nil && digest == "" {
		err = fmt.Errorf("bpf: record connections: no program of network policies: %w", fs.ErrNotExist)
	}
	if err != nil {
		return nil, err
	}
	r = &Recorder{folder: filepath.Join(folder, bpf.LayoutPrefix)}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.closeMaps())
			r = nil
		}
	}()
	if r.recording, err = stateMap(r.folder, policyMapFlRecording); err != nil {
		return r, err
	}
	if r.recorded, err = stateMap(r.folder, policyMapFlRecorded); err != nil {
		return r, err
	}
	until, err := r.value(policyRecordingRECORDING_UNTIL)
	if err == nil && time.Duration(until) > bpf.Now() {
		err = errors.New("bpf: connections of this node are being recorded: end that recording first, or wait some " +
			"seconds if it was killed")
	}
	if err == nil {
		r.before, err = r.value(policyRecordingRECORDING_LOST)
	}
	if err == nil {
		err = r.Read(func(Recorded) {}) // what a recording that was killed left
	}
	return r, err
}

// value returns a value of the recording.
func (r *Recorder) value(index policyRecording) (n uint64, err error) {
	if err = r.recording.Lookup(uint32(index), &n); err != nil {
		err = fmt.Errorf("bpf: read the state of the recording: %w", err)
	}
	return n, err
}

// Renew has connections counted from now on, and for d at most. Where the maps of the program that counts them are no
// longer those that are read, the error is fs.ErrNotExist.
func (r *Recorder) Renew(d time.Duration) error {
	current, err := stateMap(r.folder, policyMapFlRecording)
	if err == nil {
		defer current.Close()
		err = sameMap(current, r.recording)
	}
	if err != nil {
		return fmt.Errorf("bpf: record connections: the program of network policies was removed or replaced: %w", err)
	}
	return r.until(bpf.Now() + d)
}

// sameMap returns fs.ErrNotExist where two maps aren't the same one.
func sameMap(a, b *ebpf.Map) error {
	var ids [2]ebpf.MapID
	for i, m := range []*ebpf.Map{a, b} {
		info, err := m.Info()
		if err != nil {
			return fmt.Errorf("bpf: read a map: %w", err)
		}
		ids[i], _ = info.ID()
	}
	if ids[0] != ids[1] {
		return fs.ErrNotExist
	}
	return nil
}

// End has no more connections counted. What was can still be read.
func (r *Recorder) End() error { return r.until(0) }

func (r *Recorder) until(t time.Duration) error {
	if err := r.recording.Put(uint32(policyRecordingRECORDING_UNTIL), uint64(t)); err != nil {
		return fmt.Errorf("bpf: record connections: %w", err)
	}
	return nil
}

// Read calls yield with what was counted since the last Read.
func (r *Recorder) Read(yield func(Recorded)) error {
	var keys []policyRecordedFlow
	if err := bpf.ReadAll(r.recorded, func(k policyRecordedFlow, _ uint64) { keys = append(keys, k) }); err != nil {
		return err
	}
	for _, k := range keys {
		var n uint64
		if err := r.recorded.LookupAndDelete(k, &n); err != nil {
			return fmt.Errorf("bpf: read recorded connections: %w", err)
		}
		yield(Recorded{Client: bpf.Addr(k.Client.Word), Server: netip.AddrPortFrom(bpf.Addr(k.Server.Word), bpf.Port(k.Port)),
			Protocol: k.Protocol, Denied: k.Denied != 0, Count: n})
	}
	return nil
}

// Established calls yield with each connection that is open.
func (r *Recorder) Established(yield func(Recorded)) error {
	return openFlows(r.folder, func(t policyTuple) {
		f := Recorded{Client: bpf.Addr(t.Source.Word), Protocol: t.Protocol}
		f.Server = netip.AddrPortFrom(bpf.Addr(t.Destination.Word), bpf.Port(t.Dport))
		yield(f)
	})
}

// Lost returns how many connections were not counted for want of space.
func (r *Recorder) Lost() (uint64, error) {
	n, err := r.value(policyRecordingRECORDING_LOST)
	return n - r.before, err
}

// Close ends the recording.
func (r *Recorder) Close() error { return errors.Join(r.End(), r.closeMaps()) }

func (r *Recorder) closeMaps() (err error) {
	for _, m := range []*ebpf.Map{r.recording, r.recorded} {
		if m != nil {
			err = errors.Join(err, m.Close())
		}
	}
	return err
}
