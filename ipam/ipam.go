// Package ipam allocates pods' addresses: of each family's ranges, the address that has been free longest. What is in
// use is one record for each attachment in a folder that lives in memory, so that nothing leaks over a reboot: records
// of another boot are dropped. There is no lock file and no database: one process has the folder.
package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"fairlead.dev/fairlead/cni"
)

// Record is an attachment that has addresses.
type Record struct {
	ID        string        `json:"id"` // as cni.Key makes it
	Pod       string        `json:"pod,omitempty"`
	UID       string        `json:"uid,omitempty"` // of the Pod, as far as known
	Made      time.Time     `json:"made,omitzero"` // when it was recorded
	Interface string        `json:"interface"`
	NetNS     string        `json:"netns,omitempty"` // path, as the runtime has it
	Network   string        `json:"network"`         // name of the network configuration
	Addresses []netip.Addr  `json:"addresses"`
	Foreign   bool          `json:"foreign,omitempty"` // another plugin made it
	End       string        `json:"end,omitempty"`     // Foreign: the node's end of the device, as far as known
	MTU       int           `json:"mtu"`
	Limits    cni.Bandwidth `json:"limits,omitzero"`
	Device    string        `json:"device,omitempty"` // kind of device, as model.DeviceKind has it; "": veth
	// of Addresses, as allocated now: those that another attachment may have had since the node's boot, and that no
	// Settle has dealt with since
	Reused []netip.Addr `json:"-"`
}

// mostRemembered is how many released addresses are given out in the order of their release, a family.
const mostRemembered = 4096

const (
	bootFile     = "boot"
	releasedFile = "released.json"
)

// Pool has the addresses of a node's pods. Its methods may be called from any goroutine.
type Pool struct {
	folder string

	mu       sync.Mutex
	adopts   bool // the folder is of a process before this one, of the same boot: which addresses it gave out is not known
	ranges   []netip.Prefix
	records  map[string]*Record
	used     map[netip.Addr]string // IDs
	released [2][]netip.Addr       // IPv4's and IPv6's free ones, the longest free first
	fresh    map[netip.Prefix]netip.Addr
	releases uint64                // so far
	dirty    map[netip.Addr]uint64 // free ones that no Settle has dealt with: the number of their last release
}

// Exhausted is the error that a family has no free address.
type Exhausted struct {
	Ranges []netip.Prefix
	Used   int
}

// Error implements error.
func (e *Exhausted) Error() string {
	return fmt.Sprintf("all %d addresses of %v are in use: delete pods of this node, or give it another range", e.Used,
		e.Ranges)
}

// Open reads the records in a folder, which it makes. Those of another boot, by the text boot, are deleted.
func Open(folder, boot string) (*Pool, error) {
	p := &Pool{folder: folder, records: map[string]*Record{}, used: map[netip.Addr]string{},
		fresh: map[netip.Prefix]netip.Addr{}, dirty: map[netip.Addr]uint64{}}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, fmt.Errorf("open address records: %w", err)
	}
	was, err := os.ReadFile(p.path(bootFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open address records: %w", err)
	}
	if string(was) != boot {
		if err := p.forget(); err != nil {
			return nil, fmt.Errorf("delete address records of another boot: %w", err)
		}
		return p, p.write(bootFile, []byte(boot))
	}
	p.adopts = true
	return p, p.load()
}

// Read returns the records in a folder, sorted by ID, and changes nothing. No folder, and one of another boot, has
// none.
func Read(folder, boot string) ([]Record, error) {
	p := &Pool{folder: folder, records: map[string]*Record{}, used: map[netip.Addr]string{}}
	was, err := os.ReadFile(p.path(bootFile))
	if errors.Is(err, fs.ErrNotExist) || err == nil && string(was) != boot {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read address records: %w", err)
	}
	names, err := p.files()
	for _, n := range names {
		if !strings.HasSuffix(n, temporary) {
			err = errors.Join(err, p.read(n))
		}
	}
	return p.Records(), err
}

