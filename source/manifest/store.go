package manifest

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// A file is one file that was read.
type file struct {
	path string
	content
}

// A claim is a file's word that an object is so.
type claim struct {
	file *file
	obj  source.Object
}

// A store holds all that was read, and settles what counts where two documents say the same object.
type store struct {
	files  map[string]*file
	counts map[source.Key]claim
	others map[source.Key][]claim      // claims that don't count, in order
	faults map[string][]source.Problem // of paths, not of their content
	words  *strip.Words
	broken map[*file]bool // files with documents that have problems

	// Since the last batch:
	before   map[source.Key]source.Object // of keys that were touched, what counted
	touched  []source.Key                 // in order
	moved    map[*file]bool               // files whose place among others may have changed
	problems []source.Problem             // of the last batch
}

func newStore() *store {
	return &store{
		files: map[string]*file{}, counts: map[source.Key]claim{}, others: map[source.Key][]claim{},
		faults: map[string][]source.Problem{}, words: strip.New(), broken: map[*file]bool{},
		before: map[source.Key]source.Object{}, moved: map[*file]bool{},
	}
}

// content returns what the file at path says, nothing where it was not read yet.
func (s *store) content(path string) content {
	if f := s.files[path]; f != nil {
		return f.content
	}
	return content{}
}

// holds reports whether the file at path has any object.
func (s *store) holds(path string) bool {
	c := s.content(path)
	return len(c.spare) > 0 || slices.ContainsFunc(c.docs, func(d doc) bool {
		return slices.ContainsFunc(d.items, func(it item) bool { return it.obj != nil })
	})
}

// update makes c what the file at path says.
func (s *store) update(path string, c content, d diff) {
	f := s.files[path]
	if f == nil {
		f = &file{path: path}
		s.files[path] = f
	}
	f.content, s.moved[f] = c, true
	delete(s.broken, f)
	if slices.ContainsFunc(c.docs, func(d doc) bool {
		return slices.ContainsFunc(d.items, func(it item) bool { return it.bad != nil })
	}) {
		s.broken[f] = true
	}
	for _, o := range d.remove {
		s.drop(f, o)
	}
	for _, o := range d.add {
		s.claim(f, o)
	}
}

// remove forgets the file at path.
func (s *store) remove(path string) {
	if f := s.files[path]; f != nil {
		for _, o := range f.all() {
			s.drop(f, o)
		}
		delete(s.files, path)
		delete(s.broken, f)
	}
	delete(s.faults, path)
}

// rename returns a file, or all files below a folder, another path. It returns the paths that it left since the new one
// is a file's already.
func (s *store) rename(from, to string) (left []string) {
	for _, path := range s.below(from) {
		f, path := s.files[path], to+strings.TrimPrefix(path, from)
		if s.files[path] != nil {
			left = append(left, f.path)
			continue
		}
		delete(s.files, f.path)
		delete(s.faults, f.path)
		f.path, s.files[path], s.moved[f] = path, f, true
	}
	return left
}

// below returns the paths of the file path and of all files below the folder path, in order.
func (s *store) below(path string) (out []string) {
	if s.files[path] != nil {
		return []string{path}
	}
	for p := range s.files {
		if strings.HasPrefix(p, path+string(filepath.Separator)) {
			out = append(out, p)
		}
	}
	slices.Sort(out)
	return out
}

func (s *store) touch(key source.Key) {
	if _, ok := s.before[key]; !ok {
		s.before[key] = s.counts[key].obj
		s.touched = append(s.touched, key)
	}
}

func (s *store) claim(f *file, o source.Object) {
	key := source.KeyOf(o)
	s.touch(key)
	if _, ok := s.counts[key]; ok {
		s.others[key] = append(s.others[key], claim{f, o})
	} else {
		s.counts[key] = claim{f, o}
	}
}

func (s *store) drop(f *file, o source.Object) {
	key := source.KeyOf(o)
	s.touch(key)
	rest := s.others[key]
	switch {
	case s.counts[key] != claim{f, o}:
		i := slices.Index(rest, claim{f, o})
		rest = slices.Delete(rest, i, i+1)
	case len(rest) > 0:
		s.counts[key], rest = rest[0], rest[1:]
	default:
		delete(s.counts, key)
	}
	if len(rest) == 0 {
		delete(s.others, key)
	} else {
		s.others[key] = rest
	}
}

// batch returns what changed since the last one, and whether anything did, problems included.
func (s *store) batch() (source.Batch, bool) {
	at := positions{}
	s.rank(at)
	var b source.Batch
	for _, key := range s.touched {
		before, after := s.before[key], s.counts[key].obj
		if before != after && (before == nil || after == nil || !reflect.DeepEqual(before, after)) {
			b.Changes = append(b.Changes, source.Change{Key: key, Object: after})
		}
	}
	problems := s.collect(at)
	changed := len(b.Changes) > 0 || !slices.Equal(problems, s.problems)
	s.problems, b.Problems = problems, problems
	clear(s.moved)
	s.before, s.touched = map[source.Key]source.Object{}, nil
	return b, changed
}

