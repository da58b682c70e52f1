package manifest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/source"
)

const (
	grace    = 10 * time.Millisecond // how long a file may be gone or empty before it is believed
	patience = time.Second           // how long a file may be open for writing before it is asked for and said
	maxSize  = 1 << 30               // of a file, in bytes
)

// A follower keeps a store as the files below root are.
type follower struct {
	root  string
	store *store
	tree  *tree
	dirs  map[string]bool    // folders that were listed
	due   map[string]wait    // paths to look at
	open  map[string]writing // files written to and not closed since
	last  move               // the first half of the last move
	moves []move             // that happened in this round
	reads []read             // files to read in this round
}

// A wait tells when to look at a path.
type wait struct {
	until time.Time // zero: at once
	sure  bool      // believe it if it is gone or empty
}

type writing struct {
	since    time.Time // or when the kernel was asked last
	reported bool
}

type move struct {
	cookie   uint32
	from, to string
}

// A read is a file's new content.
type read struct {
	path  string
	sure  bool
	empty bool
	err   error
	content
	diff diff
}

func newFollower(root string, n *notifier) *follower {
	f := &follower{
		root: filepath.Clean(root), store: newStore(), tree: newTree(n),
		dirs: map[string]bool{}, due: map[string]wait{}, open: map[string]writing{},
	}
	f.touch(f.root)
	return f
}

// wanted reports whether a file of this name is read.
func wanted(name string) bool {
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return !hidden(name) && name[0] != '#'
	}
	return false
}

func hidden(name string) bool { return name[0] == '.' }

// wants reports whether the file at path is read.
func (f *follower) wants(path string) bool { return path == f.root || wanted(filepath.Base(path)) }

func (f *follower) touch(path string) { f.due[path] = wait{} }

// run delivers what changes until ctx ends.
func (f *follower) run(ctx context.Context, deliver func(source.Batch)) error {
	began, first := time.Now(), true
	for {
		if err := f.round(); err != nil {
			return err
		}
		if first {
			if err := f.rootError(); err != nil {
				return err
			}
		}
		settled := len(f.due) == 0 && (len(f.open) == 0 || time.Since(began) > patience)
		if !first || settled {
			if b, changed := f.store.batch(); changed || first {
				deliver(b)
				first = false
			}
		}
		events, err := f.tree.n.read(ctx, f.next())
		if err != nil || ctx.Err() != nil {
			return err
		}
		f.consume(events)
	}
}

// next returns the time when something is due, zero if nothing is.
func (f *follower) next() (t time.Time) {
	earlier := func(u time.Time) {
		if t.IsZero() || u.Before(t) {
			t = u
		}
	}
	for _, w := range f.due {
		earlier(w.until.Add(1)) // a time that has passed is not zero
	}
	for _, w := range f.open {
		earlier(w.since.Add(patience))
	}
	return t
}

// consume records what events say.
func (f *follower) consume(events []event) {
	for _, e := range events {
		switch {
		case e.mask&unix.IN_Q_OVERFLOW != 0:
			clear(f.open)
			f.touch(f.root)
		case e.mask&unix.IN_IGNORED != 0:
			f.tree.ended(e.watch)
		default:
			for _, dir := range f.tree.paths[e.watch] {
				if e.name == "" {
					f.itself(dir, e.mask)
				} else {
					f.within(filepath.Join(dir, e.name), e)
				}
			}
		}
	}
}

// itself records what happened to a watched folder.
func (f *follower) itself(dir string, mask uint32) {
	if f.dirs[dir] && mask&unix.IN_ATTRIB != 0 {
		f.touch(dir)
	}
	if gone(mask) {
		f.changed(dir)
	}
}

// changed has all paths looked at that are reached through a folder, which has gone or moved.
func (f *follower) changed(dir string) {
	for _, path := range f.tree.passing(dir) {
		delete(f.open, path)
		f.touch(path)
	}
}