// Usage is how many addresses of a range are in use, and can be.
type Usage struct {
	Used int    `json:"used"`
	Free uint64 `json:"free"` // at most 1<<32
}

// FreeText returns how many addresses are free, for people.
func (u Usage) FreeText() string {
	if u.Free >= most {
		return "more than " + fmt.Sprint(most-1)
	}
	return fmt.Sprint(u.Free)
}

// most is how many free addresses are counted.
const most = 1 << 32

// UsageOf returns the usage of a range by records.
func UsageOf(r netip.Prefix, records []Record) (u Usage) {
	for _, record := range records {
		for _, a := range record.Addresses {
			if r.Contains(a) {
				u.Used++
			}
		}
	}
	bits := r.Addr().BitLen() - r.Bits()
	if u.Free = most; bits < 32 {
		u.Free = 1 << bits
	}
	reserved := uint64(2 + u.Used) // the network's, the node's own
	if r.Addr().Is4() {
		reserved++ // the broadcast address
	}
	if bits < 32 {
		u.Free -= min(u.Free, reserved)
	}
	return u
}

func (p *Pool) path(name string) string { return filepath.Join(p.folder, name) }

// forget deletes all files of the folder that are ours.
func (p *Pool) forget() error {
	names, err := p.files()
	for _, n := range append(names, releasedFile) {
		if e := os.Remove(p.path(n)); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	return err
}

// files lists the names of records.
func (p *Pool) files() (names []string, err error) {
	entries, err := os.ReadDir(p.folder)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "attachment-") {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// load reads the folder. A record that can't be read is an error: which addresses it has is not known.
func (p *Pool) load() error {
	names, err := p.files()
	if err != nil {
		return fmt.Errorf("read address records: %w", err)
	}
	for _, n := range names {
		if strings.HasSuffix(n, temporary) {
			if err := os.Remove(p.path(n)); err != nil { // of a write that a crash cut short: never in force
				return fmt.Errorf("delete address record: %w", err)
			}
			continue
		}
		if err := p.read(n); err != nil {
			return err
		}
	}
	b, err := os.ReadFile(p.path(releasedFile))
	if err == nil {
		err = json.Unmarshal(b, &p.released)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.released = [2][]netip.Addr{} // their order alone is lost
	}
	for i := range p.released {
		p.released[i] = slices.DeleteFunc(p.released[i], func(a netip.Addr) bool { return family(a) != i || p.used[a] != "" })
	}
	return nil
}

// read reads a record's file.
func (p *Pool) read(name string) error {
	b, err := os.ReadFile(p.path(name))
	if err != nil {
		return fmt.Errorf("read address record: %w", err)
	}
	r, err := ParseRecord(b)
	if err != nil {
		return fmt.Errorf("read address record %s: %w; delete it if no pod of this node has its address", p.path(name), err)
	}
	p.records[r.ID] = r
	for _, a := range r.Addresses {
		p.used[a] = r.ID
	}
	return nil
}

// ParseRecord reads a record.
func ParseRecord(b []byte) (*Record, error) {
	r := &Record{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, err
	}
	if r.ID == "" || r.Interface == "" || slices.ContainsFunc(r.Addresses,
		func(a netip.Addr) bool { return !a.IsValid() }) {
		return nil, errors.New("no ID, interface or valid address in it")
	}
	return r, nil
}

const temporary = ".new"

// write replaces a file at once.
func (p *Pool) write(name string, b []byte) error {
	file := p.path(name)
	if err := os.WriteFile(file+temporary, b, 0o600); err != nil {
		return fmt.Errorf("write address record: %w", err)
	}
	if err := os.Rename(file+temporary, file); err != nil {
		return fmt.Errorf("write address record: %w", err)
	}
	return nil
}

// SetRanges sets where new addresses come from: of each family's ranges, in order. Addresses in use stay so.
func (p *Pool) SetRanges(ranges []netip.Prefix) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Equal(p.ranges, ranges) {
		return
	}
	p.ranges = slices.Clone(ranges)
	for i := range p.released {
		p.released[i] = slices.DeleteFunc(p.released[i], func(a netip.Addr) bool { return !contains(ranges, a) })
	}
}

// family returns 0 for IPv4, 1 for IPv6 and 2 for an address that is none.
func family(a netip.Addr) int {
	switch {
	case a.Is4():
		return 0
	case a.Is6():
		return 1
	}
	return 2
}

// contains reports whether one of the ranges has the address.
func contains(ranges []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}

// Records returns all records, sorted by ID.
func (p *Pool) Records() (l []Record) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.records {
		l = append(l, *r)
	}
	slices.SortFunc(l, func(a, b Record) int { return strings.Compare(a.ID, b.ID) })
	return l
}

