package record

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/source"
)

// pods is a source of pods on node a at addresses of the loopback device.
type pods map[string]string

func (p pods) Run(ctx context.Context, deliver func(source.Batch)) error {
	var b source.Batch
	for name, addr := range p {
		b.Changes = append(b.Changes, source.Change{Object: pod(name, "a", addr)})
	}
	deliver(b)
	<-ctx.Done()
	return nil
}

func pod(name, node, addr string) *corev1.Pod {
	labels := map[string]string{"app": name}
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: labels},
		Spec: corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: addr}}}}
}

// udp sends so many datagrams from one address to another, each from a port of its own.
func udp(t *testing.T, from, to [4]byte, port, count int) {
	for i := range count {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrInet4{Addr: from, Port: 10_000 + i})
		}
		if err == nil {
			err = unix.Sendto(fd, []byte{0}, 0, &unix.SockaddrInet4{Addr: to, Port: port})
		}
		unix.Close(fd)
		if err != nil {
			t.Error(err)
			return
		}
	}
}

// recordIn records in the calling thread's network namespace while body runs.
func recordIn(t *testing.T, o Options, body func()) (f *flowlog.File, err error) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	o.Node, o.Source = "a", pods{"client": "127.0.1.1", "web": "127.0.1.2"}
	o.Write = func(*flowlog.File) error { return nil }
	o.Ready = func(warning string) {
		if warning != "" {
			t.Error(warning)
		}
		go func() { // Run reads meanwhile
			defer stop()
			body()
		}()
	}
	return Run(ctx, o)
}

func lo(t *testing.T) {
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// A burst of connections is recorded whole, or what is missing is counted; nothing is left in the kernel.
func TestBurstIsCounted(t *testing.T) {
	netnstest.Do(t, func() {
		lo(t)
		if _, err := recordIn(t, Options{Entries: 10, PerPod: 10}, func() {}); err == nil ||
			!strings.Contains(err.Error(), "connection tracking is off") {
			t.Errorf("without connection tracking: %v", err)
		}
		const burst = 50_000
		ns, err := netns.Current()
		if err != nil {
			t.Error(err)
			return
		}
		defer ns.Close()
		f, err := recordIn(t, Options{Entries: 10, PerPod: 10, Track: true}, func() {
			ns.Do(func() error { udp(t, [4]byte{127, 0, 1, 1}, [4]byte{127, 0, 1, 2}, 53, burst); return nil })
		})
		if err != nil {
			t.Error(err)
			return
		}
		k := flowlog.Key{Client: flowlog.End{Addr: netip.MustParseAddr("127.0.1.1"), Pod: "shop/client"},
			Server: flowlog.End{Addr: netip.MustParseAddr("127.0.1.2"), Pod: "shop/web"}, Protocol: 17, Port: 53}
		if len(f.Flows) != 1 || f.Flows[0].Key() != k || f.Flows[0].Count+f.Lost != burst || f.Beyond+f.Unclear > 0 {
			t.Errorf("%+v, want %d connections", f, burst)
		}
		t.Logf("%d lost", f.Lost)
		out, err := exec.Command("nft", "list", "ruleset").Output()
		if v4, v6, failed := conntrack.Tracking(); err != nil || len(out) > 0 || v4 || v6 || failed != nil {
			t.Errorf("left behind: %s %v, tracking %t %t %v", out, err, v4, v6, failed)
		}
	})
}

// between is a connection from one address to another.
func between(from, to string) conntrack.Tracked {
	return conntrack.Tracked{Flow: conntrack.Flow{Protocol: 6, Source: netip.MustParseAddrPort(from),
		Destination: netip.MustParseAddrPort(to), ReplySource: netip.MustParseAddrPort(to)}}
}

func testNames() *names {
	n := &names{node: "a", own: map[netip.Addr]bool{netip.MustParseAddr("10.0.0.254"): true}}
	n.apply([]source.Change{{Object: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Spec: corev1.NodeSpec{PodCIDRs: []string{"10.0.0.0/24"}}}}, {Object: pod("web", "a", "10.0.0.1")},
		{Object: pod("db", "b", "10.0.1.1")}})
	return n
}

func flowsOf(f *flowlog.File) string {
	var b bytes.Buffer
	for _, x := range flowlog.Merge(f).Flows {
		fmt.Fprintf(&b, "%s %d\n", x.Key(), x.Count)
	}
	return b.String()
}

func TestWhatIsRecorded(t *testing.T) {
	n := testNames()
	table := newTable(n, 100, 100)
	for range 2 {
		table.add(tracked(between("10.0.0.1:40000", "10.0.1.1:5432"), 1))
	}
	table.add(tracked(between("10.0.0.1:40001", "10.0.1.1:5432"), 0))   // it was open before, and is known
	table.add(tracked(between("10.0.0.7:40000", "192.0.2.1:443"), 0))   // a pod that isn't known yet
	table.add(tracked(between("192.0.2.9:40000", "10.0.0.1:80"), 1))    // of a client outside
	table.add(tracked(between("10.0.0.254:40000", "10.0.0.1:80"), 1))   // the node itself
	table.add(tracked(between("10.0.1.1:40000", "192.0.2.1:80"), 1))    // of another node
	table.add(tracked(between("172.18.0.1:40000", "10.0.0.254:22"), 1)) // of no pod
	old := between("10.0.1.1:5432", "10.0.0.1:40002")
	old.Midstream = true
	table.add(tracked(old, 0))
	old.ReplySource = netip.MustParseAddrPort("10.0.0.1:7000")
	table.add(tracked(old, 1))
	n.apply([]source.Change{{Object: pod("late", "a", "10.0.0.7")}})
	f := table.file()
	want := "192.0.2.9 > shop/web:80/tcp 1\nshop/late > 192.0.2.1:443/tcp 1\nshop/web > shop/db:5432/tcp 2\n"
	if got := flowsOf(f); got != want || f.Unclear != 1 || f.Beyond != 0 || len(f.Pods) != 3 {
		t.Errorf("%s%+v, want\n%s", got, f.Header, want)
	}
}

// A pod that scans others has as many flows as one may have, and the flows of other pods are recorded.
func TestBounds(t *testing.T) {
	n := testNames()
	n.apply([]source.Change{{Object: pod("scanner", "a", "10.0.0.2")}})
	table := newTable(n, 6, 4)
	for i := range 10 {
		table.add(tracked(between("10.0.0.2:40000", fmt.Sprintf("10.0.0.1:%d", 1+i)), 1))
	}
	table.add(tracked(between("10.0.0.1:40000", "10.0.1.1:5432"), 1))
	table.add(tracked(between("10.0.0.1:40000", "10.0.1.1:5433"), 1))
	table.add(tracked(between("10.0.0.1:40000", "10.0.1.1:5434"), 1))
	table.add(tracked(between("10.0.0.1:40000", "10.0.1.1:5432"), 1)) // is known
	f := table.file()
	if len(f.Flows) != 6 || f.Beyond != 7 || !strings.Contains(flowsOf(f), "shop/web > shop/db:5432/tcp 2") {
		t.Errorf("%s%+v", flowsOf(f), f.Header)
	}
}