// within records what happened to a name in a watched folder.
func (f *follower) within(path string, e event) {
	for _, p := range f.tree.leads[path] {
		f.happened(p, e.mask)
	}
	if !f.dirs[filepath.Dir(path)] || hidden(filepath.Base(path)) {
		return
	}
	f.happened(path, e.mask)
	switch {
	case e.mask&unix.IN_MOVED_FROM != 0:
		f.last = move{cookie: e.cookie, from: path}
	case e.mask&unix.IN_MOVED_TO != 0 && e.cookie == f.last.cookie && (e.mask&unix.IN_ISDIR != 0 || f.wants(path)):
		f.last.to = path
		f.rename(f.last)
	}
}

// rename returns what is known of a path to the new one. What comes after in the queue of events is about that.
func (f *follower) rename(m move) {
	f.moves = append(f.moves, m)
	left := f.store.rename(m.from, m.to)
	for dir := range maps.Clone(f.dirs) {
		if !under(dir, m.from) {
			continue
		}
		to := m.to + strings.TrimPrefix(dir, m.from)
		if f.dirs[to] {
			f.tree.leave(to)
		}
		f.tree.rename(dir, to)
		delete(f.dirs, dir)
		f.dirs[to] = true
		f.changed(dir)
	}
	rekey(f.open, m)
	rekey(f.due, m)
	for _, path := range append(left, m.from) {
		f.due[path] = wait{sure: true}
	}
	f.touch(m.to)
	f.unfollow(m.from)
	f.absolve(m.from)
}

// rekey moves what is known of paths.
func rekey[T any](known map[string]T, m move) {
	for path, v := range maps.Clone(known) {
		if under(path, m.from) {
			delete(known, path)
			known[m.to+strings.TrimPrefix(path, m.from)] = v
		}
	}
}

// under reports whether path is dir or below it.
func under(path, dir string) bool {
	if dir == "." || dir == "/" {
		return true
	}
	return strings.HasPrefix(path, dir) && (len(path) == len(dir) || path[len(dir)] == filepath.Separator)
}

// unfollow forgets the ways to links below a folder.
func (f *follower) unfollow(dir string) {
	for link := range maps.Clone(f.tree.resolvedPaths) {
		if link != f.root && under(link, dir) {
			f.tree.unfollow(link)
		}
	}
}

func (f *follower) happened(path string, mask uint32) {
	switch {
	case mask&unix.IN_MODIFY != 0:
		if _, ok := f.open[path]; !ok && f.wants(path) {
			f.open[path] = writing{since: time.Now()}
		}
	case mask&unix.IN_CLOSE_WRITE != 0:
		delete(f.open, path)
		if f.wants(path) {
			f.touch(path)
		}
	case mask&unix.IN_ATTRIB != 0:
		if mask&unix.IN_ISDIR != 0 || f.wants(path) {
			f.touch(path)
		}
	default:
		delete(f.open, path)
		if mask&unix.IN_ISDIR != 0 {
			f.closed(path)
		}
		f.touch(path)
	}
}

// round inspects what is due.
func (f *follower) round() error {
	now := time.Now()
	f.moves, f.reads = nil, nil
	for _, path := range slices.Sorted(maps.Keys(f.due)) {
		if w := f.due[path]; !w.until.After(now) {
			delete(f.due, path)
			if _, open := f.open[path]; !open {
				f.loadPath(path, w.sure)
			}
		}
	}
	f.warn(now)
	f.sortReads()
	parallel(len(f.reads), func(i int) { f.reads[i].do(f.store) })
	if err := f.drain(); err != nil {
		return err
	}
	for i := range f.reads {
		f.apply(&f.reads[i])
	}
	f.reads = nil
	return nil
}

// sortReads puts the files to read in order, each once.
func (f *follower) sortReads() {
	slices.SortStableFunc(f.reads, func(a, b read) int { return strings.Compare(a.path, b.path) })
	f.reads = slices.CompactFunc(f.reads, func(a, b read) bool { return a.path == b.path })
}

// warn names the files that are open for long, and reads those that the kernel says are not: where folders and links
// move while their events are read, the one that a file was closed can be missed.
func (f *follower) warn(now time.Time) {
	for path, w := range f.open {
		switch {
		case now.Sub(w.since) < patience:
		case !beingWritten(path):
			delete(f.open, path)
			f.loadPath(path, false)
		default:
			if f.open[path] = (writing{now, true}); !w.reported {
				f.fault(path, StillOpen, "a program has it open for writing: what it writes counts once it is closed")
			}
		}
	}
}