// Record returns the record of an attachment and reports whether there is one.
func (p *Pool) Record(id string) (Record, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.records[id]; r != nil {
		return *r, true
	}
	return Record{}, false
}

// InUse is the error that an attachment can't have the address that is requested for it.
type InUse struct {
	Address netip.Addr
	Why     string
}

// Error implements error.
func (e *InUse) Error() string { return fmt.Sprintf("can't allocate %s: %s", e.Address, e.Why) }

// Allocate returns an attachment with an address of each family that there are ranges of, and records that. Addresses
// that it comes with are those that it must have; the error is InUse where they can't be had. One that has a record has
// the addresses of that. The error is Exhausted where a family has none left; then none is allocated.
func (p *Pool) Allocate(r Record) (Record, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if known := p.records[r.ID]; known != nil {
		return *known, nil
	}
	if len(p.ranges) == 0 {
		return r, errors.New("this node has no range of addresses for pods yet")
	}
	addresses, err := p.choose(r.Addresses)
	if err != nil {
		return r, err
	}
	r.Addresses, r.Made = addresses, time.Now()
	b, err := json.Marshal(r)
	if err == nil {
		err = p.write(cni.RecordFile(r.ID), b)
	}
	if err != nil {
		return r, err
	}
	stored := r
	p.records[r.ID] = &stored
	for _, a := range r.Addresses {
		i := family(a)
		if p.mayLeave(a) {
			r.Reused = append(r.Reused, a)
		}
		delete(p.dirty, a)
		p.used[a] = r.ID
		p.released[i] = slices.DeleteFunc(p.released[i], func(b netip.Addr) bool { return a == b })
	}
	return r, nil
}

// mayLeave reports whether an attachment before may have left something under an address. p.mu is held.
func (p *Pool) mayLeave(a netip.Addr) bool { return p.adopts || p.dirty[a] != 0 }

// Settle calls cut if attachments may have left something under addresses that are free now, with a function that
// reports whether an address is such a one at that moment. Addresses that were free when it began are not Reused
// then. If cut returns an error, so does Settle, and all is due again.
func (p *Pool) Settle(cut func(left func(netip.Addr) bool) error) error {
	p.mu.Lock()
	adopts, releases, dirty := p.adopts && len(p.ranges) > 0, p.releases, len(p.dirty)
	p.mu.Unlock()
	if !adopts && dirty == 0 {
		return nil
	}
	if err := cut(func(a netip.Addr) bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.dirty[a] != 0 || p.adopts && p.used[a] == "" && contains(p.ranges, a)
	}); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.adopts = p.adopts && !adopts
	maps.DeleteFunc(p.dirty, func(_ netip.Addr, release uint64) bool { return release <= releases })
	return nil
}

// Adopt records an attachment that another plugin made, with the addresses that it has, in place of what is recorded of
// it.
func (p *Pool) Adopt(r Record) error {
	r.Made = time.Now()
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.write(cni.RecordFile(r.ID), b); err != nil {
		return err
	}
	p.records[r.ID] = &r
	return nil
}

