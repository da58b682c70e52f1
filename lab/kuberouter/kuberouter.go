// Package kuberouter runs the network policies of a real kube-router as a subject of the lab: in a network namespace of
// the lab's, against a server of sandbox/apiserver.
//
// The binary is given, never built or downloaded here. Its router and its service proxy are off. It writes into its
// network namespace alone, by iptables-legacy and ipset. It is as upstream configures it but for one thing: it syncs
// every hour instead of every five minutes, so that no sync falls between measurements of others.
package kuberouter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/child"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
)

// grace is how long a kube-router has to end when asked to.
const grace = 10 * time.Second

// Options say what to start.
type Options struct {
	Binary    string
	Namespace *netns.Namespace
	Node      string // name of the Node that it serves, one of the objects
	Dir       string // absolute path of a folder for this kube-router alone; made if it isn't there
	Services  string // range of ClusterIPs
}

// Router is a kube-router at work, and the API server of its own.
type Router struct {
	Options
	API   *apiserver.Server
	child *child.Process
	stop  func() error // the API server
}

// Start serves the objects to a kube-router and waits until its first sync has ended. It returns what that took, as the
// program logs it. The Router is the caller's to close.
func Start(ctx context.Context, o Options, objects ...source.Object) (r *Router, sync time.Duration, err error) {
	r = &Router{Options: o, API: apiserver.New(objects...), stop: func() error { return nil }}
	defer func() {
		if err != nil {
			err = fmt.Errorf("start kube-router of %s: %w", o.Namespace.Name, errors.Join(err, r.Close()))
			r = nil
		}
	}()
	r.API.Encode()
	url, stop, err := r.API.Start(o.Namespace, "127.0.0.1:0")
	if err != nil {
		return r, 0, err
	}
	r.stop = stop
	if err := r.run(url); err != nil {
		return r, 0, err
	}
	if sync, err = r.synced(ctx); err != nil {
		return r, 0, err
	}
	return r, sync, r.check(ctx, objects)
}

func (r *Router) path(name string) string { return filepath.Join(r.Dir, name) }

// run starts the program.
func (r *Router) run(url string) error {
	if err := os.MkdirAll(r.Dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(r.path("kubeconfig"), apiserver.Kubeconfig(url), 0o644); err != nil {
		return err
	}
	log, err := os.Create(r.path("log"))
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own
	cmd := exec.Command(r.Binary, "--kubeconfig="+r.path("kubeconfig"), "--hostname-override="+r.Node, "--run-firewall",
		"--run-router=false", "--run-service-proxy=false", "--enable-cni=false", "--enable-ipv6=false", "--health-port=0",
		"--service-cluster-ip-range="+r.Services, "--iptables-sync-period=1h", "--v=1")
	if cmd.Env, err = kubeproxy.Environment(r.Dir, kubeproxy.Legacy); err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = log, log
	r.child, err = child.Start(cmd, r.Namespace.Do)
	return err
}

// What the program logs at the end of a sync, and before that where it failed.
var (
	ended   = regexp.MustCompile(`sync iptables took (\S+)`)
	aborted = regexp.MustCompile("Aborting sync.*")
)

// synced waits until the first sync has ended.
func (r *Router) synced(ctx context.Context) (time.Duration, error) {
	for {
		log, err := os.ReadFile(r.path("log"))
		if err != nil {
			return 0, err
		}
		if failed := aborted.Find(log); failed != nil {
			return 0, fmt.Errorf("its first sync failed: %s", failed)
		}
		if m := ended.FindSubmatch(log); m != nil {
			return time.ParseDuration(string(m[1]))
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-r.child.Ended():
			return 0, fmt.Errorf("it ended by itself: %w: %s", r.child.Err(), last(log))
		case <-ctx.Done():
			return 0, fmt.Errorf("wait until it has synced: %w: it says: %s", ctx.Err(), last(log))
		}
	}
}

// check returns an error unless there is a chain for each policy.
func (r *Router) check(ctx context.Context, objects []source.Object) error {
	policies := 0
	for _, o := range objects {
		if source.KeyOf(o).Kind == source.NetworkPolicy {
			policies++
		}
	}
	cmd := exec.CommandContext(ctx, "xtables-legacy-multi", "iptables-save", "-t", "filter")
	var rules, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &rules, &said
	err := r.Namespace.Do(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return fmt.Errorf("read its rules: %w: %s", err, said.Bytes())
	}
	if n := bytes.Count(rules.Bytes(), []byte("\n:KUBE-NWPLCY-")); n < policies {
		return fmt.Errorf("it has chains for %d policies of %d", n, policies)
	}
	return nil
}

// last is the end of what it said.
func last(log []byte) string {
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}

// PID is its process.
func (r *Router) PID() int { return r.child.PID }

// CPU is the processor time that it has used, with the programs that it ran and that have ended.
func (r *Router) CPU() (time.Duration, error) {
	u, err := kubeproxy.UsageOf(r.child.PID)
	return u.CPU(), err
}

// Close ends it, what it has started, and its API server. Its rules stay: end the namespace.
func (r *Router) Close() error {
	err := r.stop()
	if r.child == nil {
		return err
	}
	r.child.End(grace)
	if killed := unix.Kill(-r.child.PID, unix.SIGKILL); killed != nil && !errors.Is(killed, unix.ESRCH) {
		err = errors.Join(err, fmt.Errorf("end what kube-router of %s has started: %w", r.Namespace.Name, killed))
	}
	return err
}
