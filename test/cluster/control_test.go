package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/pki"
)

// control is a control plane in a host's namespace.
type control struct {
	host    *sandbox.Host
	address netip.Addr
	dir     string // certificates, kubeconfigs, logs
	ca      *pki.Authority
	admin   *http.Client

	mu      sync.Mutex
	running map[string]*exec.Cmd
}

const (
	first  = 6443 // port of the API server
	second = 6444 // of another one on the same etcd
)

// newControl makes a control plane that does not run yet.
func newControl(h *sandbox.Host, dir string) *control {
	c := &control{host: h, dir: dir, running: map[string]*exec.Cmd{}}
	for _, a := range h.Addresses {
		if a.Is4() {
			c.address = a
		}
	}
	return c
}

// begin starts etcd, an API server and the EndpointSlice controller, and waits until they are ready.
func (c *control) begin() error {
	if err := c.certify(); err != nil {
		return err
	}
	err := c.start("etcd", "etcd", "--data-dir="+c.file("etcd"), "--unsafe-no-fsync", "--log-level=error",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379", "--listen-peer-urls=http://127.0.0.1:2380",
		"--initial-advertise-peer-urls=http://127.0.0.1:2380", "--initial-cluster=default=http://127.0.0.1:2380", "--quota-backend-bytes=4294967296")
	if err = errors.Join(err, c.startServer(first)); err != nil {
		return err
	}
	kubeconfig, err := c.kubeconfig("controllers", first, "system:masters")
	if err != nil {
		return err
	}
	return c.start("endpointslice-controller", "endpointslice-controller", "--kubeconfig="+kubeconfig)
}

func (c *control) file(name string) string { return filepath.Join(c.dir, name) }

// certify makes the authority, the server's certificate, the key of service accounts and the administrator.
func (c *control) certify() (err error) {
	if c.ca, err = pki.New(); err != nil {
		return err
	}
	server, err := c.ca.Server(24*time.Hour, c.address, netip.MustParseAddr("127.0.0.1"))
	if err != nil {
		return err
	}
	admin, err := c.ca.Client("admin", "system:masters")
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AddCert(c.ca.Cert)
	c.admin = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DialContext: c.dial, TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{admin.TLS()}}, ForceAttemptHTTP2: true}}
	return errors.Join(server.Write(c.file("server.crt"), c.file("server.key")), os.WriteFile(c.file("ca.crt"), c.ca.PEM(), 0o644))
}

// dial connects from the control plane's own host.
func (c *control) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	var d net.Dialer
	err = c.host.Do(func() error {
		conn, err = d.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// kubeconfig writes one for a user, who belongs to groups.
func (c *control) kubeconfig(user string, port int, groups ...string) (string, error) {
	p, err := c.ca.Client(user, groups...)
	if err != nil {
		return "", err
	}
	name := c.file(fmt.Sprintf("%s-%d", user, port))
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: "https://%s:%d", certificate-authority: ca.crt}}],
users: [{name: u, user: {client-certificate: %s.crt, client-key: %[3]s.key}}], contexts: [{name: x, context: {cluster: c, user: u}}], current-context: x}`,
		c.address, port, filepath.Base(name))
	return name, errors.Join(p.Write(name+".crt", name+".key"), os.WriteFile(name, []byte(text), 0o600))
}

// start starts one of the programs under a name, in the host's namespace.
func (c *control) start(name string, args ...string) error {
	cmd := exec.Command(os.Getenv("CONTROL_PLANE"), args...)
	log, err := os.OpenFile(c.file(name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := c.host.Do(cmd.Start); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running[name] = cmd
	return nil
}

func serverName(port int) string { return fmt.Sprintf("kube-apiserver-%d", port) }

// startServer starts an API server and waits until it is ready.
func (c *control) startServer(port int) error {
	err := c.start(serverName(port), "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", fmt.Sprintf("--secure-port=%d", port),
		"--bind-address="+c.address.String(), "--advertise-address="+c.address.String(),
		"--tls-cert-file="+c.file("server.crt"), "--tls-private-key-file="+c.file("server.key"), "--client-ca-file="+c.file("ca.crt"),
		"--service-account-issuer=https://cluster.test", "--service-account-key-file="+c.file("server.key"), "--service-account-signing-key-file="+c.file("server.key"),
		"--service-cluster-ip-range=10.96.0.0/12", "--authorization-mode=RBAC", "--allow-privileged=true", "--disable-admission-plugins=ServiceAccount",
		"--enable-priority-and-fairness=false", "--endpoint-reconciler-type=none", "--cert-dir="+c.dir)
	if err != nil {
		return err
	}
	return c.ready(port)
}

// ready waits until the API server says that it is.
func (c *control) ready(port int) error {
	for give := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		r, err := c.admin.Get(fmt.Sprintf("https://%s:%d/readyz", c.address, port))
		if err == nil {
			r.Body.Close()
			if r.StatusCode == http.StatusOK {
				return nil
			}
			err = errors.New(r.Status)
		}
		if time.Now().After(give) {
			log, _ := os.ReadFile(c.file(serverName(port) + ".log"))
			return fmt.Errorf("the API server is not ready after a minute: %w\n%s", err, log[max(0, len(log)-4000):])
		}
	}
}

// kill kills a program, which gets no chance to say so.
func (c *control) kill(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.end(name)
}

func (c *control) end(name string) {
	if cmd := c.running[name]; cmd != nil {
		cmd.Process.Kill()
		cmd.Wait()
		delete(c.running, name)
	}
}

// close ends all.
func (c *control) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name := range c.running {
		c.end(name)
	}
}

// api asks an API server for something and reads the answer into a value, which may be nil.
func (c *control) api(port int, method, path string, body, into any) error {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	r, err := http.NewRequest(method, fmt.Sprintf("https://%s:%d%s", c.address, port, path), bytes.NewReader(text))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		r.Header.Set("Content-Type", "application/merge-patch+json")
	}
	answer, err := c.admin.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err = io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode > 299 {
		return errors.Join(err, fmt.Errorf("%s %s: %s: %s", method, path, answer.Status, text))
	}
	if into != nil {
		return json.Unmarshal(text, into)
	}
	return nil
}

// must asks the first API server, and must succeed.
func (c *control) must(t testing.TB, method, path string, body, into any) {
	t.Helper()
	if err := c.api(first, method, path, body, into); err != nil {
		t.Fatal(err)
	}
}

// logs gives the ends of all logs, for a test that failed.
func (c *control) logs() string {
	var b strings.Builder
	files, _ := filepath.Glob(c.file("*.log"))
	for _, f := range files {
		text, _ := os.ReadFile(f)
		fmt.Fprintf(&b, "--- %s\n%s\n", filepath.Base(f), text[max(0, len(text)-2000):])
	}
	return b.String()
}
