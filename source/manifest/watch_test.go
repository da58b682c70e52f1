package manifest

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
)

// A watcher runs a source and keeps what it delivered.
type watcher struct {
	t        *testing.T
	dir      string
	batches  chan source.Batch
	objects  map[source.Key]source.Object
	problems []source.Problem
	gone     []string // keys that went away, in order
}

func watch(t *testing.T, path string) *watcher {
	t.Helper()
	w := &watcher{t: t, dir: path, batches: make(chan source.Batch, 10000), objects: map[source.Key]source.Object{}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- New(path).Run(ctx, func(b source.Batch) { w.batches <- b }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	w.consume(<-w.batches)
	return w
}

func (w *watcher) consume(b source.Batch) {
	for _, c := range b.Changes {
		if c.Object == nil {
			delete(w.objects, c.Key)
			w.gone = append(w.gone, c.Key.Name)
			continue
		}
		if source.KeyOf(c.Object) != c.Key {
			w.t.Errorf("%v comes as %v", c.Object, c.Key)
		}
		w.objects[c.Key] = c.Object
	}
	w.problems = b.Problems
}

// ports returns the names of all Services with their first port, such as "api:81 web:80".
func ports(objects map[source.Key]source.Object) string {
	var out []string
	for k, o := range objects {
		out = append(out, fmt.Sprintf("%s:%d", k.Name, o.(*corev1.Service).Spec.Ports[0].Port))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func (w *watcher) said() string { return said(w.dir, nil, w.problems) }

// until takes batches until ok, for 20 s at most.
func (w *watcher) until(want string, ok func() bool) {
	w.t.Helper()
	deadline := time.After(20 * time.Second)
	for !ok() {
		select {
		case b := <-w.batches:
			w.consume(b)
		case <-deadline:
			w.t.Fatalf("still %q, want %q; problems:\n%s", ports(w.objects), want, w.said())
		}
	}
}

// want waits until the Services are as ports says, with no problems.
func (w *watcher) want(services string) {
	w.t.Helper()
	w.until(services, func() bool { return ports(w.objects) == services && len(w.problems) == 0 })
}

// problem waits until the Services are as ports says, and the problems hold text.
func (w *watcher) problem(services, text string) {
	w.t.Helper()
	w.until(services+" and "+text, func() bool { return ports(w.objects) == services && strings.Contains(w.said(), text) })
}

// nothingWent fails if an object went away at any time until now.
func (w *watcher) nothingWent() {
	w.t.Helper()
	if len(w.gone) > 0 {
		w.t.Errorf("went away: %v", w.gone)
	}
}

func (w *watcher) path(name string) string { return filepath.Join(w.dir, name) }

func (w *watcher) save(name, text string) {
	w.t.Helper()
	save(w.t, w.path(name), text)
}

// marked saves a file and waits until it counts: all that happened before has been seen then.
func (w *watcher) marked(services string) {
	w.t.Helper()
	w.save("marker.yaml", svc("zmarker", 9))
	w.until(services+" zmarker:9", func() bool { return ports(w.objects) == services+" zmarker:9" })
	w.remove("marker.yaml")
	w.until(services, func() bool { return ports(w.objects) == services })
	w.gone = slices.DeleteFunc(w.gone, func(name string) bool { return name == "zmarker" })
}

func (w *watcher) remove(name string)       { must(w.t, os.RemoveAll(w.path(name))) }
func (w *watcher) rename(from, to string)   { must(w.t, os.Rename(w.path(from), w.path(to))) }
func (w *watcher) link(target, name string) { must(w.t, os.Symlink(target, w.path(name))) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// svc is a Service of one port.
func svc(name string, port int) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata:\n  name: %s\nspec:\n  clusterIP: None\n  ports:\n  - "+
		"port: %d\n", name, port)
}

// folder makes a folder of files, given as name, text, name, text.
func folder(t *testing.T, files ...string) string {
	dir := filepath.Join(t.TempDir(), "manifests")
	must(t, os.Mkdir(dir, 0o755))
	for i := 0; i < len(files); i += 2 {
		save(t, filepath.Join(dir, files[i]), files[i+1])
	}
	return dir
}

func TestFirstBatchOfNothing(t *testing.T) {
	w := watch(t, folder(t))
	w.want("")
}

func TestFilesComeAndGo(t *testing.T) {
	w := watch(t, folder(t, "a.yaml", svc("a", 1)))
	w.want("a:1")
	w.save("b.yml", svc("b", 2))
	w.want("a:1 b:2")
	w.save("a.yaml", svc("a", 3))
	w.want("a:3 b:2")
	w.save(".a.yaml.new", svc("a", 4))
	w.rename(".a.yaml.new", "a.yaml")
	w.want("a:4 b:2")
	w.nothingWent()
	w.remove("b.yml")
	w.want("a:4")
	w.save("a.yaml", "# all done\n")
	w.want("")
	must(t, os.Link(writeTemp(t, svc("linked", 5)), w.path("l.yaml")))
	w.want("linked:5")
}

func writeTemp(t *testing.T, text string) string {
	path := filepath.Join(t.TempDir(), "x")
	save(t, path, text)
	return path
}

func TestFolders(t *testing.T) {
	w := watch(t, folder(t, "one/a.yaml", svc("a", 1)))
	w.want("a:1")
	w.save("two/deep/er/b.yaml", svc("b", 2))
	w.want("a:1 b:2")
	w.save("two/deep/er/b.yaml", svc("b", 3))
	w.want("a:1 b:3")
	before := w.objects[source.Key{Kind: source.Service, Namespace: "default", Name: "b"}]
	w.rename("two", "three")
	w.save("three/c.yaml", svc("c", 4))
	w.want("a:1 b:3 c:4")
	w.save("three/deep/er/b.yaml", svc("b", 3)+"# a comment\n")
	w.marked("a:1 b:3 c:4")
	w.nothingWent()
	if w.objects[source.KeyOf(before)] != before {
		t.Error("an object that never changed was delivered again")
	}
	must(t, os.Mkdir(w.path(".off"), 0o755))
	w.rename("three", ".off/three")
	w.want("a:1")
	w.rename(".off/three", "three")
	w.want("a:1 b:3 c:4")
	w.remove("three")
	w.want("a:1")
	w.save("three/b.yaml", svc("b", 5))
	w.want("a:1 b:5")
}

func TestRenamedFileChangesNothing(t *testing.T) {
	w := watch(t, folder(t, "a.yaml", svc("a", 1)+"---\n"+svc("b", 2)))
	w.save("a.yaml", svc("a", 1)+"---\nkind: [\n")
	w.problem("a:1 b:2", "a.yaml:10: line 10")
	w.rename("a.yaml", "b.yaml")
	w.problem("a:1 b:2", "b.yaml:10: line 10")
	w.nothingWent()
	w.save("b.yaml", svc("a", 1))
	w.want("a:1")
}

// How editors and tools save. None may make an object go away for a moment.
func TestSaveMethods(t *testing.T) {
	for name, method := range map[string]func(w *watcher){
		"backup by renaming": func(w *watcher) {
			w.rename("a.yaml", "a.yaml~")
			w.save("a.yaml", svc("a", 2))
			w.remove("a.yaml~")
		},
		"remove, then write": func(w *watcher) {
			w.remove("a.yaml")
			w.save("a.yaml", svc("a", 2))
		},
		"empty, then write": func(w *watcher) {
			w.save("a.yaml", "")
			w.save("a.yaml", svc("a", 2))
		},
		"truncate": func(w *watcher) {
			must(w.t, os.Truncate(w.path("a.yaml"), 0))
			w.save("a.yaml", svc("a", 2))
		},
		"replace": func(w *watcher) {
			w.save("a.tmp.yaml", svc("a", 2))
			w.rename("a.tmp.yaml", "a.yaml")
		},
		"replace by a link": func(w *watcher) {
			w.link("a.new", "link.yaml")
			w.save("a.new", svc("a", 2))
			w.rename("link.yaml", "a.yaml")
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := watch(t, folder(t, "a.yaml", svc("a", 1)+"---\n"+svc("b", 1)))
			w.save("a.yaml", svc("a", 1))
			w.want("a:1")
			w.gone = nil
			method(w)
			w.want("a:2")
			w.nothingWent()
		})
	}
}

// A file that is being written does not count, however complete it looks.
func TestHalfWritten(t *testing.T) {
	whole := svc("a", 1) + "---\n" + svc("b", 1)
	w := watch(t, folder(t, "a.yaml", whole))
	f, err := os.Create(w.path("a.yaml"))
	must(t, err)
	defer f.Close()
	w.marked("a:1 b:1")
	if _, err := f.WriteString(svc("a", 2)); err != nil {
		t.Fatal(err)
	}
	w.marked("a:1 b:1")
	w.problem("a:1 b:1", "a.yaml: a program has it open for writing: what it writes counts once it is closed (StillOpen)")
	if _, err := f.WriteString("---\n" + svc("b", 2)); err != nil {
		t.Fatal(err)
	}
	must(t, f.Close())
	w.want("a:2 b:2")
	w.nothingWent()
}

// A file counts again once nothing has it open, even if the event that said so was missed.
func TestMissedClose(t *testing.T) {
	dir := folder(t, "a.yaml", svc("a", 1))
	path := filepath.Join(dir, "a.yaml")
	n, err := newNotifier()
	must(t, err)
	defer n.close()
	f := newFollower(dir, n)
	must(t, f.round())
	f.store.batch()
	save(t, path, svc("a", 2))
	must(t, f.drain())
	clear(f.due)
	f.open[path] = writing{since: time.Now().Add(-patience)}
	must(t, f.round())
	if _, open := f.open[path]; open || len(f.store.faults[path]) > 0 {
		t.Errorf("open is %v, problems are %v", f.open, f.store.faults)
	}
	if b, _ := f.store.batch(); len(b.Changes) != 1 {
		t.Errorf("%d changes, want what was written", len(b.Changes))
	}
}

func TestEmptiedFile(t *testing.T) {
	w := watch(t, folder(t, "a.yaml", svc("a", 1)))
	w.save("a.yaml", "")
	w.want("")
}

func TestBroken(t *testing.T) {
	const a, b, c = "# A\n", "# B\n", "# C\n"
	doc := func(mark, name string, port int) string { return mark + svc(name, port) }
	join := func(docs ...string) string { return strings.Join(docs, "---\n") }
	start := join(doc(a, "a", 1), doc(b, "b", 2), doc(c, "c", 3))
	for _, tt := range []struct {
		name, text, services, problem string
	}{
		{"a value", join(doc(a, "a", 9), doc(b, "b", 0), doc(c, "c", 9)), "a:9 b:2 c:9",
			"b: spec.ports[0].port: 0 is no port: use 1 to 65535; until then its last good content stays (Invalid)"},
		{"a value, and another document goes", join(doc(b, "b", 0), doc(c, "c", 9)), "b:2 c:9",
			"its last good content stays"},
		{"a value under a new name", join(doc(a, "a", 1), doc(b, "new", 0), doc(c, "c", 3)), "a:1 c:3",
			"Service default/new: spec.ports[0].port: 0 is no port: use 1 to 65535; until then it is left out"},
		{"a field", join(doc(a, "a", 1), strings.Replace(doc(b, "b", 9), "port:", "prt:", 1)), "a:1 b:2",
			"did you mean port? Until then its last good content stays (UnknownField)"},
		{"a field twice", join(doc(a, "a", 1), doc(b, "b", 9)+"  type: ClusterIP\n  type: ClusterIP\n"), "a:1 b:2",
			"keep one; until then its last good content stays (DuplicateField)"},
		{"syntax", join(doc(a, "a", 9), doc(b, "b", 9)+"- x\n", doc(c, "c", 9)), "a:9 b:2 c:9",
			"until then Service default/b stays as before (Syntax)"},
		{"syntax, and another document goes", join(doc(b, "b", 9)+"- x\n", doc(c, "c", 9)), "a:1 b:2 c:9",
			"until then Service default/a, Service default/b stay as before (Syntax)"},
		{"cut short", start[:len(doc(a, "a", 1))+len("---\n")+50], "a:1 b:2 c:3",
			"until then Service default/b, Service default/c stay as before"},
		{"the name is missing", join(doc(a, "a", 1), strings.Replace(doc(b, "b", 9), "name: b", "labels: {}", 1), doc(c, "c",
			3)), "a:1 b:2 c:3", "metadata.name: is missing; until then Service default/b stays as before (Required)"},
		{"the kind", join(doc(a, "a", 1), strings.Replace(doc(b, "b", 9), "Service", "Servic", 1), doc(c, "c", 3)),
			"a:1 b:2 c:3", "did you mean Service (apiVersion v1)? Until then Service default/b stays as before (UnknownKind)"},
		{"the version", join(doc(a, "a", 1), strings.Replace(doc(b, "b", 9), "v1", "v1beta1", 1)), "a:1 b:2",
			"until then its last good content stays (WrongVersion)"},
		{"another kind", join(doc(a, "a", 1), "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: b}\n"), "a:1",
			"Deployment b: Fairlead has no use"},
		{"binary", join(doc(a, "a", 1), "\x00\x01\x02\n"), "a:1 b:2 c:3", "stay as before (Syntax)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := watch(t, folder(t, "f.yaml", start))
			w.save("f.yaml", tt.text)
			w.problem(tt.services, tt.problem)
			if retained := w.problems[0].Retained; retained != strings.Contains(tt.problem, "stay") {
				t.Errorf("Kept is %v", retained)
			}
			// Changes around it go on, and a mended file says it all.
			w.save("f.yaml", tt.text+"\n---\n"+svc("d", 4))
			w.problem(tt.services+" d:4", tt.problem)
			w.save("f.yaml", join(doc(b, "b", 7), svc("d", 4)))
			w.want("b:7 d:4")
		})
	}
}

// A document that plainly is of another kind keeps no object alive, whatever is wrong in it.
func TestUnreadKindRetainsNothing(t *testing.T) {
	for _, tt := range []struct{ name, text string }{
		{"a kind like ours", "apiVersion: devices.kubeedge.io/v1beta1\nkind: Device\nmetadata: {name: a}\n"},
		{"no kind", "apiVersion: kustomize.config.example.io/v1beta1\nresources: []\n"},
		{"a list of another group", "apiVersion: serving.knative.dev/v1\nkind: ServiceList\nitems: []\n"},
		{"a List of another group", "apiVersion: example.com/v1\nkind: List\nentries: []\n"},
		{"a label twice", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a, labels: {app: a, app: a}}\n"},
		{"a name twice", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a, name: a}\n"},
		{"in a List", "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: apps/v1, kind: Deployment, metadata: " +
			"{name: a, name: a}}\n"},
		{"no YAML", "apiVersion: apps/v1\nkind: Deployment # {{ .Values.kind }}\nmetadata:\n\tname: {{ " +
			".Values.name }}\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := watch(t, folder(t, "f.yaml", svc("a", 1)))
			w.save("f.yaml", tt.text)
			w.problem("", "no use for")
		})
	}
}

