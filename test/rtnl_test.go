package test_test

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
)

// rtnlProbe takes the kernel's RTNL lock every so often: how long it waits is how long others hold it.
type rtnlProbe struct {
	waited atomic.Int64 // in all, in nanoseconds, at most
	stop   atomic.Bool
	ended  chan error
}

const (
	probeEvery  = 100 * time.Microsecond
	uncontended = 20 * time.Microsecond // more than a call takes that doesn't wait
)

// startProbe starts a probe, in a network namespace of its own, that ends with the benchmark.
func startProbe(b *testing.B) *rtnlProbe {
	b.Helper()
	p := &rtnlProbe{ended: make(chan error, 1)}
	go func() {
		runtime.LockOSThread() // never unlocked: the namespace ends with the thread
		p.ended <- p.run()
	}()
	b.Cleanup(func() {
		p.stop.Store(true)
		if err := <-p.ended; err != nil {
			b.Error(err)
		}
	})
	return p
}

// run sets a queue length, for which the kernel takes the lock. How long the lock was held before a call that waits is
// unknown, but for at most the time since the last one: that counts, too. The runtime isn't told of the calls, or it
// would take the thread's processor meanwhile.
func (p *rtnlProbe) run() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	schedule, err := os.Open("/proc/thread-self/schedstat")
	if err != nil {
		return err
	}
	defer schedule.Close()
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint32(1000)                                                              // as it is
	if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), -20); err != nil { // so that it runs as soon as it is to
		return err
	}
	rest := unix.NsecToTimespec(int64(probeEvery))
	for last, was := time.Now(), delayed(schedule); !p.stop.Load(); {
		unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&rest)), 0, 0)
		began := time.Now()
		_, _, e := unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCSIFTXQLEN, uintptr(unsafe.Pointer(lo)))
		if e != 0 {
			return fmt.Errorf("set the queue length of lo: %w", e)
		}
		now, is := time.Now(), delayed(schedule)
		if now.Sub(began) > uncontended {
			p.waited.Add(int64(max(0, now.Sub(last)-(is-was))))
		}
		last, was = now, is
	}
	return nil
}

// delayed returns for how long a thread has been ready to run and had no processor (proc(5), schedstat).
func delayed(schedule *os.File) (d time.Duration) {
	var text [64]byte
	n, _ := unix.Pread(int(schedule.Fd()), text[:], 0)
	var ran int64
	fmt.Sscan(string(text[:n]), &ran, (*int64)(&d))
	return d
}

// rtnlWindow is for how long the lock is measured after a pod has come or gone: the agent and the kernel go on in the
// background.
const rtnlWindow = 150 * time.Millisecond

// held runs f, and returns for how long others held the lock from its begin to the end of the window behind it.
func (p *rtnlProbe) held(f func()) (held, elapsed time.Duration) {
	before, began := p.waited.Load(), time.Now()
	f()
	time.Sleep(rtnlWindow)
	return time.Duration(p.waited.Load() - before), time.Since(began)
}

// BenchmarkRTNL has a pod come and go, and reports for how long the kernel's RTNL lock is held by all there is on the
// machine while nothing happens (idle-ms), and beyond what that would be in as long a time, for a pod's ADD, its DEL,
// and the end of its network namespace, as medians. Windows of the four alternate.
func BenchmarkRTNL(b *testing.B) {
	for _, mode := range []string{"nftables", "ebpf"} {
		b.Run(mode, func(b *testing.B) {
			a := newAttaching(b)
			a.flags = []string{"--mode", mode}
			agent := a.startAgent()
			defer func() {
				agent.Kill()
				must(b, "ip", "netns", "exec", a.node.Name, fairlead, "clean", "--network", "--network-cni-folder", a.folder)
			}()
			made := 0
			fresh := func() *netns.Namespace {
				made++
				pod, err := netns.New(fmt.Sprintf("flrtnl%d-%d", os.Getpid(), made))
				if err != nil {
					b.Fatal(err)
				}
				return pod
			}
			gone := func(pod *netns.Namespace) {
				pod.Close()
				if err := netns.Delete(pod.Name); err != nil {
					b.Fatal(err)
				}
				within(b, time.Minute, "the pod's device is gone", func() bool { return len(podDevices(b, a.node.Name)) == 0 })
			}
			pod := fresh()
			a.add(pod)
			a.del(pod)
			gone(pod)
			p, held := startProbe(b), map[string][]time.Duration{}
			var idle, rest time.Duration
			window := func(what string, f func()) {
				h, elapsed := p.held(f)
				if what == "idle" {
					idle, rest = h, elapsed
				} else {
					h -= time.Duration(float64(idle) * float64(elapsed) / float64(rest))
				}
				held[what] = append(held[what], h)
			}
			for b.Loop() {
				pod := fresh()
				window("idle", func() {})
				window("add", func() { a.add(pod) })
				window("del", func() { a.del(pod) })
				window("end", func() { gone(pod) })
			}
			for what, l := range held {
				b.ReportMetric(float64(median(l))/1e6, what+"-ms")
			}
		})
	}
}

func median(l []time.Duration) time.Duration {
	slices.Sort(l)
	return l[len(l)/2]
}
