package daemon

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/source"
)

// TestMain lets the test binary be an agent, or a daemon that is killed.
func TestMain(m *testing.M) {
	switch os.Getenv("FAIRLEAD_TEST") {
	case "agent":
		agentMain()
	case "daemon":
		fmt.Println(Run(context.Background(), Options{
			Name: os.Args[1], Source: &feed{first: batch(node("a", "10.0.0.1"))}, Agent: agentArgs,
			Up: func() { fmt.Println("up") },
		}))
	default:
		os.Exit(m.Run())
	}
}

// agentMain reports that it is ready, until told to end. After a SIGHUP it is ready no more.
func agentMain() {
	var asleep atomic.Bool
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, syscall.SIGHUP, syscall.SIGTERM)
	go http.ListenAndServe("127.0.0.1:10249", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asleep.Load() || r.URL.Path != "/readyz" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	for s := range changes {
		if s == syscall.SIGTERM {
			fmt.Println("agent says goodbye")
			return
		}
		asleep.Store(true)
	}
}

func agentArgs(node string) []string {
	return []string{"/usr/bin/env", "FAIRLEAD_TEST=agent", self(), node}
}

func self() string {
	p, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return p
}

// feed is a source that gives what it is fed.
type feed struct {
	first source.Batch
	more  chan source.Batch
	fail  chan error
}

func (f *feed) Run(ctx context.Context, deliver func(source.Batch)) error {
	deliver(f.first)
	for {
		select {
		case b := <-f.more:
			deliver(b)
		case err := <-f.fail:
			return err
		case <-ctx.Done():
			return nil
		}
	}
}

func batch(objects ...source.Object) (b source.Batch) {
	b.Changes = append(b.Changes, source.Put(objects...)...)
	return b
}

func node(name, ip string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}}}}
}

func pod(name, node, ip string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Spec: corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: ip}}}}
}

func randomName(t *testing.T) string {
	return fmt.Sprintf("fld%d%s", os.Getpid(), strings.ToLower(t.Name()[4:8]))
}

// eventually waits until the condition holds.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
		if condition() {
			return
		}
		<-time.After(5 * time.Millisecond)
	}
	t.Fatalf("not within 30 s: %s", what)
}

// agents returns the agents' states as "a:ready b:starting".
func agents(name string) string {
	s, err := StatusOf(name)
	if err != nil {
		return err.Error()
	}
	var l []string
	for _, a := range s.Agents {
		l = append(l, a.Node+":"+a.State)
	}
	return strings.Join(l, " ")
}

// run keeps a sandbox up for the test.
func run(t *testing.T, f *feed) (name string, stop func() error) {
	t.Helper()
	name = randomName(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	up := make(chan bool)
	go func() {
		done <- Run(ctx, Options{Name: name, Follow: "a test", Source: f, Agent: agentArgs, Up: func() { close(up) }})
	}()
	stopped := false
	stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		return <-done
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
		gone(t, name)
	})
	select {
	case <-up:
	case err := <-done:
		t.Fatalf("this test needs root: %v", err)
	}
	return name, stop
}

func gone(t *testing.T, name string) {
	t.Helper()
	if left, err := netns.List(name); len(left) > 0 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := os.Stat(Folder(name)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("folder is left: %v", err)
	}
}

func TestAgentsAreRestarted(t *testing.T) {
	f := &feed{first: batch(node("a", "10.0.0.1"), node("b", "10.0.0.2")), more: make(chan source.Batch)}
	name, stop := run(t, f)
	eventually(t, "both agents ready", func() bool { return agents(name) == "a:ready b:ready" })
	s, err := StatusOf(name)
	if err != nil || s.Follows != "a test" || s.Since.IsZero() {
		t.Errorf("%+v, %v", s, err)
	}
	first := s.Agents[0]
	if err := syscall.Kill(first.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "agent started again", func() bool {
		s, err := StatusOf(name)
		if err != nil {
			return false
		}
		a := s.Agents[0]
		return a.State == Ready && a.Restarts == 1 && a.PID != first.PID && strings.Contains(a.Error, "killed")
	})
	if err := syscall.Kill(s.Agents[1].PID, syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "agent not ready", func() bool { return agents(name) == "a:ready b:not ready" })
	log, err := os.ReadFile(first.Log)
	if err != nil || strings.Contains(string(log), "goodbye") {
		t.Errorf("log %q, %v", log, err)
	}
	s, _ = StatusOf(name)
	if err := stop(); err != nil {
		t.Error(err)
	}
	for _, a := range s.Agents {
		if syscall.Kill(a.PID, 0) == nil {
			t.Errorf("agent %+v still runs", a)
		}
	}
}

