package manifest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// A tree knows which folders are watched, by what paths, and how one gets to paths that are reached over links.
type tree struct {
	n             *notifier               // nil: nothing is watched
	paths         map[int32][]string      // of each watch: a folder can have several
	watches       map[string]int32        // of each path
	uses          map[string]int          // of each path: how many need it
	resolvedPaths map[string]resolvedPath // of each path followed
	leads         map[string][]string     // of each step's name: the paths that it leads to
}

// A way is how the kernel gets to a path.
type resolvedPath struct {
	steps   []step   // links on the way, and its end or the first name that is missing
	through []string // folders
}

// A step is a name in a folder, and what events there say that the way has changed.
type step struct {
	name   string
	events uint32
}

func newTree(n *notifier) *tree {
	return &tree{
		n: n, paths: map[int32][]string{}, watches: map[string]int32{}, uses: map[string]int{},
		resolvedPaths: map[string]resolvedPath{}, leads: map[string][]string{},
	}
}

// watch watches a folder until a call of leave for each of watch. Called again it also finds a new folder of the same
// path.
func (t *tree) watch(dir string, events uint32) error {
	t.uses[dir]++
	return t.renew(dir, events)
}

func (t *tree) renew(dir string, events uint32) error {
	if t.n == nil {
		return nil
	}
	w, err := t.n.add(dir, events)
	if err != nil {
		return err
	}
	t.name(w, dir)
	return nil
}

func (t *tree) leave(dir string) {
	if t.uses[dir]--; t.uses[dir] > 0 {
		return
	}
	delete(t.uses, dir)
	if w, ok := t.watches[dir]; ok {
		delete(t.watches, dir)
		t.part(dir, w)
	}
}

// part takes a path from a watch, and ends the watch with the last one.
func (t *tree) part(dir string, w int32) {
	t.paths[w] = slices.DeleteFunc(t.paths[w], func(p string) bool { return p == dir })
	if len(t.paths[w]) == 0 {
		delete(t.paths, w)
		t.n.remove(w)
	}
}

// ended forgets a watch that the kernel has ended.
func (t *tree) ended(w int32) {
	for _, dir := range t.paths[w] {
		if t.watches[dir] == w {
			delete(t.watches, dir)
		}
	}
	delete(t.paths, w)
}

// rename returns a watched folder another path.
func (t *tree) rename(from, to string) {
	t.uses[to]++
	if w, ok := t.watches[from]; ok {
		t.name(w, to)
	}
	t.leave(from)
}

// name makes w the watch of a path.
func (t *tree) name(w int32, dir string) {
	if old, ok := t.watches[dir]; ok && old != w {
		t.part(dir, old)
	}
	t.watches[dir] = w
	if !slices.Contains(t.paths[w], dir) {
		t.paths[w] = append(t.paths[w], dir)
	}
}

// follow watches the way to path.
func (t *tree) follow(path string) {
	if t.n == nil {
		return
	}
	for range 3 { // it may change before it is watched
		w := find(path)
		for _, s := range w.steps {
			_ = t.watch(filepath.Dir(s.name), s.events) // a folder that has just gone changes the way
		}
		for _, dir := range w.through {
			_ = t.watch(dir, selfEvents)
		}
		t.unfollow(path)
		t.resolvedPaths[path] = w
		for _, s := range w.steps {
			t.leads[s.name] = append(t.leads[s.name], path)
		}
		if now := find(path); slices.Equal(now.steps, w.steps) && slices.Equal(now.through, w.through) {
			return
		}
	}
}

func (t *tree) unfollow(path string) {
	w, ok := t.resolvedPaths[path]
	if !ok {
		return
	}
	delete(t.resolvedPaths, path)
	for _, s := range w.steps {
		t.leave(filepath.Dir(s.name))
		t.leads[s.name] = slices.DeleteFunc(t.leads[s.name], func(p string) bool { return p == path })
		if len(t.leads[s.name]) == 0 {
			delete(t.leads, s.name)
		}
	}
	for _, dir := range w.through {
		t.leave(dir)
	}
}

// passing returns the paths whose way goes through the folder dir.
func (t *tree) passing(dir string) (out []string) {
	for path, w := range t.resolvedPaths {
		if slices.Contains(w.through, dir) {
			out = append(out, path)
		}
	}
	return out
}

// find goes to path.
func find(path string) (w resolvedPath) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return w
	}
	dir, rest := "/", strings.Split(abs, "/")
	for n := 0; len(rest) > 0 && n < 1000; n++ {
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			dir = filepath.Dir(dir)
			continue
		}
		at := filepath.Join(dir, name)
		fi, err := os.Lstat(at)
		link := err == nil && fi.Mode()&os.ModeSymlink != 0
		if err != nil || link || len(rest) == 0 {
			w.steps = append(w.steps, step{at, nameEvents | selfEvents})
		}
		switch {
		case err != nil:
			return w
		case link:
			target, err := os.Readlink(at)
			if err != nil {
				return w
			}
			if filepath.IsAbs(target) {
				dir = "/"
			}
			rest = append(strings.Split(target, "/"), rest...)
		case fi.IsDir():
			dir = at
			w.through = append(w.through, at)
		case len(rest) == 0:
			w.steps[len(w.steps)-1].events |= writeEvents
		default:
			return w // a file where a folder should be
		}
	}
	return w
}

const allEvents = nameEvents | writeEvents | selfEvents

// gone reports that what was watched is no longer where it was.
func gone(mask uint32) bool { return mask&(selfEvents|unix.IN_UNMOUNT) != 0 }
