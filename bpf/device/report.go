package device

import (
	"fmt"
	"maps"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/kernel/bpf"
)

// The programs that report what the programs at devices find. They are attached nowhere.
const (
	fastPathName = "fast_path"
	hookProgram  = "hook"
)

// reportContext is the beginning of struct __sk_buff that they are run with.
type reportContext struct {
	_       [10]uint32
	Ifindex uint32
	_       uint32
	CB      [5]uint32
}

// reporters are these programs, loaded for the map fl_hooks of that ID.
var reporters struct {
	sync.Mutex
	hooks    ebpf.MapID
	programs map[string]*ebpf.Program
}

// reporterOf returns one of the programs that report, at work on the maps in a folder. The caller closes it. Where
// there are no such maps, the error is bpf.Absent.
func reporterOf(folder, name string) (*ebpf.Program, error) {
	m, err := openHooks(folder)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	i, err := m.Info()
	if err != nil {
		return nil, fmt.Errorf("bpf: read map %s: %w", deviceMapFlHooks, err)
	}
	id, _ := i.ID()
	reporters.Lock()
	defer reporters.Unlock()
	if reporters.programs != nil && reporters.hooks == id {
		return reporters.programs[name].Clone()
	}
	programs, err := loadReporters(m)
	if err != nil {
		return nil, err
	}
	closeAll(reporters.programs)
	reporters.hooks, reporters.programs = id, programs
	return programs[name].Clone()
}

// loadReporters loads the programs that report for a map fl_hooks. The caller closes them.
func loadReporters(m *ebpf.Map) (map[string]*ebpf.Program, error) {
	c, err := forDevices()
	if err != nil {
		return nil, err
	}
	c = c.Copy()
	maps.DeleteFunc(c.Programs, func(n string, _ *ebpf.ProgramSpec) bool { return n != fastPathName && n != hookProgram })
	maps.DeleteFunc(c.Maps, func(n string, _ *ebpf.MapSpec) bool { return n != deviceMapFlHooks && bpf.Shared(n) })
	loaded, err := bpf.MapSet{deviceMapFlHooks: m}.Load(c)
	if err != nil {
		return nil, fmt.Errorf("bpf: load the programs that report the fast path: %w", bpf.Explain(err))
	}
	defer loaded.Close()
	programs := map[string]*ebpf.Program{}
	for _, name := range []string{fastPathName, hookProgram} {
		programs[name] = loaded.DetachProgram(name)
	}
	return programs, nil
}

func closeAll(programs map[string]*ebpf.Program) {
	for _, p := range programs {
		p.Close()
	}
}

// openHooks opens the map of the functions of netfilter's hooks in a folder.
func openHooks(folder string) (*ebpf.Map, error) {
	c, err := forDevices()
	if err != nil {
		return nil, err
	}
	return bpf.OpenMap(filepath.Join(folder, pinNames[deviceMapFlHooks]), c.Maps[deviceMapFlHooks])
}