func TestFollowing(t *testing.T) {
	f := &feed{first: batch(node("a", "10.0.0.1"), pod("x", "a", "10.1.0.1")), more: make(chan source.Batch)}
	name, _ := run(t, f)
	eventually(t, "agent ready", func() bool { return agents(name) == "a:ready" })
	hosts := func() (names string) {
		s, err := sandbox.StateOf(name)
		if err != nil {
			return err.Error()
		}
		for _, h := range s.Hosts {
			names += h.Name + ","
		}
		return names
	}
	f.more <- batch(node("b", "10.0.0.2"), pod("y", "b", "10.1.0.2"))
	eventually(t, "node b", func() bool {
		return hosts() == "outside,node a,node b,pod shop/x,pod shop/y," && agents(name) == "a:ready b:ready"
	})
	f.more <- batch(pod("z", "nowhere", "10.1.0.3"))
	eventually(t, "problem told", func() bool {
		s, err := StatusOf(name)
		return err == nil && strings.Contains(s.Problem, "Pod shop/z") && strings.Contains(s.Problem, "nowhere")
	})
	f.more <- source.Batch{Changes: []source.Change{
		{Key: source.KeyOf(pod("z", "", ""))}, {Key: source.KeyOf(pod("x", "", ""))}, {Key: source.KeyOf(node("a", ""))}}}
	eventually(t, "node a gone", func() bool {
		s, err := StatusOf(name)
		return hosts() == "outside,node b,pod shop/y," && agents(name) == "b:ready" && err == nil && s.Problem == ""
	})
	s, _ := StatusOf(name)
	f.more <- batch(node("b", "10.0.0.3"))
	eventually(t, "node b anew", func() bool {
		now, err := StatusOf(name)
		return err == nil && len(now.Agents) == 1 && now.Agents[0].State == Ready && now.Agents[0].PID != s.Agents[0].PID
	})
}

func TestErrorsEndIt(t *testing.T) {
	name := randomName(t)
	for _, c := range []struct {
		what string
		feed *feed
		want string
	}{
		{"bad objects", &feed{first: batch(pod("x", "nowhere", "10.1.0.1"))}, "Pod shop/x"},
		{"a source that fails", &feed{fail: func() chan error {
			c := make(chan error, 1)
			c <- errors.New("sad")
			return c
		}()}, "sad"},
		{"a source that ends", &feed{fail: func() chan error { c := make(chan error); close(c); return c }()}, "ended"},
	} {
		err := Run(t.Context(), Options{Name: name, Follow: "a test", Source: c.feed})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.what, err, c.want)
		}
		if left, _ := netns.List(name); len(left) > 0 {
			t.Errorf("%s: left: %v", c.what, left)
		}
		os.RemoveAll(Folder(name))
	}
}

func TestKilledDaemon(t *testing.T) {
	name := randomName(t)
	cmd := exec.Command(self(), name)
	cmd.Env = append(os.Environ(), "FAIRLEAD_TEST=daemon")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "up\n" {
		t.Fatalf("%s, %v", line, err)
	}
	eventually(t, "agent ready", func() bool { return agents(name) == "a:ready" })
	s, err := StatusOf(name)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	eventually(t, "agent ends with its daemon", func() bool {
		_, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(s.Agents[0].PID), "exe"))
		return syscall.Kill(s.Agents[0].PID, 0) != nil || err != nil
	})
	left, err := sandbox.Leftovers()
	if err != nil || !slices.ContainsFunc(left, func(s sandbox.State) bool { return s.Name == name }) {
		t.Errorf("%+v, %v", left, err)
	}
	if err := sandbox.DownByName(name); err != nil {
		t.Error(err)
	}
	gone(t, name)
}
