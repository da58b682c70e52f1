package manifest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// A tree knows which folders are watched, by what paths, and which names lead to a path over symbolic links.
type tree struct {
	n       *notifier          // nil: nothing is watched
	paths   map[int32][]string // of each watch: a folder can have several
	watches map[string]int32   // of each path
	uses    map[string]int     // of each path: how many need it
	steps   map[string][]step  // of each path followed: how one gets there
	leads   map[string][]string
	through []string // the folders on the way to the root
}

// A step is a name on the way to a path, in a folder without links, and what events there say that the way has changed.
type step struct {
	name   string
	events uint32
}

func newTree(n *notifier) *tree {
	return &tree{
		n: n, paths: map[int32][]string{}, watches: map[string]int32{}, uses: map[string]int{},
		steps: map[string][]step{}, leads: map[string][]string{},
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
	if old, ok := t.watches[dir]; ok && old != w {
		t.part(dir, old)
	}
	t.watches[dir] = w
	if !slices.Contains(t.paths[w], dir) {
		t.paths[w] = append(t.paths[w], dir)
	}
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

// follow watches the way to path: the names of links on it, and of the file at its end.
func (t *tree) follow(path string) {
	if t.n == nil {
		return
	}
	old := t.steps[path]
	delete(t.steps, path)
	t.forget(path, old)
	for range 3 { // the way may change before it is watched
		steps, _ := way(path)
		for _, s := range steps {
			_ = t.watch(filepath.Dir(s.name), s.events) // a folder that has just gone changes the way
		}
		t.release(old)
		if old = steps; slices.Equal(steps, first(way(path))) {
			break
		}
	}
	t.steps[path] = old
	for _, s := range old {
		t.leads[s.name] = append(t.leads[s.name], path)
	}
}

func first[A, B any](a A, _ B) A { return a }

// followRoot follows the root and watches all folders on the way: if one goes, so does the root.
func (t *tree) followRoot(path string) {
	t.follow(path)
	old := t.through
	_, t.through = way(path)
	for _, dir := range t.through {
		_ = t.watch(dir, selfEvents)
	}
	for _, dir := range old {
		t.leave(dir)
	}
}

func (t *tree) unfollow(path string) {
	if old, ok := t.steps[path]; ok {
		delete(t.steps, path)
		t.forget(path, old)
		t.release(old)
	}
}

// forget takes path from what steps lead to.
func (t *tree) forget(path string, steps []step) {
	for _, s := range steps {
		t.leads[s.name] = slices.DeleteFunc(t.leads[s.name], func(p string) bool { return p == path })
		if len(t.leads[s.name]) == 0 {
			delete(t.leads, s.name)
		}
	}
}

// release stops watching the folders of steps.
func (t *tree) release(steps []step) {
	for _, s := range steps {
		t.leave(filepath.Dir(s.name))
	}
}

// way goes to path as the kernel does: steps are the links on the way and the end, or the first name that is missing;
// through are the folders.
func way(path string) (steps []step, through []string) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, nil
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
			steps = append(steps, step{at, nameEvents | selfEvents})
		}
		switch {
		case err != nil:
			return steps, through
		case link:
			target, err := os.Readlink(at)
			if err != nil {
				return steps, through
			}
			if filepath.IsAbs(target) {
				dir = "/"
			}
			rest = append(strings.Split(target, "/"), rest...)
		case fi.IsDir():
			dir = at
			through = append(through, at)
		case len(rest) == 0:
			steps[len(steps)-1].events |= writeEvents
		default:
			return steps, through // a file where a folder should be
		}
	}
	return steps, through
}

const allEvents = nameEvents | writeEvents | selfEvents

// gone says that what was watched is no longer where it was.
func gone(mask uint32) bool { return mask&(selfEvents|unix.IN_UNMOUNT) != 0 }
