// Package pki makes certificates for API servers and clients of tests and sandboxes: valid for hours, with keys in the
// clear. It is no part of the product's line.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"time"
)

// Pair is a certificate and its key.
type Pair struct {
	Cert *x509.Certificate
	Key  *ecdsa.PrivateKey
}

// Authority signs certificates.
type Authority struct{ Pair }

// New makes an authority that has signed itself.
func New() (*Authority, error) {
	p, err := sign(nil, &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		Subject: pkix.Name{CommonName: "authority"}})
	return &Authority{p}, err
}

// Server makes a server's certificate for addresses, valid for that long from now: less than zero has expired.
func (a *Authority) Server(valid time.Duration, addrs ...netip.Addr) (Pair, error) {
	c := &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, NotAfter: time.Now().Add(valid),
		Subject: pkix.Name{CommonName: "server"}}
	for _, ip := range addrs {
		c.IPAddresses = append(c.IPAddresses, net.IP(ip.AsSlice()))
	}
	return sign(&a.Pair, c)
}

// Client makes a client's certificate; name and groups are what Kubernetes takes for the user's.
func (a *Authority) Client(name string, groups ...string) (Pair, error) {
	return sign(&a.Pair, &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		Subject: pkix.Name{CommonName: name, Organization: groups}})
}

// sign makes a pair, signed by itself where by is nil.
func sign(by *Pair, c *x509.Certificate) (p Pair, err error) {
	if p.Key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return p, fmt.Errorf("pki: make a key: %w", err)
	}
	if c.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62)); err != nil {
		return p, fmt.Errorf("pki: draw a serial number: %w", err)
	}
	now := time.Now()
	if c.NotBefore = now.Add(-time.Hour); c.NotAfter.IsZero() {
		c.NotAfter = now.Add(24 * time.Hour)
	}
	if by == nil {
		by = &Pair{c, p.Key}
	}
	der, err := x509.CreateCertificate(rand.Reader, c, by.Cert, &p.Key.PublicKey, by.Key)
	if err == nil {
		p.Cert, err = x509.ParseCertificate(der)
	}
	if err != nil {
		return p, fmt.Errorf("pki: sign for %s: %w", c.Subject.CommonName, err)
	}
	return p, nil
}

// PEM returns the certificate as text.
func (p Pair) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.Cert.Raw})
}

// TLS returns the pair as crypto/tls has it.
func (p Pair) TLS() tls.Certificate {
	return tls.Certificate{Certificate: [][]byte{p.Cert.Raw}, PrivateKey: p.Key}
}

// KeyPEM returns the key as text.
func (p Pair) KeyPEM() ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(p.Key)
	if err != nil {
		return nil, fmt.Errorf("pki: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

// Write writes the certificate and the key as PEM. Only the owner may read the key.
func (p Pair) Write(cert, key string) error {
	text, err := p.KeyPEM()
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(key, text, 0o600), os.WriteFile(cert, p.PEM(), 0o644))
}