// rank puts the claims to each key in order, as far as that may have changed: what still stands in a file first.
func (s *store) rank(at positions) {
	for key, rest := range s.others {
		all := append([]claim{s.counts[key]}, rest...)
		_, touched := s.before[key]
		if !touched && !slices.ContainsFunc(all, func(c claim) bool { return s.moved[c.file] }) {
			continue
		}
		s.touch(key)
		slices.SortFunc(all, func(a, b claim) int {
			return cmp.Or(-cmp.Compare(min(at.of(a), 1), min(at.of(b), 1)), strings.Compare(a.file.path, b.file.path),
				cmp.Compare(at.of(a), at.of(b)))
		})
		s.counts[key], s.others[key] = all[0], all[1:]
	}
}

// positions reports where in its file an object stands, by the number of its item from 1.
type positions map[*file]map[source.Object]position

type position struct{ n, line int }

// of returns the number of a claim's item, 0 if the file only keeps the object.
func (p positions) of(c claim) int { return p.file(c.file)[c.obj].n }

// line returns the line of a claim's document, 0 if the file only keeps the object.
func (p positions) line(c claim) int { return p.file(c.file)[c.obj].line }

func (p positions) file(f *file) map[source.Object]position {
	m, ok := p[f]
	if !ok {
		m = map[source.Object]position{}
		n := 0
		for _, d := range f.docs {
			for _, it := range d.items {
				n++
				m[it.obj] = position{n, d.line}
			}
		}
		p[f] = m
	}
	return m
}

// collect returns all problems that stand, by file and line.
func (s *store) collect(at positions) (out []source.Problem) {
	for _, ps := range s.faults {
		out = append(out, ps...)
	}
	for f := range s.broken {
		out = append(out, f.problems()...)
	}
	out = append(out, s.duplicates(at)...)
	slices.SortStableFunc(out, func(a, b source.Problem) int {
		return cmp.Or(strings.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line))
	})
	return out
}

// duplicates names the documents that don't count because others say the same object.
func (s *store) duplicates(at positions) (out []source.Problem) {
	for key, rest := range s.others {
		for _, c := range rest {
			if line := at.line(c); line > 0 {
				out = append(out, source.Problem{
					Object: key, File: c.file.path, Line: line, Reason: Duplicate,
					Message: fmt.Sprintf("stands at %s:%d too, and that one counts: remove one of them", s.counts[key].file.path,
						at.line(s.counts[key])),
				})
			}
		}
	}
	slices.SortFunc(out, func(a, b source.Problem) int { return compareKeys(a.Object, b.Object) })
	return out
}

func compareKeys(a, b source.Key) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

// chartFiles are files of a Helm chart that hold no objects.
var chartFiles = []string{"Chart.yaml", "values.yaml"}

const maxProblems = 10 // of one item

// problems returns the problems of the file's documents.
func (f *file) problems() (out []source.Problem) {
	for _, d := range f.docs {
		for _, it := range d.items {
			if it.bad == nil {
				continue
			}
			for i, p := range it.bad.problems {
				if i == maxProblems {
					p.Field, p.Message = "", fmt.Sprintf("%d more like the first %d", len(it.bad.problems)-maxProblems, maxProblems)
				}
				p.Object, p.File, p.Line = it.bad.key, f.path, d.line
				if p.Reason == UnknownKind && slices.Contains(chartFiles, filepath.Base(f.path)) {
					p.Reason, p.Field, p.Message = Template, "", "belongs to a Helm chart: "+render
				}
				f.outcome(&p, it)
				if out = append(out, p); i == maxProblems {
					break
				}
			}
		}
	}
	return out
}

// outcome states in p what is done instead.
func (f *file) outcome(p *source.Problem, it item) {
	then := "it is left out"
	switch {
	case it.bad.fate == ignored:
		return
	case it.obj != nil:
		p.Retained, then = true, "its last good content stays"
	case it.bad.fate == unreadable && len(f.spare) > 0:
		p.Retained, then = true, names(f.spare)+" as before"
	}
	if strings.HasSuffix(p.Message, "?") {
		p.Message += " Until then " + then
	} else {
		p.Message += "; until then " + then
	}
}

// names returns "Service shop/web, Service shop/api and 3 more stay".
func names(os []source.Object) string {
	var out []string
	for i, o := range os {
		if i == 3 && len(os) > 4 {
			return strings.Join(out, ", ") + fmt.Sprintf(" and %d more stay", len(os)-i)
		}
		out = append(out, source.KeyOf(o).String())
	}
	if len(os) == 1 {
		return out[0] + " stays"
	}
	return strings.Join(out, ", ") + " stay"
}

// listing returns all objects that count, by file and place.
func (s *store) listing() (out []source.Object) {
	for _, path := range slices.Sorted(maps.Keys(s.files)) {
		f := s.files[path]
		for _, o := range f.all() {
			if s.counts[source.KeyOf(o)] == (claim{f, o}) {
				out = append(out, o)
			}
		}
	}
	return out
}
