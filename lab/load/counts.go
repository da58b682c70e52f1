package load

import (
	"bufio"
	"bytes"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// CPU is processor time spent during a sample. Server, Agent and the sum of User and System are exact; Softirq, Steal
// and Others are counted by the kernel in ticks (10 ms in /proc/stat) over all processors, so only their sums over many
// samples mean something.
type CPU struct {
	User    time.Duration `json:"user"`    // the client's thread
	System  time.Duration `json:"system"`  // the client's thread
	Server  time.Duration `json:"server"`  // the servers
	Agent   time.Duration `json:"agent"`   // the agents
	Softirq time.Duration `json:"softirq"` // network and other deferred work, on the pinned processors if there are any
	Steal   time.Duration `json:"steal"`   // time that the hypervisor gave to other guests
	Others  time.Duration `json:"others"`  // busy time that was not this process
}

// Counts is a reading of the counters; two readings make a sample's CPU and Counters. What can't be read counts as 0.
type Counts struct {
	cpu     CPU
	n       map[string]float64
	all     CPUTimes
	process time.Duration
}

// ReadCounts reads them for the calling thread, in its network namespace. The counters are:
//
//	softnet          packets through __netif_receive_skb_core's rounds, all processors (/proc/net/softnet_stat column 1)
//	softnet_pinned   the same, on cpus alone
//	softnet_dropped  packets dropped since a backlog was full (column 2)
//	switches         context switches of the thread, voluntary or not
//	preempted        those that it did not ask for
//	faults           page faults of the thread
//	retransmits      TCP segments sent again, in this network namespace
//	listen_overflows connections refused since an accept queue was full, in this network namespace
//
// softnet counts the whole machine: on a busy one read it over many operations.
func ReadCounts(cpus []int, w Workers) Counts {
	c := Counts{n: map[string]float64{}}
	c.own()
	for _, s := range w.Servers {
		c.cpu.Server += s.CPU()
	}
	for _, a := range w.Agents {
		c.cpu.Agent += a.CPU()
	}
	perCPU, _ := os.ReadFile("/proc/stat")
	times := ParseStat(perCPU)
	c.all, c.process = times[-1], OwnCPU()
	c.cpu.Steal = c.all.Steal
	soft, _ := os.ReadFile("/proc/thread-self/net/softnet_stat")
	rows := parseSoftnet(soft)
	for _, r := range rows {
		c.n["softnet"] += r.processed
		c.n["softnet_dropped"] += r.dropped
	}
	c.cpu.Softirq = c.all.Softirq
	if len(cpus) > 0 {
		c.cpu.Softirq = 0
		for _, id := range cpus {
			c.n["softnet_pinned"] += rows[id].processed
			c.cpu.Softirq += times[id].Softirq
		}
	}
	for file, names := range map[string]map[string]string{
		"snmp":    {"Tcp.RetransSegs": "retransmits"},
		"netstat": {"TcpExt.ListenOverflows": "listen_overflows"},
	} {
		b, _ := os.ReadFile("/proc/thread-self/net/" + file)
		for name, v := range parseSNMP(b) {
			if as, ok := names[name]; ok {
				c.n[as] = v
			}
		}
	}
	return c
}

// own reads the calling thread's part: once more just before work begins, so that reading the rest is not counted as
// work.
func (c *Counts) own() {
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_THREAD, &ru) == nil {
		c.cpu.User, c.cpu.System = time.Duration(ru.Utime.Nano()), time.Duration(ru.Stime.Nano())
		c.n["switches"], c.n["preempted"] = float64(ru.Nvcsw+ru.Nivcsw), float64(ru.Nivcsw)
		c.n["faults"] = float64(ru.Minflt + ru.Majflt)
	}
}

// sub is what happened between an earlier reading and this one.
func (c Counts) sub(before Counts) (CPU, map[string]float64) {
	n := map[string]float64{}
	for k, v := range c.n {
		n[k] = v - before.n[k]
	}
	a, b := c.cpu, before.cpu
	busy, own := c.all.Busy()-before.all.Busy(), c.process-before.process
	return CPU{
		a.User - b.User, a.System - b.System, a.Server - b.Server, a.Agent - b.Agent, a.Softirq - b.Softirq,
		a.Steal - b.Steal, max(0, busy-own),
	}, n
}

// OwnCPU is the processor time that this process has used, all threads.
func OwnCPU() time.Duration {
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &ru) != nil {
		return 0
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// threadCPU is the processor time of a thread of this process, by its clock (clock_getcpuclockid(3): ~tid << 3 | 4 |
// 2).
func threadCPU(tid int) time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(int32(^tid<<3|6), &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// CPUTimes is a line of /proc/stat.
type CPUTimes struct{ User, Nice, System, Idle, IOWait, IRQ, Softirq, Steal time.Duration }

// Busy is the time spent neither idle nor stolen.
func (t CPUTimes) Busy() time.Duration { return t.User + t.Nice + t.System + t.IRQ + t.Softirq }

// Total is all time, stolen time too.
func (t CPUTimes) Total() time.Duration { return t.Busy() + t.Idle + t.IOWait + t.Steal }

// tick is USER_HZ, the unit of /proc/stat on every architecture that Linux has today but Alpha and IA-64.
const tick = time.Second / 100

// ParseStat reads /proc/stat: times by processor, the sum of all under -1. Lines that it doesn't know are passed over.
func ParseStat(b []byte) map[int]CPUTimes {
	times := map[int]CPUTimes{}
	for line := range bytes.Lines(b) {
		f := strings.Fields(string(line))
		if len(f) < 9 || !strings.HasPrefix(f[0], "cpu") {
			continue
		}
		id := -1
		if f[0] != "cpu" {
			n, err := strconv.ParseUint(f[0][3:], 10, 16)
			if err != nil {
				continue
			}
			id = int(n)
		}
		var v [8]time.Duration
		for i := range v {
			n, _ := strconv.ParseInt(f[i+1], 10, 48)
			v[i] = time.Duration(n) * tick
		}
		times[id] = CPUTimes{v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]}
	}
	return times
}

// softnet is a line of /proc/net/softnet_stat (net/core/net-procfs.c, softnet_seq_show).
type softnet struct{ processed, dropped float64 }

// parseSoftnet returns the lines by processor: the 13th column since Linux 5.10, before that the line's number.
func parseSoftnet(b []byte) map[int]softnet {
	rows := map[int]softnet{}
	for line := range bytes.Lines(b) {
		f := strings.Fields(string(line))
		if len(f) < 2 {
			continue
		}
		var v []uint64
		for _, s := range f {
			n, err := strconv.ParseUint(s, 16, 32)
			if err != nil {
				break
			}
			v = append(v, n)
		}
		if len(v) != len(f) {
			continue
		}
		id := len(rows)
		if len(v) >= 13 {
			id = int(v[12])
		}
		rows[id] = softnet{float64(v[0]), float64(v[1])}
	}
	return rows
}

// parseSNMP reads /proc/net/snmp and /proc/net/netstat: pairs of lines, names and values, as "Tcp.RetransSegs".
func parseSNMP(b []byte) map[string]float64 {
	out := map[string]float64{}
	sc := bufio.NewScanner(bytes.NewReader(b))
	sc.Buffer(nil, 1<<20)
	var names []string
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) == 0 {
			continue
		}
		if len(names) != len(f) || names[0] != f[0] {
			names = f
			continue
		}
		for i := 1; i < len(f); i++ {
			if v, err := strconv.ParseFloat(f[i], 64); err == nil {
				out[strings.TrimSuffix(f[0], ":")+"."+names[i]] = v
			}
		}
		names = nil
	}
	return out
}