// A document that may be of one of our kinds is not taken for another.
func TestUnsureKindRetainsAll(t *testing.T) {
	for _, tt := range []struct{ name, text string }{
		{"the kind twice", "apiVersion: v1\nkind: Service\nkind: Deployment\nmetadata: {name: a}\n"},
		{"the kind twice in JSON", `{"apiVersion": "v1", "kind": "Deployment", "kind": "Service"}`},
		{"two documents, no YAML", "apiVersion: apps/v1\nkind: Deployment\nx: [\n---a\n" + svc("a", 1)},
		{"an indented marker, no YAML", "apiVersion: apps/v1\nkind: Deployment\nx: [\n  ---\n  {apiVersion: v1, " +
			"kind: Service}\n"},
		{"a List, no YAML", "apiVersion: v1\nkind: List\nitems: [\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := watch(t, folder(t, "f.yaml", svc("a", 1)))
			w.save("f.yaml", tt.text)
			w.problem("a:1", "until then Service default/a stays as before")
		})
	}
}

func TestBrokenItemOfList(t *testing.T) {
	item := func(name string, port any) string {
		return fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"name":%q},"spec":{"ports":[{"port":%v}]}}`, name,
			port)
	}
	list := func(items ...string) string {
		return `{"apiVersion":"v1","kind":"List","items":[` + strings.Join(items, ",") + `]}`
	}
	w := watch(t, folder(t, "l.json", list(item("a", 1), item("b", 2), item("c", 3))))
	a := w.objects[source.Key{Kind: source.Service, Namespace: "default", Name: "a"}]
	w.save("l.json", list(item("b", `"x"`), item("a", 1)))
	w.problem("a:1 b:2", `l.json:1: Service default/b: items[0].spec.ports[0].port: is the text "x"`)
	if w.objects[source.KeyOf(a)] != a {
		t.Error("an item that did not change was delivered again")
	}
	w.save("l.json", list(item("b", 4), item("a", 1))[1:])
	w.problem("a:1 b:2", "(Syntax)")
	w.save("l.json", list(item("b", 4), item("a", 5)))
	w.want("a:5 b:4")
}

func TestDuplicates(t *testing.T) {
	w := watch(t, folder(t, "a.yaml", svc("x", 1), "b.yaml", svc("x", 2)+"---\n"+svc("x", 3)))
	w.problem("x:1", "b.yaml:1: Service default/x: stands at a.yaml:1 too, and that one counts: remove one of them "+
		"(Duplicate)\nb.yaml:10: Service default/x: stands at a.yaml:1 too")
	w.remove("a.yaml")
	w.problem("x:2", "b.yaml:10: Service default/x: stands at b.yaml:1 too")
	w.save("b.yaml", svc("x", 3)+"---\n"+svc("x", 2))
	w.problem("x:3", "b.yaml:10:")
	w.save("c.yaml", svc("x", 4))
	w.problem("x:3", "c.yaml:1: Service default/x: stands at b.yaml:1")
	w.rename("c.yaml", "a.yaml")
	w.problem("x:4", "b.yaml:1: Service default/x: stands at a.yaml:1")
	// A document that is broken keeps its place, and one that may have moved does not.
	w.save("a.yaml", svc("x", 0))
	w.problem("x:4", "a.yaml:1: Service default/x: spec.ports[0].port")
	w.save("a.yaml", "kind: [")
	w.problem("x:3", "until then Service default/x stays as before")
	w.save("b.yaml", svc("why", 5))
	w.problem("why:5 x:4", "until then Service default/x stays as before")
	w.remove("a.yaml")
	w.want("why:5")
}

// A ConfigMap volume: files are links into ..data, a link that is replaced.
func TestConfigMapVolume(t *testing.T) {
	w := watch(t, folder(t, "..1/a.yaml", svc("a", 1), "..1/b.yaml", svc("b", 1)))
	w.want("")
	w.link("..1", "..data")
	w.link("..data/a.yaml", "a.yaml")
	w.link("..data/b.yaml", "b.yaml")
	w.want("a:1 b:1")
	for i := 2; i < 5; i++ {
		dir := fmt.Sprintf("..%d", i)
		w.save(dir+"/a.yaml", svc("a", i))
		w.save(dir+"/b.yaml", svc("b", i))
		w.link(dir, "..data_tmp")
		w.rename("..data_tmp", "..data")
		w.remove(fmt.Sprintf("..%d", i-1))
		w.want(fmt.Sprintf("a:%d b:%d", i, i))
	}
	w.nothingWent()
	w.save("..5/a.yaml", svc("a", 5))
	w.link("..5", "..data_tmp")
	w.rename("..data_tmp", "..data")
	w.problem("a:5 b:4", "b.yaml: can't be read: no such file or directory (CannotRead)")
	w.nothingWent()
	w.remove("b.yaml")
	w.want("a:5")
	w.save("..5/a.yaml", svc("a", 6)) // not what the kubelet does
	w.want("a:6")
}

func TestLinks(t *testing.T) {
	out := t.TempDir()
	save(t, filepath.Join(out, "team/a.yaml"), svc("a", 1))
	save(t, filepath.Join(out, "other/a.yaml"), svc("a", 2))
	save(t, filepath.Join(out, "b"), svc("b", 1))
	w := watch(t, folder(t))
	w.link(filepath.Join(out, "team"), "team")
	w.link(filepath.Join(out, "b"), "b.yaml")
	w.want("a:1 b:1")
	save(t, filepath.Join(out, "team/c.yaml"), svc("c", 1))
	save(t, filepath.Join(out, "b"), svc("b", 2))
	w.want("a:1 b:2 c:1")
	w.remove("team")
	w.link(filepath.Join(out, "other"), "team")
	w.want("a:2 b:2")
	must(t, os.Rename(filepath.Join(out, "other"), filepath.Join(out, "away")))
	w.problem("a:2 b:2", "team: can't be read: no such file or directory (CannotRead)")
	must(t, os.Rename(filepath.Join(out, "away"), filepath.Join(out, "other")))
	w.want("a:2 b:2")
	w.link("..", "up")
	w.problem("a:2 b:2", "up: this link leads to a folder that holds it: it is not followed (CannotRead)")
	w.remove("up")
	w.link(".", "self")
	w.problem("a:2 b:2", "self: this link leads")
	w.remove("self")
	w.link("loop.yaml", "loop.yaml")
	w.problem("a:2 b:2", "loop.yaml: can't be read: too many levels of symbolic links: a link leads back to itself "+
		"(CannotRead)")
	w.remove("loop.yaml")
	w.want("a:2 b:2")
}

func TestFileThatCannotBeRead(t *testing.T) {
	w := watch(t, folder(t, "a.yaml", svc("a", 1)))
	w.link("/proc/self/mem", "tmp") // opens, but does not read
	w.rename("tmp", "a.yaml")
	w.problem("a:1", "a.yaml: can't be read: input/output error (CannotRead)")
	if !w.problems[0].Retained {
		t.Error("Kept is not set")
	}
	w.remove("a.yaml")
	w.save("a.yaml", svc("a", 2))
	w.want("a:2")
	w.nothingWent()
	w.remove("a.yaml")
	must(t, os.Mkdir(w.path("a.yaml"), 0o755)) // no file, but a folder
	w.save("a.yaml/b.yaml", svc("b", 1))
	w.want("b:1")
}

func TestRootGoneAndBack(t *testing.T) {
	dir := folder(t, "a.yaml", svc("a", 1), "sub/b.yaml", svc("b", 1))
	up := filepath.Dir(dir)
	w := watch(t, dir)
	movedAway := filepath.Join(up, "away")
	must(t, os.Rename(dir, movedAway))
	w.problem("a:1 b:1", "manifests: is gone: everything stays as it was until it is back (Missing)")
	if !w.problems[0].Retained {
		t.Error("Kept is not set")
	}
	save(t, filepath.Join(movedAway, "a.yaml"), svc("a", 2))
	must(t, os.Rename(movedAway, dir))
	w.want("a:2 b:1")
	w.save("sub/b.yaml", svc("b", 2))
	w.want("a:2 b:2")
	must(t, os.Rename(dir, movedAway))
	w.problem("a:2 b:2", "(Missing)")
	w.nothingWent()
	must(t, os.MkdirAll(w.path("sub"), 0o755))
	w.save("sub/b.yaml", svc("b", 3))
	w.want("b:3")
	w.save("c.yaml", svc("c", 3))
	w.want("b:3 c:3")
}

func TestParentOfRootMoves(t *testing.T) {
	up := filepath.Join(t.TempDir(), "up")
	dir := filepath.Join(up, "on/manifests")
	save(t, filepath.Join(dir, "a.yaml"), svc("a", 1))
	w := watch(t, dir)
	must(t, os.Rename(up, up+"2"))
	w.problem("a:1", "(Missing)")
	save(t, filepath.Join(dir, "a.yaml"), svc("a", 2))
	w.want("a:2")
	w.save("b.yaml", svc("b", 2))
	w.want("a:2 b:2")
}

func TestRootIsLink(t *testing.T) {
	dir := t.TempDir()
	save(t, filepath.Join(dir, "1/a.yaml"), svc("a", 1))
	save(t, filepath.Join(dir, "2/a.yaml"), svc("a", 2))
	root := filepath.Join(dir, "current")
	must(t, os.Symlink("1", root))
	w := watch(t, root)
	w.want("a:1")
	must(t, os.Symlink("2", root+".new"))
	must(t, os.Rename(root+".new", root))
	w.want("a:2")
	w.save("a.yaml", svc("a", 3))
	w.want("a:3")
	w.nothingWent()
}

func TestRootIsFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "all")
	save(t, file, svc("a", 1))
	w := watch(t, file)
	w.want("a:1")
	save(t, file, svc("a", 2)+"---\n"+svc("b", 2))
	w.want("a:2 b:2")
	must(t, os.Remove(file))
	w.problem("a:2 b:2", "all: is gone")
	save(t, file, svc("a", 3))
	w.want("a:3")
	save(t, file+".new", svc("a", 4))
	must(t, os.Rename(file+".new", file))
	w.want("a:4")
}

// After lost events everything is looked at again.
func TestOverflow(t *testing.T) {
	dir := folder(t, "a.yaml", svc("a", 1), "b.yaml", svc("b", 1), "sub/c.yaml", svc("c", 1), "gone/d.yaml", svc("d", 1))
	n, err := newNotifier()
	must(t, err)
	defer n.close()
	f := newFollower(dir, n)
	state := map[source.Key]source.Object{}
	step := func(want string) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); ; {
			must(t, f.round())
			b, _ := f.store.batch()
			for _, c := range b.Changes {
				if state[c.Key] = c.Object; c.Object == nil {
					delete(state, c.Key)
				}
			}
			if ports(state) == want {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("still %q, want %q", ports(state), want)
			}
		}
	}
	step("a:1 b:1 c:1 d:1")
	save(t, filepath.Join(dir, "a.yaml"), svc("a", 2))
	must(t, os.Remove(filepath.Join(dir, "b.yaml")))
	must(t, os.RemoveAll(filepath.Join(dir, "gone")))
	save(t, filepath.Join(dir, "new/e.yaml"), svc("e", 1))
	for events, err := n.pending(); events != nil || err != nil; events, err = n.pending() {
		must(t, err) // and lose them
	}
	must(t, f.round())
	if got := ports(state); got != "a:1 b:1 c:1 d:1" {
		t.Fatalf("saw %q without events", got)
	}
	f.consume([]event{{watch: -1, mask: 0x4000}}) // IN_Q_OVERFLOW
	step("a:2 c:1 e:1")
	save(t, filepath.Join(dir, "new/e.yaml"), svc("e", 2))
	events, err := n.pending()
	must(t, err)
	f.consume(events)
	step("a:2 c:1 e:2")
}

// Whatever happens in a folder, in the end it is as if it had been read at that time.
func TestFollowsAnything(t *testing.T) {
	rounds := 30 * *times
	w := watch(t, folder(t))
	r := newRandom(t)
	dirs := []string{"", "d1", "d2", "d1/d3"}
	file := func() string { return filepath.Join(dirs[r.IntN(len(dirs))], fmt.Sprintf("f%d.yaml", r.IntN(4))) }
	for range rounds {
		for range 1 + r.IntN(20) {
			text := ""
			for range r.IntN(4) {
				text += "---\n" + svc(fmt.Sprintf("s%d", r.IntN(12)), 1+r.IntN(3))
			}
			switch r.IntN(10) {
			case 0, 1, 2:
				w.save(file(), text)
			case 3:
				w.save(file(), text+"---\nkind: Service\nmetadata: {name: [\n")
			case 4:
				w.save("tmp", text)
				to := w.path(file())
				must(t, os.MkdirAll(filepath.Dir(to), 0o755))
				must(t, os.Rename(w.path("tmp"), to))
			case 5:
				w.remove(file())
			case 6:
				from, to := file(), w.path(file())
				must(t, os.MkdirAll(filepath.Dir(to), 0o755))
				if err := os.Rename(w.path(from), to); err != nil && !os.IsNotExist(err) {
					t.Fatal(err)
				}
			case 7:
				_ = os.Rename(w.path(dirs[1+r.IntN(3)]), w.path(fmt.Sprintf("d%d", 1+r.IntN(3)))) // often impossible
			case 8:
				w.remove(dirs[1+r.IntN(3)])
			case 9:
				w.save("target", text)
				to := w.path(file())
				must(t, os.MkdirAll(filepath.Dir(to), 0o755))
				_ = os.Remove(to)
				must(t, os.Symlink(w.path("target"), to))
			}
		}
		mend(t, w.dir)
		objects, problems, err := Load(w.dir)
		must(t, err)
		want := map[source.Key]source.Object{}
		for _, o := range objects {
			want[source.KeyOf(o)] = o
		}
		w.until(ports(want), func() bool { return ports(w.objects) == ports(want) && slices.Equal(problems, w.problems) })
	}
}

// mend rewrites every file that is broken.
func mend(t *testing.T, dir string) {
	must(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if i := strings.Index(string(text), "---\nkind: Service\nmetadata: {name: ["); err == nil && i >= 0 {
			err = os.WriteFile(path, text[:i], 0o644)
		}
		return err
	}))
}

var times = flag.Int("times", 1, "how many times as long as usual to try random changes")

func newRandom(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}
