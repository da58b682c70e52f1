package controlplane

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"fairlead.dev/fairlead/kernel/child"
	"fairlead.dev/fairlead/sandbox/pki"
)

// Host is where a control plane runs: Do runs a function inside its network namespace.
type Host interface{ Do(func() error) error }

// Options say what to run where.
type Options struct {
	Program string // its first argument says which of the three it is
	Host    Host
	Address netip.Addr     // one of the host's, at which API servers listen
	Dir     string         // absolute path of a folder that exists: data, certificates, kubeconfigs, logs
	Node    string         // kube-controller-manager and kube-scheduler by its first argument, for StartManager
	Pods    []netip.Prefix // ranges from which StartManager assigns podCIDRs; none: it assigns none
	Fair    bool           // with priority and fairness, as API servers are by default
}

// Plane is a control plane.
type Plane struct {
	Options
	CA    *pki.Authority
	admin *http.Client

	mu      sync.Mutex
	running map[string]*child.Process
}

// Ports of API servers on the same etcd.
const (
	First  = 6443
	Second = 6444
)

// Start starts etcd and the first API server, and waits until it is ready. Close ends what runs, also after an error.
func Start(ctx context.Context, o Options) (*Plane, error) {
	p := &Plane{Options: o, running: map[string]*child.Process{}}
	err := p.certify()
	if err == nil {
		err = p.start("etcd", "etcd", "--data-dir="+p.File("etcd"), "--unsafe-no-fsync", "--log-level=error",
			"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
			"--listen-peer-urls=http://127.0.0.1:2380",
			"--initial-advertise-peer-urls=http://127.0.0.1:2380", "--initial-cluster=default=http://127.0.0.1:2380",
			"--quota-backend-bytes=4294967296")
	}
	if err == nil {
		err = p.StartServer(ctx, First)
	}
	return p, err
}

// StartControllers starts the controller that makes EndpointSlices of Services and Pods.
func (p *Plane) StartControllers() error {
	kubeconfig, err := p.Kubeconfig("controllers", First, "system:masters")
	if err != nil {
		return err
	}
	return p.start("endpointslice-controller", "endpointslice-controller", "--kubeconfig="+kubeconfig)
}

// StartManager starts kube-controller-manager, which assigns podCIDRs to Nodes, and kube-scheduler. It needs
// Options.Node, with which API servers also demand service accounts of Pods, limit kubelets to their Nodes and publish
// themselves as endpoints of default/kubernetes.
func (p *Plane) StartManager() error {
	kubeconfig, err := p.Kubeconfig("manager", First, "system:masters")
	if err != nil {
		return err
	}
	args := []string{"kube-controller-manager", "--kubeconfig=" + kubeconfig, "--leader-elect=false",
		"--bind-address=127.0.0.1", "--cert-dir=" + p.Dir, "--service-cluster-ip-range=" + services,
		"--root-ca-file=" + p.File("ca.crt"), "--service-account-private-key-file=" + p.File("server.key")}
	if len(p.Pods) > 0 {
		var ranges []string
		for _, r := range p.Pods {
			ranges = append(ranges, r.String())
		}
		args = append(args, "--allocate-node-cidrs", "--cluster-cidr="+strings.Join(ranges, ","))
	}
	return errors.Join(p.startProgram("kube-controller-manager", p.Node, args...),
		p.startProgram("kube-scheduler", p.Node, "kube-scheduler", "--kubeconfig="+kubeconfig, "--leader-elect=false",
			"--bind-address=127.0.0.1", "--cert-dir="+p.Dir))
}

// services is the range of ClusterIPs, kubernetes the first of them, which is that of Service default/kubernetes.
const services, kubernetes = "10.96.0.0/12", "10.96.0.1"

// ServerName names the process of an API server, for Kill.
func ServerName(port int) string { return fmt.Sprintf("kube-apiserver-%d", port) }

// StartServer starts an API server and waits until it is ready.
func (p *Plane) StartServer(ctx context.Context, port int) error {
	admission, authorization, endpoints := "--disable-admission-plugins=ServiceAccount", "RBAC", "none"
	if p.Node != "" {
		admission, authorization, endpoints = "--enable-admission-plugins=NodeRestriction", "Node,RBAC", "lease"
	}
	err := p.start(ServerName(port), "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379",
		fmt.Sprintf("--secure-port=%d", port),
		"--bind-address="+p.Address.String(), "--advertise-address="+p.Address.String(),
		"--tls-cert-file="+p.File("server.crt"), "--tls-private-key-file="+p.File("server.key"),
		"--client-ca-file="+p.File("ca.crt"),
		"--service-account-issuer=https://cluster.test", "--service-account-key-file="+p.File("server.key"),
		"--service-account-signing-key-file="+p.File("server.key"),
		"--service-cluster-ip-range="+services, "--authorization-mode="+authorization, "--allow-privileged=true",
		admission, "--kubelet-preferred-address-types=InternalIP",
		"--kubelet-client-certificate="+p.File("kubelet-client.crt"),
		"--kubelet-client-key="+p.File("kubelet-client.key"),
		fmt.Sprintf("--enable-priority-and-fairness=%t", p.Fair), "--endpoint-reconciler-type="+endpoints,
		"--cert-dir="+p.Dir)
	if err != nil {
		return err
	}
	return p.ready(ctx, port)
}

