package kubernetes

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/child"
	"fairlead.dev/fairlead/sandbox"
)

// Machine is what a process needs to be one: see Boot.
type Machine struct {
	Name     string    // its host name and its Node's
	Dir      string    // absolute path of a folder of its own, in which all that it writes stays
	Cgroup   string    // name of its cgroup in each hierarchy
	Images   []string  // archives that its containerd takes in at the start
	Folders  []string  // made before anything starts
	Files    []File    // written before anything starts
	Programs []Program // started one after the other, each once the one before is ready
	Path     string    // the PATH of them all
}

// Program is a program of a machine.
type Program struct {
	Name   string // of its log, without .log
	Args   []string
	Socket string // it is ready once it listens at this path; otherwise at once
	Ends   bool   // it ends by itself, and is ready then
}

// File is a file of a machine.
type File struct {
	Path string // absolute, inside the machine
	Text string
	Mode fs.FileMode
}

// running is a machine that is up.
type running struct {
	Machine
	process *child.Process
}

// start starts a machine on a sandbox's node. Its output goes to machine.log in its folder.
func start(h *sandbox.Host, m Machine) (*running, error) {
	if err := os.MkdirAll(m.Dir, 0o755); err != nil {
		return nil, err
	}
	text, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile(filepath.Join(m.Dir, "machine.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command("/proc/self/exe", "cluster", "machine", string(text))
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	p, err := child.Start(cmd, h.Do)
	if err != nil {
		return nil, fmt.Errorf("start machine %s: %w", m.Name, err)
	}
	return &running{m, p}, nil
}

// logs returns the last lines of each log of a machine.
func (r *running) logs() string {
	files, _ := filepath.Glob(filepath.Join(r.Dir, "*.log"))
	var b strings.Builder
	for _, f := range files {
		text, _ := os.ReadFile(f)
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		lines = lines[max(0, len(lines)-5):]
		fmt.Fprintf(&b, "machine %s, %s:\n  %s\n", r.Name, filepath.Base(f), strings.Join(lines, "\n  "))
	}
	return b.String()
}

// stop ends a machine with all its processes and removes its cgroups and its folder.
func (r *running) stop() error {
	r.process.End(10 * time.Second)
	return errors.Join(removeCgroups(r.Cgroup), remove(r.Dir))
}

// cgroup returns the name of the cgroups of a cluster's Node; of all its Nodes where that is "*".
func cgroup(cluster, node string) string { return "fairlead-" + cluster + "-" + node }

// Remove removes what a cluster has left after its process was killed: cgroups and files. Its processes died with it.
func Remove(name, dir string) error {
	list, err := hierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range list {
		found, _ := filepath.Glob(filepath.Join(h.at, cgroup(name, "*")))
		for _, f := range found {
			errs = append(errs, removeCgroups(filepath.Base(f)))
		}
	}
	return errors.Join(errors.Join(errs...), remove(dir))
}

// remove removes a folder in which nothing is mounted any more: mounts went with the machine's namespace, which the
// kernel takes apart a moment after its last process.
func remove(dir string) (err error) {
	for range 50 {
		if err = os.RemoveAll(dir); err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}

// hierarchy is a mounted tree of cgroups.
type hierarchy struct {
	at      string // where the host has it
	options string // version 1: what to mount it by; "": version 2
}

// hierarchies lists the cgroup file systems of this mount namespace, of both versions.
func hierarchies() (list []hierarchy, err error) {
	text, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		switch w := strings.Fields(line); {
		case len(w) < 4:
		case w[2] == "cgroup2":
			list = append(list, hierarchy{at: w[1]})
		case w[2] == "cgroup":
			list = append(list, hierarchy{w[1], selects(w[3])})
		}
	}
	if len(list) == 0 {
		return nil, errors.New("no cgroup file system is mounted: kubelet needs one")
	}
	return list, nil
}

// selects returns those of a version 1 mount's options that choose the hierarchy: its controllers, or its name.
func selects(options string) string {
	var of []string
	named := false
	for _, o := range strings.Split(options, ",") {
		switch name, isNamed := strings.CutPrefix(o, "name="); {
		case isNamed:
			of, named = append(of, "name="+name), true
		case slices.Contains([]string{"rw", "ro", "relatime", "noatime", "nosuid", "nodev", "noexec", "xattr"}, o):
		default:
			of = append(of, o)
		}
	}
	if named {
		of = append([]string{"none"}, of...)
	}
	return strings.Join(of, ",")
}

// joinCgroups puts this process into a cgroup of that name in each hierarchy, below the hierarchy's root: a machine's
// cgroups have no other limits above them.
func joinCgroups(name string) error {
	list, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range list {
		at := filepath.Join(h.at, name)
		if err := os.Mkdir(at, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		for _, f := range []string{"cpuset.cpus", "cpuset.mems"} { // version 1 admits no process before it has both
			if text, err := os.ReadFile(filepath.Join(h.at, f)); err == nil {
				if err := os.WriteFile(filepath.Join(at, f), text, 0); err != nil {
					return err
				}
			}
		}
		if err := os.WriteFile(filepath.Join(at, "cgroup.procs"), []byte("0"), 0); err != nil {
			return fmt.Errorf("join cgroup %s: %w", at, err)
		}
	}
	return nil
}

// removeCgroups removes the cgroups of that name with all below.
func removeCgroups(name string) error {
	list, err := hierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range list {
		var dirs []string
		top := filepath.Join(h.at, name)
		filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for _, d := range slices.Backward(dirs) {
			errs = append(errs, removeCgroup(d))
		}
	}
	return errors.Join(errs...)
}

// removeCgroup removes one, which is busy until its last process is reaped.
func removeCgroup(path string) (err error) {
	for range 100 {
		if err = unix.Rmdir(path); err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("remove cgroup %s: %w", path, err)
}
