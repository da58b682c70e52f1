package load

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseStat(t *testing.T) {
	got := ParseStat([]byte("cpu  10 2 30 400 5 6 7 8 0 0\ncpu0 1 0 0 0 0 0 3 0 0 0\nintr 5 4 3\ncpu3 0 0 0 0 0 0 9 1 0 " +
		"0\ncpufoo 1 2 3 4 5 6 7 8 9\n"))
	want := map[int]CPUTimes{
		-1: {100 * time.Millisecond, 20 * time.Millisecond, 300 * time.Millisecond, 4 * time.Second, 50 * time.Millisecond,
			60 * time.Millisecond, 70 * time.Millisecond, 80 * time.Millisecond},
		0: {User: 10 * time.Millisecond, Softirq: 30 * time.Millisecond},
		3: {Softirq: 90 * time.Millisecond, Steal: 10 * time.Millisecond},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	if b := got[-1].Busy(); b != 550*time.Millisecond {
		t.Errorf("busy %v", b)
	}
	if b := got[-1].Total(); b != 4680*time.Millisecond {
		t.Errorf("total %v", b)
	}
}

func TestParseSoftnet(t *testing.T) {
	got := parseSoftnet([]byte("00000023 00000001 0 0 0 0 0 0 0 0 0 0 00000000 0 0\n00002059 00000000 0 0 0 0 0 0 0 0 0 " +
		"0 00000005 0 0\nnonsense here\n"))
	if d := cmp.Diff(map[int]softnet{0: {0x23, 1}, 5: {0x2059, 0}}, got, cmp.AllowUnexported(softnet{})); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	if old := parseSoftnet([]byte("0000000a 0 0\n0000000b 0 0\n")); old[1].processed != 11 {
		t.Errorf("a kernel before 5.10: %v", old)
	}
}

func TestParseSNMP(t *testing.T) {
	got := parseSNMP(
		[]byte("Ip: Forwarding DefaultTTL\nIp: 1 64\nTcp: RetransSegs OutRsts\nTcp: 3 4\nTcpExt: A\nTcpExt: -1\n"))
	if d := cmp.Diff(map[string]float64{"Ip.Forwarding": 1, "Ip.DefaultTTL": 64, "Tcp.RetransSegs": 3, "Tcp.OutRsts": 4,
		"TcpExt.A": -1}, got); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
}

// ReadCounts must find every counter that it promises on the kernel that the tests run on.
func TestReadCounts(t *testing.T) {
	c := ReadCounts([]int{cpu(t)}, Workers{})
	for _, name := range []string{"softnet", "softnet_pinned", "softnet_dropped", "switches", "preempted", "faults",
		"retransmits", "listen_overflows"} {
		if _, ok := c.n[name]; !ok {
			t.Errorf("no counter %q: %v", name, c.n)
		}
	}
	if c.all.Total() == 0 || c.process == 0 {
		t.Errorf("no times: %+v", c)
	}
	_, n := c.sub(c)
	for name, v := range n {
		if v != 0 {
			t.Errorf("%s differs from itself by %v", name, v)
		}
	}
}

func FuzzParsers(f *testing.F) {
	f.Add([]byte("cpu 1 2 3 4 5 6 7 8\nTcp: a\nTcp: 1\n00000001 2"))
	f.Fuzz(func(t *testing.T, b []byte) {
		ParseStat(b)
		parseSoftnet(b)
		parseSNMP(b)
	})
}