// ready waits until an API server says that it is, and has made the Service default/kubernetes, which it does after: a
// cluster that is older than its nodes has it.
func (p *Plane) ready(ctx context.Context, port int) error {
	ctx, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	for {
		_, err := p.request(ctx, port, http.MethodGet, "/readyz", nil)
		if err == nil {
			_, err = p.request(ctx, port, http.MethodGet, "/api/v1/namespaces/default/services/kubernetes", nil)
		}
		if err == nil {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-p.ended(ServerName(port)):
			return fmt.Errorf("the API server ended by itself:\n%s", p.Logs())
		case <-ctx.Done():
			return fmt.Errorf("the API server is not ready: %w: %w\n%s", ctx.Err(), err, p.Logs())
		}
	}
}

// File is the path of a file of the control plane's.
func (p *Plane) File(name string) string { return filepath.Join(p.Dir, name) }

// certify makes the authority, the server's certificate, the key of service accounts and the administrator.
func (p *Plane) certify() (err error) {
	if p.CA, err = pki.New(); err != nil {
		return err
	}
	server, err := p.CA.Server(24*time.Hour, p.Address, netip.MustParseAddr("127.0.0.1"),
		netip.MustParseAddr(kubernetes))
	if err != nil {
		return err
	}
	admin, err := p.CA.Client("admin", "system:masters")
	if err != nil {
		return err
	}
	kubelets, err := p.CA.Client("kube-apiserver", "system:masters")
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AddCert(p.CA.Cert)
	p.admin = &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: p.dial, TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{admin.TLS()}},
		ForceAttemptHTTP2: true}}
	return errors.Join(server.Write(p.File("server.crt"), p.File("server.key")),
		kubelets.Write(p.File("kubelet-client.crt"), p.File("kubelet-client.key")),
		os.WriteFile(p.File("ca.crt"), p.CA.PEM(), 0o644))
}

// dial connects from the control plane's own host.
func (p *Plane) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	var d net.Dialer
	err = p.Host.Do(func() error {
		conn, err = d.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Kubeconfig writes one for a user of groups, and returns its path.
func (p *Plane) Kubeconfig(user string, port int, groups ...string) (string, error) {
	text, err := p.KubeconfigAt(netip.AddrPortFrom(p.Address, uint16(port)), user, groups...)
	if err != nil {
		return "", err
	}
	name := p.File(fmt.Sprintf("%s-%d", user, port))
	return name, os.WriteFile(name, text, 0o600)
}

// KubeconfigAt returns the text of one for a user of groups who reaches an API server at that address. It refers to no
// other file.
func (p *Plane) KubeconfigAt(server netip.AddrPort, user string, groups ...string) ([]byte, error) {
	c, err := p.CA.Client(user, groups...)
	if err != nil {
		return nil, err
	}
	key, err := c.KeyPEM()
	if err != nil {
		return nil, err
	}
	in64 := base64.StdEncoding.EncodeToString
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: fairlead, cluster: {server: "https://%s", certificate-authority-data: %s}}]
users: [{name: %q, user: {client-certificate-data: %s, client-key-data: %s}}]
contexts: [{name: fairlead, context: {cluster: fairlead, user: %[3]q}}]
current-context: fairlead
`, server, in64(p.CA.PEM()), user, in64(c.PEM()), in64(key)), nil
}

// Call queries an API server for something, as its administrator, and reads the answer into a value, which may be nil.
// A body is sent as JSON, one of a PATCH as a merge patch (RFC 7386). An answer that is no success is an error.
func (p *Plane) Call(ctx context.Context, port int, method, path string, body, into any) error {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	response, err := p.request(ctx, port, method, path, text)
	if err != nil || into == nil {
		return err
	}
	return json.Unmarshal(response, into)
}

func (p *Plane) request(ctx context.Context, port int, method, path string, body []byte) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, fmt.Sprintf("https://%s:%d%s", p.Address, port, path),
		bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		r.Header.Set("Content-Type", "application/merge-patch+json")
	}
	response, err := p.admin.Do(r)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode > 299 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, response.Status, text)
	}
	return text, err
}

// Logs returns the ends of all logs, for those who look for the reason of a failure.
func (p *Plane) Logs() string {
	var b strings.Builder
	files, _ := filepath.Glob(p.File("*.log"))
	for _, f := range files {
		text, _ := os.ReadFile(f)
		fmt.Fprintf(&b, "--- %s\n%s\n", filepath.Base(f), text[max(0, len(text)-2000):])
	}
	return b.String()
}
