package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// prefix starts the names of all namespaces of this test process.
var prefix = fmt.Sprintf("flnetns%d-", os.Getpid())

// space makes a namespace that goes with the test.
func space(t *testing.T, name string) *Namespace {
	t.Helper()
	ns, err := New(prefix + name)
	if err != nil {
		t.Fatalf("this test needs root, to make network namespaces: %v", err)
	}
	t.Cleanup(func() {
		ns.Close()
		if err := Delete(ns.Name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
		if left, err := List(ns.Name); len(left) > 0 || err != nil {
			t.Errorf("left: %v, %v", left, err)
		}
	})
	return ns
}

// inode reports the calling thread's namespace from others.
func inode(t *testing.T) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

func TestNewIsAnotherNamespaceWithItsName(t *testing.T) {
	ns := space(t, "a")
	home := inode(t)
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(Dir, ns.Name), &st); err != nil {
		t.Fatal(err)
	}
	err := ns.Do(func() error {
		if got := inode(t); got == home || got != st.Ino {
			t.Errorf("inside: namespace %d, outside %d, by name %d", got, home, st.Ino)
		}
		links, err := net.Interfaces()
		if len(links) != 1 || links[0].Name != "lo" {
			t.Errorf("interfaces %v, want only lo", links)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if got := inode(t); got != home {
		t.Errorf("afterwards in %d, before in %d", got, home)
	}
}

func TestNamesThatCantBe(t *testing.T) {
	ns := space(t, "a")
	if _, err := New(ns.Name); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a taken name: %v", err)
	}
	for _, name := range []string{"", ".", "..", "a/b", "/", strings.Repeat("x", 256)} {
		if _, err := New(name); err == nil {
			t.Errorf("name %q is taken", name)
		}
	}
	for _, f := range []func(string) error{Delete, func(n string) error { _, err := Open(n); return err }} {
		if err := f(prefix + "none"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("a name that isn't there: %v", err)
		}
	}
}

func TestDoNestsAndPassesErrorsOn(t *testing.T) {
	a, b := space(t, "a"), space(t, "b")
	inside := func(n *Namespace) (i uint64) {
		if err := n.Do(func() error { i = inode(t); return nil }); err != nil {
			t.Fatal(err)
		}
		return i
	}
	ia, ib := inside(a), inside(b)
	sad := errors.New("sad")
	err := a.Do(func() error {
		if err := b.Do(func() error {
			if inode(t) != ib {
				t.Error("not in b")
			}
			return sad
		}); !errors.Is(err, sad) {
			t.Errorf("inner: %v", err)
		}
		if inode(t) != ia {
			t.Error("not back in a")
		}
		return sad
	})
	if !errors.Is(err, sad) {
		t.Errorf("outer: %v", err)
	}
}

func TestDoComesBackFromAPanic(t *testing.T) {
	ns, home := space(t, "a"), inode(t)
	func() {
		defer func() { recover() }()
		ns.Do(func() error { panic("on purpose") })
	}()
	if got := inode(t); got != home {
		t.Errorf("in %d after a panic, before in %d", got, home)
	}
}

func TestManyThreads(t *testing.T) {
	spaces := []*Namespace{space(t, "a"), space(t, "b"), space(t, "c")}
	home := inode(t)
	var inodes [3]uint64
	for i, n := range spaces {
		n.Do(func() error { inodes[i] = inode(t); return nil })
	}
	var wg sync.WaitGroup
	for g := range 24 {
		wg.Go(func() {
			for i := range 100 {
				k := (g + i) % 3
				if err := spaces[k].Do(func() error {
					if got := inode(t); got != inodes[k] {
						t.Errorf("in %d, want %d", got, inodes[k])
					}
					return nil
				}); err != nil {
					t.Error(err)
				}
				if got := inode(t); got != home {
					t.Errorf("home is %d, want %d", got, home)
				}
			}
		})
	}
	wg.Wait()
}

func TestOpenAndCurrent(t *testing.T) {
	ns := space(t, "a")
	again, err := Open(ns.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	home, err := Current()
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	want := inode(t)
	err = again.Do(func() error {
		return home.Do(func() error {
			if got := inode(t); got != want {
				t.Errorf("in %d, want %d", got, want)
			}
			return nil
		})
	})
	if err != nil {
		t.Error(err)
	}
}

func TestDeleteRemovesOnlyTheName(t *testing.T) {
	ns := space(t, "a")
	if err := Delete(ns.Name); err != nil {
		t.Fatal(err)
	}
	if err := ns.Do(func() error { return nil }); err != nil {
		t.Errorf("an open namespace is gone with its name: %v", err)
	}
	if left, _ := List(ns.Name); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestDeleteOfAHalfMadeName(t *testing.T) {
	path := filepath.Join(Dir, prefix+"half")
	space(t, "a") // makes Dir
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := Delete(prefix + "half"); err != nil {
		t.Error(err)
	}
}

func TestList(t *testing.T) {
	space(t, "b1")
	space(t, "b2")
	space(t, "c")
	got, err := List(prefix + "b")
	if want := []string{prefix + "b1", prefix + "b2"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
}

func TestClosedHandle(t *testing.T) {
	ns := space(t, "a")
	again, err := Open(ns.Name)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
	if err := again.Do(func() error { t.Error("ran"); return nil }); err == nil {
		t.Error("a closed handle still opens")
	}
}

// TestBesideIP is in a mount namespace of its own, where nothing has made a network namespace before.
func TestBesideIP(t *testing.T) {
	script := `mount -t tmpfs tmpfs /run && mkdir /run/netns && "$0" -test.run='^TestChildMakesOneBesideIP$'`
	c := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-ec", script, os.Args[0])
	c.Env = append(os.Environ(), "FAIRLEAD_TEST_CHILD=1")
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestChildMakesOneBesideIP(t *testing.T) {
	if os.Getenv("FAIRLEAD_TEST_CHILD") == "" {
		return // run by TestBesideIP
	}
	if _, err := New("ours"); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("ip", "netns", "add", "others").CombinedOutput(); err != nil {
		t.Fatalf("ip netns add: %v: %s", err, out)
	}
	if err := Delete("ours"); err != nil {
		t.Error(err)
	}
}

// TestDoNeedsNoCapabilityInOwnNetns: in the calling thread's own namespace Do works without CAP_SYS_ADMIN, as in an
// unprivileged container.
func TestDoNeedsNoCapabilityInOwnNetns(t *testing.T) {
	here, err := Current()
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends without its capabilities
		h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&h, &none[0]); err != nil {
			done <- err
			return
		}
		done <- here.Do(func() error { return nil })
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Of namespaces with the same address, the one that a pair of devices leads to comes first.
func TestHostsBesideComeFirst(t *testing.T) {
	node, far, pod := space(t, "node"), space(t, "a"), space(t, "b")
	address := netip.MustParseAddr("192.0.2.7")
	for _, ns := range []*Namespace{far, pod} {
		run(t, ns, "ip", "address", "add", address.String()+"/32", "dev", "lo")
	}
	run(t, node, "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", pod.Name)
	var hosts []Host
	err := node.Do(func() (err error) {
		hosts, err = Hosts()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	want := uint64(0)
	if err := pod.Do(func() error { h, err := here(); want = h.Cookie; return err }); err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(hosts, func(h Host) bool { return slices.Contains(h.Addresses, address) })
	if i != 1 || hosts[i].Cookie != want {
		t.Errorf("the first with the address is number %d, %+v; want the pod, cookie %d", i, hosts[max(i, 0)], want)
	}
}

// run runs a program in a namespace.
func run(t *testing.T, ns *Namespace, command ...string) {
	t.Helper()
	if err := ns.Do(func() error {
		out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%v: %w: %s", command, err, out)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}
