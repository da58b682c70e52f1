package test_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/sandbox"
)

// privileges is what the chart grants an agent's container: deploy's tests hold the file to it.
type privileges struct {
	Capabilities []string
	HostPaths    map[string]string // mounted where → the host's; " ro" ends what is read-only
}

// chart returns what the chart grants in each mode.
func chart(t *testing.T) (all map[string]privileges) {
	t.Helper()
	b, err := os.ReadFile("../deploy/manifests/privileges.json")
	if err = errors.Join(err, json.Unmarshal(b, &all)); err != nil {
		t.Fatal(err)
	}
	return all
}

// In each mode that this kernel can, an agent serves with what the chart grants its container and no more, through
// replaced endpoints and its own replacement: capabilities, no new privileges, a read-only root and /proc/sys, and of
// the host's BPF and cgroup file systems what is mounted. Seccomp and AppArmor are the runtime's and not here.
func TestLeastPrivileges(t *testing.T) {
	for mode, allowed := range chart(t) {
		if mode == "ipvs" { // not in this kernel
			continue
		}
		t.Run(mode, func(t *testing.T) {
			l := newLife(t, mode)
			l.confine = confine(l.node, allowed)
			defer l.logOnFailure()
			l.hire("--iptables-localhost-nodeports=false") // as the chart's configuration has it
			allowed.held(t, l.cmd.Process.Pid)
			if mode == "ebpf" {
				l.loopback()
				l.fastPath()
			}
			stop := l.probe()
			l.during("replacements", 20, func(int) { l.replace() })
			if mode != "userspace" { // whose connections end with the agent
				l.during("kills", 1, func(int) { l.denied(); l.kill(); l.hire("--iptables-localhost-nodeports=false") })
			}
			stop()
			l.settled()
			l.denied()
		})
	}
}

// loopback demands the settings that mode ebpf needs.
func (l *lives) loopback() {
	l.t.Helper()
	for _, name := range []string{"accept_local", "route_localnet"} {
		var now []byte
		err := l.node.Do(func() (err error) { now, err = os.ReadFile("/proc/sys/net/ipv4/conf/lo/" + name); return err })
		if err != nil || string(now) != "1\n" {
			l.t.Errorf("lo's %s is %q, %v", name, now, err)
		}
	}
}

// fastPath demands that the agent reports the fast path.
func (l *lives) fastPath() {
	l.t.Helper()
	if page := l.page("/status"); !strings.Contains(page, `"fastPath":{"ipv4":{"enabled":`) {
		l.t.Errorf("the fast path isn't reported: %s", page)
	}
}

// Each capability that the chart grants is needed: without it the agent says what it may not.
func TestEachCapabilityIsNeeded(t *testing.T) {
	for mode, allowed := range chart(t) {
		// not in this kernel; what these need that they don't choose here
		if mode == "ipvs" || mode == "auto" || mode == "iptables" {
			continue
		}
		for i, lacking := range allowed.Capabilities {
			t.Run(mode+" without "+lacking, func(t *testing.T) {
				l := newLife(t, mode)
				less := allowed
				less.Capabilities = slices.Delete(slices.Clone(allowed.Capabilities), i, i+1)
				l.confine = confine(l.node, less)
				l.start("--iptables-localhost-nodeports=false")
				defer func() { l.cmd.Process.Kill(); <-l.ended; l.cmd = nil }()
				defer l.logOnFailure()
				eventually(t, "the log says what is denied", func() bool { return len(l.rejections()) > 0 })
			})
		}
	}
}

// Another mode's agent can't detach what mode ebpf left: as docs/how-to/install.md says, removing the pins does.
func TestLeavingEBPFWithoutItsPrivileges(t *testing.T) {
	all := chart(t)
	l := newLife(t, "ebpf")
	l.confine = confine(l.node, all["ebpf"])
	l.hire("--iptables-localhost-nodeports=false")
	l.kill()
	l.mode = "nftables"
	l.confine = confine(l.node, all["nftables"])
	l.hire("--iptables-localhost-nodeports=false")
	var pins string
	err := l.node.Do(func() (err error) { pins, _, err = bpf.Folder(); return err })
	if _, there := os.Stat(pins); err != nil || there != nil {
		t.Fatalf("no pins are left to remove: %v, %v", err, there)
	}
	if err := os.RemoveAll(pins); err != nil {
		t.Fatal(err)
	}
	for range 2 * slots {
		l.replace()
	}
	l.settled()
}

