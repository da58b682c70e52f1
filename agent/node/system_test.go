package node

import (
	"bytes"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/sysctl"
)

func TestMax(t *testing.T) {
	for _, c := range []struct{ perCore, min, processors, want int }{
		{32 << 10, 128 << 10, 2, 128 << 10},
		{32 << 10, 128 << 10, 8, 256 << 10},
		{32 << 10, 128 << 10, 64, 1 << 20},
		{0, 128 << 10, 8, 0},
		{10, 0, 3, 30},
	} {
		if is := (Conntrack{MaxPerCore: c.perCore, Min: c.min}).Max(c.processors); is != c.want {
			t.Errorf("%+v: %d", c, is)
		}
	}
}

// TestOnlyRequestedSettingsChange makes settings in a namespace of its own and looks at each there.
func TestOnlyRequestedSettingsChange(t *testing.T) {
	score, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		t.Fatal(err)
	}
	own, err := strconv.Atoi(strings.TrimSpace(string(score)))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // thrown away with its namespace
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Errorf("new network namespace: %v: run as root", err)
			return
		}
		read := func(name string) string {
			s, err := sysctl.Open("net/" + name)
			if err != nil {
				t.Error(err)
				return ""
			}
			defer s.Close()
			v, _ := s.Get()
			return v
		}
		names := []string{"ipv4/conf/all/arp_ignore", "netfilter/nf_conntrack_tcp_be_liberal",
			"netfilter/nf_conntrack_tcp_timeout_established",
			"netfilter/nf_conntrack_tcp_timeout_close_wait", "netfilter/nf_conntrack_udp_timeout",
			"netfilter/nf_conntrack_udp_timeout_stream"}
		before := map[string]string{}
		for _, n := range names {
			before[n] = read(n)
		}
		log := slog.New(slog.DiscardHandler)
		if err := (Settings{OOMScore: int32(own)}).Apply(log); err != nil {
			t.Error(err)
		}
		if err := (Settings{OOMScore: int32(own), Conntrack: &Conntrack{}}).Apply(log); err != nil {
			t.Error(err)
		}
		for _, n := range names {
			if v := read(n); v != before[n] {
				t.Errorf("%s was not asked for: %s, not %s", n, v, before[n])
			}
		}
		s := Settings{OOMScore: int32(own), StrictARP: true,
			Conntrack: &Conntrack{Liberal: true, Established: 24 * time.Hour, CloseWait: time.Hour, UDP: 31 * time.Second}}
		var said bytes.Buffer
		if err := s.Apply(slog.New(slog.NewTextHandler(&said, nil))); err != nil {
			t.Error(err)
		}
		for i, want := range []string{"1", "1", "86400", "3600", "31", before[names[5]]} {
			if v := read(names[i]); v != want {
				t.Errorf("%s is %s, want %s", names[i], v, want)
			}
		}
		if !strings.Contains(said.String(), "net.netfilter.nf_conntrack_tcp_timeout_close_wait value=3600") {
			t.Errorf("the log says: %s", said.String())
		}
		most, err := sysctl.Number("net/netfilter/nf_conntrack_max")
		if err != nil {
			t.Error(err)
		}
		if err := (Settings{OOMScore: int32(own), Conntrack: &Conntrack{MaxPerCore: 1}}).Apply(log); err != nil {
			t.Errorf("fewer connections than are tracked: %v", err)
		}
		tooMany := Settings{OOMScore: int32(own), Conntrack: &Conntrack{MaxPerCore: 1, Min: most + 1}}
		if err := tooMany.Apply(log); err == nil || !strings.Contains(err.Error(), "on the host") {
			t.Errorf("more connections than a namespace may ask for: %v", err)
		}
	}()
	<-done
}
