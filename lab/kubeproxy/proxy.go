package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"

	"fairlead.dev/fairlead/kernel/child"
	"golang.org/x/sys/unix"
)

// grace is how long a kube-proxy has to end when asked to.
const grace = 10 * time.Second

// Proxy is a kube-proxy at work.
type Proxy struct {
	Options
	Started time.Time // just before the program was started
	child   *child.Process
	web     *http.Client
}

// Start starts a kube-proxy. It is killed when this process ends, and to be stopped with Stop. ctx is for the start
// alone.
func Start(ctx context.Context, o Options) (*Proxy, error) {
	p := &Proxy{Options: o, web: client(o)}
	if err := p.start(ctx); err != nil {
		return nil, fmt.Errorf("start kube-proxy (%s) of %s: %w", o.Mode, o.Namespace.Name, err)
	}
	return p, nil
}

func (p *Proxy) start(ctx context.Context) error {
	if err := errors.Join(ctx.Err(), p.write()); err != nil {
		return err
	}
	log, err := os.Create(p.path("log"))
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own
	cmd := exec.Command(p.Binary, "--config", p.path("config.yaml"), fmt.Sprintf("-v=%d", p.Verbosity))
	if cmd.Env, err = p.environment(); err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = log, log
	p.Started = time.Now()
	p.child, err = child.Start(cmd, p.Namespace.Do)
	return err
}

// client queries from within the namespace.
func client(o Options) *http.Client {
	dial := func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = o.Namespace.Do(func() error {
			c, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return c, err
	}
	return &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DialContext: dial}}
}

// get queries the kube-proxy.
func (p *Proxy) get(ctx context.Context, url string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	a, err := p.web.Do(r)
	if err != nil {
		return nil, err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(io.LimitReader(a.Body, 16<<20))
	if err == nil && a.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %s", url, a.Status, b)
	}
	return b, err
}

// Ready waits until the kernel has been told of every IPv4 Service, and returns when that was, by kube-proxy's own
// reading of the clock. A kube-proxy's first sync begins when it knows all Services and EndpointSlices. (Its /healthz
// is no help: it is healthy from the start.)
func (p *Proxy) Ready(ctx context.Context) (time.Time, error) {
	for {
		if m, err := p.Metrics(ctx); err == nil && !m.Last.IsZero() {
			return m.Last, nil
		}
		select {
		case <-time.After(50 * time.Millisecond): // each look costs the kube-proxy about a millisecond
		case <-p.child.Ended():
			return time.Time{}, fmt.Errorf("%s ended by itself: %w: %s", p, p.child.Err(), p.last())
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("wait until %s has told the kernel: %w: it says: %s", p, ctx.Err(), p.last())
		}
	}
}

// String names it.
func (p *Proxy) String() string {
	return fmt.Sprintf("kube-proxy (%s) of %s", p.Mode, p.Namespace.Name)
}

// last is the end of what it said.
func (p *Proxy) last() string {
	b, _ := os.ReadFile(p.path("log"))
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}

// Stop ends it by SIGTERM, makes sure of it and of the programs that it started, and waits for that. Its rules stay:
// end the namespace, or Clean.
func (p *Proxy) Stop() error {
	p.child.End(grace)
	p.web.CloseIdleConnections()
	if err := unix.Kill(-p.child.PID, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("end what %s has started: %w", p, err)
	}
	return nil
}

// Clean has a kube-proxy remove the rules of every mode from the namespace. None may be at work there.
func Clean(ctx context.Context, o Options) error {
	env, err := o.environment()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, o.Binary, "--cleanup", "--config", o.path("config.yaml"))
	var said strings.Builder
	cmd.Env, cmd.Stdout, cmd.Stderr = env, &said, &said
	if err := o.Namespace.Do(cmd.Start); err != nil {
		return fmt.Errorf("clean up after kube-proxy in %s: %w", o.Namespace.Name, err)
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("clean up after kube-proxy in %s: %w: %s", o.Namespace.Name, err, said.String())
	}
	return nil
}