// beingWritten reports whether a program has the file open for writing, which prevents a lease for reading
// (fcntl(2), F_SETLEASE). It reports true where no lease is allowed: of another user's
// file, or of a network's.
func beingWritten(path string) bool {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	defer file.Close() // and with it the lease
	_, err = unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	return err != nil
}

// drain takes the events that came while files were read: what was written meanwhile must be read again.
func (f *follower) drain() error {
	for range 100 {
		if f.tree.n == nil {
			return nil
		}
		events, err := f.tree.n.pending()
		if err != nil || events == nil {
			return err
		}
		f.consume(events)
	}
	return nil
}

func (f *follower) fault(path, reason, message string, args ...any) {
	retained := slices.ContainsFunc(f.store.below(path), f.store.holds)
	p := source.Problem{File: path, Reason: reason, Message: fmt.Sprintf(message, args...), Retained: retained}
	f.store.faults[path] = append(f.store.faults[path], p)
}

// loadPath finds out what there is at path now. It leaves files to be read in f.reads.
func (f *follower) loadPath(path string, sure bool) {
	delete(f.store.faults, path)
	if path != f.root && !f.dirs[filepath.Dir(path)] {
		f.gone(path, sure) // if the folder is there again, an event will come and it will be listed
		return
	}
	fi, err := os.Lstat(path)
	switch {
	case path == f.root:
		f.tree.follow(path)
		fi, err = os.Stat(path)
	case err == nil && fi.Mode()&fs.ModeSymlink != 0:
		f.tree.follow(path)
		if fi, err = os.Stat(path); err == nil && fi.IsDir() && f.loops(path, fi) {
			f.fault(path, CannotRead, "this link leads to a folder that holds it: it is not followed")
			return
		}
		if err != nil {
			f.unread(path, err)
			return
		}
	default:
		f.tree.unfollow(path)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR):
		f.gone(path, sure)
	case err != nil:
		f.unread(path, err)
	case fi.IsDir():
		f.store.remove(path)
		f.list(path)
	default:
		f.leave(path)
		if fi.Mode().IsRegular() && f.wants(path) {
			f.toRead(path, sure)
		} else {
			f.store.remove(path)
		}
	}
}

// toRead has a file read in this round, unless a program is writing to it.
func (f *follower) toRead(path string, sure bool) {
	if _, open := f.open[path]; !open {
		f.reads = append(f.reads, read{path: path, sure: sure})
	}
}

// unread reports why path can't be read. What was there stays.
func (f *follower) unread(path string, err error) {
	f.fault(path, CannotRead, "can't be read: %v", reason(err))
}

// loops reports whether the folder fi, which the link at path leads to, holds the link.
func (f *follower) loops(path string, fi fs.FileInfo) bool {
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		if up, err := os.Stat(dir); err == nil && os.SameFile(up, fi) {
			return true
		}
		if dir == f.root || dir == filepath.Dir(dir) {
			return false
		}
	}
}

// list goes through a folder.
func (f *follower) list(dir string) {
	watch, known, before := f.tree.watch, f.dirs[dir], f.tree.watches[dir]
	if known {
		watch = f.tree.renew
	}
	f.dirs[dir] = true
	err := watch(dir, allEvents)
	if f.tree.watches[dir] != before {
		f.closed(dir)
	}
	if err != nil {
		f.fault(dir, NotWatched, "changes in this folder will not be seen: %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		f.unread(dir, err)
		return
	}
	f.missing(dir, entries)
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case hidden(e.Name()):
		case e.Type().IsRegular() && known:
			f.loadPath(path, false)
		case e.Type().IsRegular() && f.wants(path):
			f.toRead(path, false) // what look would do at last
		case e.IsDir(), e.Type()&fs.ModeSymlink != 0:
			f.loadPath(path, false)
		}
	}
}

