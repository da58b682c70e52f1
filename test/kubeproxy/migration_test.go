package kubeproxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// TestMigration migrates a node from a real kube-proxy and back, under traffic in an open loop:
// one new connection every other millisecond, whatever became of those before. None may fail, and a connection that was
// made through kube-proxy lives through both.
func TestMigration(t *testing.T) {
	for _, w := range modes {
		for _, ours := range []string{"nftables", "ebpf"} {
			t.Run(w.name+"/"+ours, func(t *testing.T) { migrate(t, w.mode, w.variant, ours) })
		}
	}
}

func migrate(t *testing.T, mode kubeproxy.Mode, variant kubeproxy.Variant, ours string) {
	ns, ctx := space(t), patience(t, 3*time.Minute)
	p := probe(t, ns)
	say, more := echo(t, ns)
	objects := append(append(generate.Cluster(20, 10), more...), p.Objects()...) // the probe's slice is the last
	o := options(t, ns, mode, variant)
	n, _, err := kubeproxy.NewNode(ctx, o, objects...)
	check(t, err)
	closed := sync.OnceFunc(func() { check(t, n.Close()) })
	defer closed()
	check(t, p.Reach(ctx))

	service := netip.AddrPortFrom(generate.ServiceAddress(100_000), 80)
	fromTheirs := openConnection(t, ns, say)
	check(t, fromTheirs())
	load := begin(ns, service)

	// Fairlead beside the kube-proxy, which holds the ports.
	dir := filepath.Join(t.TempDir(), "objects")
	check(t, generate.Write(dir, objects, 1))
	run := start(t, ns, "run", "--mode", ours, "--source", dir, "--node", nodeName, "--migrate-from-kube-proxy", "Remove",
		"--metrics-bind-address=", "--healthz-bind-address=")
	run.says(ctx, "msg=serving")
	run.says(ctx, "kube-proxy is running")
	check(t, n.Stop())
	run.says(ctx, "removed kube-proxy's rules")
	if left := rules(t, ns, variant); strings.Contains(left, "large-") || strings.Contains(left, "KUBE-SERVICES") {
		t.Errorf("after it was taken over there is:\n%s", left)
	}
	_, err = p.Move(ctx, func(s source.Object) error {
		n.Apply(s)
		text, err := json.Marshal(s)
		next := dir + ".next"
		return errors.Join(err, os.WriteFile(next, text, 0o644),
			os.Rename(next, filepath.Join(dir, fmt.Sprintf("objects-%06d.yaml", len(objects)-1))))
	})
	check(t, err, fromTheirs())
	fromOurs := openConnection(t, ns, say)

	// And back.
	run.stop()
	back, err := kubeproxy.Start(ctx, n.Options)
	check(t, err)
	defer func() { check(t, back.Stop()) }()
	clean := start(t, ns, "clean", "--after", "kube-proxy")
	check(t, clean.cmd.Wait())
	clean.says(ctx, "nothing of Fairlead's is left")
	if left := rules(t, ns, kubeproxy.Found); strings.Contains(left, "fairlead") {
		t.Errorf("after the migration back there is:\n%s", left)
	}
	_, err = p.Move(ctx, n.Apply)
	check(t, err)

	made, failed := load.end()
	t.Logf("%d connections, %d failed", made, len(failed))
	if len(failed) > 0 || made < 100 {
		t.Errorf("of %d connections %d failed, the first: %v", made, len(failed),
			errors.Join(failed[:min(3, len(failed))]...))
	}
	check(t, fromTheirs(), fromOurs())
}

