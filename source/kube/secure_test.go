package kube_test

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/pki"
	"fairlead.dev/fairlead/source/kube"
)

// authority makes certificates for the world's address.
type authority struct {
	*pki.Authority
	t *testing.T
}

func newAuthority(t *testing.T) authority {
	a, err := pki.New()
	check(t, err)
	return authority{a, t}
}

// server makes a certificate for 127.0.0.1.
func (a authority) server(valid time.Duration) tls.Certificate {
	p, err := a.Server(valid, netip.MustParseAddr("127.0.0.1"))
	check(a.t, err)
	return p.TLS()
}

// client writes a client's certificate and key to two files.
func (a authority) client(crt, key string) {
	p, err := a.Client("fairlead")
	check(a.t, err, p.Write(crt, key))
}

// secure has the world speak TLS with a certificate, and want one of the clients' authority, if there is one. It
// refuses others as an API server does: with an answer.
func (w *fixture) secure(c tls.Certificate, clients *pki.Authority) {
	config := &tls.Config{Certificates: []tls.Certificate{c}, NextProtos: []string{"h2", "http/1.1"}}
	if clients != nil {
		config.ClientAuth = tls.RequestClientCert
		pool := x509.NewCertPool()
		pool.AddCert(clients.Cert)
		w.ill(func(rw http.ResponseWriter, r *http.Request) bool {
			if l := r.TLS.PeerCertificates; len(l) > 0 {
				if _, err := l[0].Verify(x509.VerifyOptions{Roots: pool,
					KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err == nil {
					return false
				}
			}
			unauthorized(rw)
			return true
		})
	}
	w.tls = func(s *http.Server, l net.Listener) error {
		s.TLSConfig, s.ErrorLog = config, log.New(io.Discard, "", 0)
		return s.ServeTLS(l, "", "")
	}
}

func unauthorized(rw http.ResponseWriter) {
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(http.StatusUnauthorized)
	fmt.Fprint(rw,
		`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Unauthorized","code":401,"message":"Unauthorized"}`)
}

// kubeconfigFor writes a kubeconfig that names the files ca.crt, client.crt and client.key, or token, in dir.
func (w *fixture) kubeconfigFor(dir, user string) {
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: "https://%s", certificate-authority: %s/ca.crt}}],
users: [{name: u, user: %s}], contexts: [{name: x, context: {cluster: c, user: u}}], current-context: x}`, w.address, dir, user)
	check(w.t, os.WriteFile(w.kubeconfig, []byte(text), 0o600))
}

// Certificates of server, client and authorities change under the running source, after failures too.
func TestCertificatesRotate(t *testing.T) {
	w, dir := newFixture(t), t.TempDir()
	ca, crt, key := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "client.crt"), filepath.Join(dir, "client.key")
	one, two := newAuthority(t), newAuthority(t)
	check(t, os.WriteFile(ca, one.PEM(), 0o600))
	one.client(crt, key)
	w.kubeconfigFor(dir, fmt.Sprintf("{client-certificate: %s, client-key: %s}", crt, key))
	s := apiserver.New(service("web", 80), node("a"))
	w.secure(one.server(time.Hour), one.Authority)
	w.serve(s)
	w.follow(kube.Options{})
	w.holds("a", "web:80")

	w.secure(two.server(time.Hour), one.Authority) // the server's authority is another
	s.Apply(put(service("web", 81)))
	w.serve(s)
	w.reason(kube.Untrusted, "certificate signed by unknown authority")
	check(t, os.WriteFile(ca, two.PEM(), 0o600))
	w.holds("a", "web:81")
	w.reason("")

	w.secure(two.server(time.Hour), two.Authority) // now the clients' too
	s.Apply(put(service("web", 82)))
	w.serve(s)
	w.reason(kube.Unauthorized, "credentials")
	two.client(crt, key)
	w.holds("a", "web:82")
	w.reason("")

	w.secure(two.server(-time.Minute), two.Authority)
	w.serve(s)
	w.reason(kube.Untrusted, "expired")
	check(t, os.WriteFile(w.kubeconfig, []byte("{"), 0o600)) // and now the kubeconfig is broken
	w.reason(kube.Misconfigured, w.kubeconfig, "expired")
	w.kubeconfigFor(dir, fmt.Sprintf("{client-certificate: %s, client-key: %s}", crt, key))
	w.secure(two.server(time.Hour), two.Authority)
	s.Apply(put(service("web", 83)))
	w.serve(s)
	w.holds("a", "web:83")
	w.reason("")
}

// A token that has expired is read again from its file.
func TestTokenRotates(t *testing.T) {
	w, dir := newFixture(t), t.TempDir()
	a := newAuthority(t)
	token := filepath.Join(dir, "token")
	check(t, os.WriteFile(filepath.Join(dir, "ca.crt"), a.PEM(), 0o600), os.WriteFile(token, []byte("old"), 0o600))
	w.kubeconfigFor(dir, fmt.Sprintf("{tokenFile: %s}", token))
	valid := "old"
	w.ill(func(rw http.ResponseWriter, r *http.Request) bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		if r.Header.Get("Authorization") == "Bearer "+valid {
			return false
		}
		unauthorized(rw)
		return true
	})
	s := apiserver.New(service("web", 80), node("a"))
	w.secure(a.server(time.Hour), nil)
	w.serve(s)
	w.follow(kube.Options{})
	w.holds("a", "web:80")
	w.stop()
	w.reason(kube.Unreachable)
	w.mu.Lock()
	valid = "new"
	w.mu.Unlock()
	s.Apply(put(service("web", 81)))
	w.serve(s)
	w.reason(kube.Unauthorized, "credentials")
	check(t, os.WriteFile(token, []byte("new"), 0o600))
	w.holds("a", "web:81")
	w.reason("")
}

// The kubeconfig may name another server.
func TestServerMoves(t *testing.T) {
	one, two := newFixture(t), newFixture(t)
	s := apiserver.New(service("web", 80), node("a"))
	one.serve(s)
	one.follow(kube.Options{})
	one.holds("a", "web:80")
	two.serve(s)
	s.Apply(put(service("web", 81)))
	check(t, os.WriteFile(one.kubeconfig, apiserver.Kubeconfig("http://"+two.address), 0o600))
	one.stop()
	one.holds("a", "web:81")
	one.reason("")
}