// choose returns a free address of each family that there are ranges of, those requested among them.
func (p *Pool) choose(requested []netip.Addr) (l []netip.Addr, err error) {
	for _, a := range requested {
		if err := p.mayHave(a); err != nil {
			return nil, err
		}
	}
	for i := range p.released {
		of := p.of(i)
		if len(of) == 0 {
			continue
		}
		if j := slices.IndexFunc(requested, func(a netip.Addr) bool { return family(a) == i }); j >= 0 {
			l = append(l, requested[j])
			continue
		}
		a, ok := p.next(i, of)
		if !ok {
			return nil, &Exhausted{of, p.count(of)}
		}
		l = append(l, a)
	}
	return l, nil
}

// mayHave returns why an attachment can't have an address.
func (p *Pool) mayHave(a netip.Addr) error {
	i := slices.IndexFunc(p.ranges, func(r netip.Prefix) bool { return r.Contains(a) })
	switch {
	case i < 0:
		return &InUse{a, fmt.Sprintf("pods of this node have addresses of %v", p.ranges)}
	case a.Less(first(p.ranges[i])) || a == broadcast(p.ranges[i]):
		return &InUse{a, fmt.Sprintf("it is reserved in %s", p.ranges[i])}
	case p.used[a] != "":
		return &InUse{a, "it is in use by " + p.used[a]}
	}
	return nil
}

// of returns the ranges of a family.
func (p *Pool) of(i int) (l []netip.Prefix) {
	for _, r := range p.ranges {
		if family(r.Addr()) == i {
			l = append(l, r)
		}
	}
	return l
}

// next returns the address of some ranges of a family that has been free longest: one that never was in use as far as
// known, else that which was released first.
func (p *Pool) next(family int, ranges []netip.Prefix) (a netip.Addr, ok bool) {
	free := func(a netip.Addr) bool { return p.used[a] == "" && !slices.Contains(p.released[family], a) }
	for _, r := range ranges {
		a, known := p.fresh[r]
		if !known {
			a = first(r)
		}
		for ; r.Contains(a) && a != broadcast(r); a = a.Next() {
			if free(a) {
				p.fresh[r] = a
				return a, true
			}
		}
		p.fresh[r] = a
	}
	for _, a := range p.released[family] {
		if contains(ranges, a) {
			return a, true
		}
	}
	for _, r := range ranges { // released so long ago that it is forgotten
		for a := first(r); r.Contains(a) && a != broadcast(r); a = a.Next() {
			if free(a) {
				return a, true
			}
		}
	}
	return netip.Addr{}, false
}

// first returns the first address for pods: the one before is the node's own, that before the network's.
func first(r netip.Prefix) netip.Addr { return r.Masked().Addr().Next().Next() }

// broadcast returns the last address of an IPv4 range; the zero address for IPv6, where that is one as any other.
func broadcast(r netip.Prefix) (last netip.Addr) {
	if !r.Addr().Is4() {
		return last
	}
	b := r.Masked().Addr().As4()
	for i := r.Bits(); i < 32; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	return netip.AddrFrom4(b)
}

// count returns how many addresses of ranges are in use.
func (p *Pool) count(ranges []netip.Prefix) (n int) {
	for a := range p.used {
		if contains(ranges, a) {
			n++
		}
	}
	return n
}

// Release frees an attachment's addresses. One that has none is no error.
func (p *Pool) Release(id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.records[id]
	if r == nil {
		return nil
	}
	released := p.released
	for _, a := range r.Addresses {
		if l := &released[family(a)]; contains(p.ranges, a) {
			*l = append((*l)[max(0, len(*l)+1-mostRemembered):], a)
		}
	}
	b, err := json.Marshal(released)
	if err == nil {
		err = p.write(releasedFile, b) // first, or a crash would have these addresses count as never in use
	}
	if err == nil {
		err = os.Remove(p.path(cni.RecordFile(id)))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("release addresses: %w", err)
	}
	p.releases++
	for _, a := range r.Addresses {
		if delete(p.used, a); !r.Foreign {
			p.dirty[a] = p.releases
		}
	}
	p.released = released
	delete(p.records, id)
	return nil
}