// missing searches for what was known in a folder and is not there.
func (f *follower) missing(dir string, entries []fs.DirEntry) {
	there := map[string]bool{}
	for _, e := range entries {
		there[filepath.Join(dir, e.Name())] = true
	}
	var lost []string
	remember := func(path string) {
		if path != dir && filepath.Dir(path) == dir && !there[path] {
			lost = append(lost, path)
		}
	}
	for path := range f.store.files {
		remember(path)
	}
	for path := range f.store.faults {
		remember(path)
	}
	for path := range f.dirs {
		remember(path)
	}
	for _, path := range lost {
		f.gone(path, false)
	}
}

// gone forgets what was at path, after the grace unless sure. If the root is gone, all stays.
func (f *follower) gone(path string, sure bool) {
	if _, err := os.Stat(f.root); err != nil {
		if path != f.root {
			f.touch(f.root)
			return
		}
		f.store.faults[path] = []source.Problem{{
			File: path, Reason: Missing, Message: "is gone: everything stays as it was until it is back",
			Retained: len(f.store.files) > 0,
		}}
		return
	}
	files := []string{path}
	if f.dirs[path] {
		files = f.store.below(path)
	}
	f.leave(path)
	for _, file := range files {
		if sure || !f.store.holds(file) {
			f.store.remove(file)
		} else if _, ok := f.due[file]; !ok {
			f.due[file] = wait{time.Now().Add(grace), true}
		}
	}
}

// leave stops watching a folder and all below it, if path is one.
func (f *follower) leave(path string) {
	if !f.dirs[path] {
		return
	}
	f.closed(path)
	f.unfollow(path)
	f.absolve(path)
	for dir := range maps.Clone(f.dirs) {
		if under(dir, path) {
			delete(f.dirs, dir)
			f.tree.leave(dir)
		}
	}
}

// absolve forgets what was wrong with paths in a folder.
func (f *follower) absolve(dir string) {
	maps.DeleteFunc(f.store.faults, func(path string, _ []source.Problem) bool { return under(path, dir) })
}

// closed forgets which files below a folder are open: events will no longer tell.
func (f *follower) closed(dir string) {
	maps.DeleteFunc(f.open, func(path string, _ writing) bool { return path != dir && under(path, dir) })
}

// apply takes over what was read, unless it was written meanwhile.
func (f *follower) apply(r *read) {
	_, again := f.due[r.path]
	_, open := f.open[r.path]
	moved := slices.ContainsFunc(f.moves, func(m move) bool { return under(r.path, m.from) || under(r.path, m.to) })
	switch {
	case moved:
		f.touch(r.path)
	case again || open:
	case errors.Is(r.err, fs.ErrNotExist):
		f.touch(r.path)
	case r.err != nil:
		f.unread(r.path, r.err)
	case r.empty && !r.sure && f.store.holds(r.path):
		f.due[r.path] = wait{time.Now().Add(grace), true}
	default:
		f.store.update(r.path, r.content, r.diff)
	}
}

// do reads the file and compares it with what s holds of it. It changes nothing else.
func (r *read) do(s *store) {
	buf := texts.Get().(*[]byte)
	defer texts.Put(buf)
	if *buf, r.err = readFile(r.path, *buf); r.err != nil {
		return
	}
	r.empty = len(*buf) == 0
	r.content, r.diff = s.content(r.path).read(*buf, s.words)
}

var texts = sync.Pool{New: func() any { return new([]byte) }}

// readFile reads a regular file into buf, or a larger one.
func readFile(path string, buf []byte) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return buf, err
	}
	defer file.Close()
	fi, err := file.Stat()
	switch {
	case err != nil:
		return buf, err
	case !fi.Mode().IsRegular():
		return buf, errors.New("it is no longer a regular file")
	case fi.Size() > maxSize:
		return buf, fmt.Errorf("it is larger than %d MiB: split it", maxSize>>20)
	}
	for buf = slices.Grow(buf[:0], int(fi.Size())+1); ; buf = slices.Grow(buf, 1) {
		n, err := file.Read(buf[len(buf):cap(buf)])
		switch buf = buf[:len(buf)+n]; {
		case errors.Is(err, io.EOF):
			return buf, nil
		case err != nil:
			return buf, err
		}
	}
}