// confine returns the command that runs another as a container of a node that is given p.
func confine(node *sandbox.Host, p privileges) []string {
	script := []string{"mount -t tmpfs -o mode=755 none /run/fairlead", "mount --bind /proc/sys /proc/sys",
		"mount -o remount,bind,ro /proc/sys"}
	do := func(format string, args ...any) { script = append(script, fmt.Sprintf(format, args...)) }
	for to, from := range p.HostPaths {
		from, readOnly := strings.CutSuffix(from, " ro")
		at := "/run/fairlead/mounts" + to
		switch from {
		case "/sys/fs/cgroup": // a node in a sandbox has those below its own
			from = node.Cgroup
		case "/run/xtables.lock":
			do("mkdir -p %s && touch %s %s", filepath.Dir(at), from, at)
		case "/sys/kernel/rcu_expedited":
			do("mkdir -p %s && touch %s %s", filepath.Dir(at), at, to)
		}
		do("[ -e %s ] || mkdir -p %s %s", at, from, at)
		do("mount --rbind %s %s", from, at)
		if readOnly {
			do("mount -o remount,bind,ro %s", at)
		}
	}
	do("umount -R -l /sys/fs/cgroup; umount -l /sys/fs/bpf || true")
	for to := range p.HostPaths {
		do("[ -e %s ] || mkdir -p %s", to, to)
		do("mount --move /run/fairlead/mounts%s %s", to, to)
	}
	do("mount -o remount,bind,ro /")
	do(`exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all%s -- "$@"`,
		strings.ToLower(join(p.Capabilities, ",+")))
	return []string{"unshare", "--mount", "--propagation", "private", "sh", "-ec", strings.Join(script, "\n"), "sh"}
}

// join puts a prefix before each word.
func join(words []string, prefix string) (all string) {
	for _, w := range words {
		all += prefix + w
	}
	return all
}

// held demands that a process has the capabilities and no others.
func (p privileges) held(t *testing.T, pid int) {
	t.Helper()
	numbers := map[string]uint{"NET_BIND_SERVICE": 10, "NET_ADMIN": 12, "NET_RAW": 13, "SYS_ADMIN": 21, "PERFMON": 38,
		"BPF": 39}
	want := uint64(0)
	for _, c := range p.Capabilities {
		want |= 1 << numbers[c]
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	contains(t, string(status), fmt.Sprintf("CapPrm:\t%016x", want), fmt.Sprintf("CapEff:\t%016x", want),
		fmt.Sprintf("CapBnd:\t%016x", want), "NoNewPrivs:\t1")
}

// logOnFailure logs what the agent logged, if the test failed.
func (l *lives) logOnFailure() {
	if l.t.Failed() {
		b, _ := os.ReadFile(l.log.Name())
		l.t.Logf("the log: %s", b)
	}
}

// denied demands that the agent's log names nothing that it may not do.
func (l *lives) denied() {
	for _, line := range l.rejections() {
		l.t.Errorf("the log says: %s", line)
	}
}

// rejections returns the lines of the agent's log that name what it may not do, but for what the init container does or
// nothing needs.
func (l *lives) rejections() (lines []string) {
	b, err := os.ReadFile(l.log.Name())
	if err != nil {
		l.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, "OOM score") || strings.Contains(line, "nf_conntrack") {
			continue
		}
		// The last is all that iptables-legacy-restore says.
		for _, word := range []string{"denied", "not permitted", "read-only", "unable to initialize table"} {
			if strings.Contains(line, word) {
				lines = append(lines, line)
			}
		}
	}
	return lines
}

// text is output that is read while it is written.
type text struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (w *text) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(b)
}

func (w *text) has(s string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Contains(w.b.String(), s)
}