// echo is a Service whose endpoint says back what it hears, and a listener as that endpoint.
func echo(t *testing.T, ns *netns.Namespace) (at netip.AddrPort, objects []source.Object) {
	at, to := netip.AddrPortFrom(generate.ServiceAddress(100_001), 7), netip.AddrPortFrom(addresses[2], 7007)
	var l net.Listener
	check(t, ns.Do(func() (err error) {
		l, err = net.Listen("tcp4", to.String())
		return err
	}))
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go io.Copy(c, c)
		}
	}()
	ip, ready, name, tcp, port := at.Addr().String(), true, "", corev1.ProtocolTCP, int32(to.Port())
	return at, []source.Object{
		&corev1.Service{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "probe", Name: "echo"},
			Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
				IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
				Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: int32(at.Port()),
					TargetPort: intstr.FromInt32(port)}}},
		},
		&discoveryv1.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "probe", Name: "echo-0",
				Labels: map[string]string{discoveryv1.LabelServiceName: "echo"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{to.Addr().String()},
				Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
			Ports: []discoveryv1.EndpointPort{{Name: &name, Protocol: &tcp, Port: &port}},
		},
	}
}

// openConnection makes a connection, and returns a check that it lives.
func openConnection(t *testing.T, ns *netns.Namespace, to netip.AddrPort) (lives func() error) {
	c, err := dial(ns, to)
	check(t, err)
	t.Cleanup(func() { c.Close() })
	return func() error {
		c.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := c.Write([]byte("?")); err != nil {
			return fmt.Errorf("a connection that was made before: %w", err)
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			return fmt.Errorf("a connection that was made before is answered no more: %w", err)
		}
		return nil
	}
}

// dial connects from within a namespace.
func dial(ns *netns.Namespace, to netip.AddrPort) (c net.Conn, err error) {
	derr := ns.Do(func() error {
		c, err = net.DialTimeout("tcp4", to.String(), 5*time.Second)
		return err
	})
	return c, derr
}

// load is traffic in an open loop.
type load struct {
	made   atomic.Int64
	mu     sync.Mutex
	failed []error
	stop   context.CancelFunc
	done   sync.WaitGroup
}

// begin starts a connection every other millisecond, and hears of each where it came to.
func begin(ns *netns.Namespace, to netip.AddrPort) *load {
	ctx, stop := context.WithCancel(context.Background())
	l := &load{stop: stop}
	l.done.Go(func() {
		for tick := time.NewTicker(2 * time.Millisecond); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
				l.done.Go(func() { l.one(ns, to) })
			}
		}
	})
	return l
}

func (l *load) one(ns *netns.Namespace, to netip.AddrPort) {
	at := time.Now()
	c, err := dial(ns, to)
	if err == nil {
		c.SetDeadline(time.Now().Add(5 * time.Second))
		_, err = io.ReadFull(c, make([]byte, 1))
		c.Close()
	}
	l.made.Add(1)
	if err != nil {
		l.mu.Lock()
		l.failed = append(l.failed, fmt.Errorf("begun at %s: %w", at.Format("05.000"), err))
		l.mu.Unlock()
	}
}

// end waits for those under way.
func (l *load) end() (int64, []error) {
	l.stop()
	l.done.Wait()
	return l.made.Load(), l.failed
}

// started is a fairlead at work.
type started struct {
	t    *testing.T
	cmd  *exec.Cmd
	log  string
	stop func()
}

// start starts a fairlead in a namespace.
func start(t *testing.T, ns *netns.Namespace, args ...string) *started {
	t.Helper()
	s := &started{t: t, cmd: exec.Command(program(t, "FAIRLEAD"), args...), log: filepath.Join(t.TempDir(), "log")}
	file, err := os.Create(s.log)
	check(t, err)
	defer file.Close()
	s.cmd.Stdout, s.cmd.Stderr = file, file
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	check(t, ns.Do(s.cmd.Start))
	s.stop = sync.OnceFunc(func() {
		s.cmd.Process.Signal(unix.SIGTERM)
		s.cmd.Wait()
	})
	t.Cleanup(s.stop)
	return s
}

// says waits until the log holds a text.
func (s *started) says(ctx context.Context, text string) {
	s.t.Helper()
	for {
		b, err := os.ReadFile(s.log)
		check(s.t, err)
		if strings.Contains(string(b), text) {
			return
		}
		select {
		case <-ctx.Done():
			s.t.Fatalf("fairlead never said %q, but:\n%s", text, b)
		case <-time.After(5 * time.Millisecond):
		}
	}
}