// The chart's container that migrates a node removes kube-proxy's rules once no kube-proxy runs and the agent is ready,
// not before. Without CAP_SYS_PTRACE it can't tell whether one runs, and removes nothing.
func TestMigrate(t *testing.T) {
	l := newLife(t, "nftables")
	nft := func(args ...string) (out string, err error) {
		err = l.node.Do(func() error { out, err = try(append([]string{"nft"}, args...)...); return err })
		return out, err
	}
	if out, err := nft("add table ip kube-proxy"); err != nil {
		t.Fatal(err, out)
	}
	proxy := exec.Command(namedProxy(t))
	in, err := proxy.StdinPipe()
	if err = errors.Join(err, l.node.Do(proxy.Start)); err != nil {
		t.Fatal(err)
	}
	ended := sync.OnceFunc(func() { in.Close(); proxy.Wait() })
	defer ended()

	caps := privileges{Capabilities: []string{"NET_ADMIN", "NET_RAW"},
		HostPaths: map[string]string{"/run/xtables.lock": "/run/xtables.lock"}}
	blind, log := migrate(t, l, caps)
	if err := blind.Wait(); err == nil || !log.has("CAP_SYS_PTRACE") {
		t.Errorf("without CAP_SYS_PTRACE: %v: %s", err, &log.b)
	}
	caps.Capabilities = append(caps.Capabilities, "SYS_PTRACE")
	cmd, log := migrate(t, l, caps)
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	stands := func(when string) {
		t.Helper()
		if out, err := nft("list", "tables"); err != nil || !strings.Contains(out, "kube-proxy") {
			t.Errorf("%s kube-proxy's table is gone: %v", when, err)
		}
	}
	eventually(t, "it waits for kube-proxy", func() bool { return log.has("kube-proxy is running") })
	stands("while kube-proxy runs")
	ended()
	eventually(t, "it waits for the agent", func() bool { return log.has("waiting until Fairlead is ready") })
	stands("before the agent is ready")
	l.hire()
	eventually(t, "kube-proxy's table is gone", func() bool {
		out, err := nft("list", "tables")
		return err == nil && !strings.Contains(out, "kube-proxy") && strings.Contains(out, "fairlead")
	})
	eventually(t, "it says so", func() bool { return log.has("removed kube-proxy's rules") })
}

// migrate starts the command in the node as a container that is given p, with the processes of the host.
func migrate(t *testing.T, l *lives, p privileges) (*exec.Cmd, *text) {
	t.Helper()
	args := slices.Concat(confine(l.node, p), []string{fairlead, "migrate", "--node", "a"})
	cmd, log := exec.Command(args[0], args[1:]...), &text{}
	cmd.Stdout, cmd.Stderr = io.Discard, log
	if err := l.node.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	return cmd, log
}

// namedProxy returns a program with kube-proxy's name that ends with its input.
func namedProxy(t *testing.T) string {
	t.Helper()
	cat, err := exec.LookPath("cat")
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(cat)
	file := filepath.Join(t.TempDir(), "kube-proxy")
	if err = errors.Join(err, os.WriteFile(file, b, 0o755)); err != nil {
		t.Fatal(err)
	}
	return file
}

// Mode nftables serves wherever the nft command works: with CAP_NET_ADMIN alone, without /proc/sys and /sys, and in a
// network namespace of a user namespace, where sockets have the buffers of anyone.
func TestServesWhereNftRuns(t *testing.T) {
	t.Run("bare", func(t *testing.T) {
		l := newLife(t, "nftables")
		defer l.logOnFailure()
		l.confine = []string{"unshare", "--mount", "--propagation", "private", "sh", "-ec",
			"mount -t tmpfs none /proc/sys\n" +
				"mount -t tmpfs none /sys\nmount -o remount,bind,ro /\n" +
				`exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+net_admin -- "$@"`, "sh"}
		l.hire()
		l.replace()
		l.settled()
		l.kill()
		l.hire()
		l.settled()
	})
	t.Run("user namespace", func(t *testing.T) {
		dir, namespaces := t.TempDir(), []string{"--user", "--map-root-user", "--net"}
		if out, err := try("unshare", "--user", "true"); err != nil { // as in a chroot
			t.Logf("no user namespace can be made here, so this is a network namespace of root's: %v %s", err, out)
			namespaces = namespaces[2:]
		}
		must(t, fairlead, "sandbox", "generate", dir, "--services", "1500", "--endpoints", "4")
		args := " --source " + dir + " --node a"
		must(t, append(append([]string{"timeout", "60", "unshare"}, namespaces...), "sh", "-c", "ip link set lo up\n"+
			fairlead+" run --metrics-bind-address= --healthz-bind-address="+args+" & agent=$!\n"+
			"until "+fairlead+" plan"+args+" >/dev/null; do kill -0 $agent || exit; sleep 0.1; done\nkill $agent; "+
			"wait $agent")...)
	})
}
