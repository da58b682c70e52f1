package kube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"fairlead.dev/fairlead/source"
)

// The reasons of this package's problems.
const (
	Unreachable   = "Unreachable"   // no answer
	Untrusted     = "Untrusted"     // server or client does not believe the other's certificate
	Unauthorized  = "Unauthorized"  // the credentials are not accepted
	Misconfigured = "Misconfigured" // the kubeconfig can't be read any more
	Forbidden     = "Forbidden"     // a permission is missing
	NotServed     = "NotServed"     // the server knows no such kind
	Failing       = "Failing"       // another error in answer
	Slow          = "Slow"          // the first list is not whole yet

	VersionNotRead    = "VersionNotRead"    // the server knows the kind in other versions than Fairlead
	NamespaceTooLarge = "NamespaceTooLarge" // objects of a namespace are left out
)

// trouble is why a kind of object is not followed just now.
type trouble struct {
	reason, message string
	since           time.Time // the kind was well before
	turned          time.Time // the reason was another before
}

// whole reports whether the trouble is with the server, and so with every kind.
func (t *trouble) whole() bool {
	switch t.reason {
	case Unreachable, Untrusted, Unauthorized, Misconfigured:
		return true
	}
	return false
}

// reachable reports whether the server did answer, so that asking again costs it something.
func (t *trouble) reachable() bool { return t.reason != Unreachable }

// reasonOf returns the reason of a failed request.
func reasonOf(err error) string {
	var authority x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var host x509.HostnameError
	var alert tls.AlertError
	var network net.Error
	var status apierrors.APIStatus
	switch {
	case apierrors.IsForbidden(err):
		return Forbidden
	case apierrors.IsUnauthorized(err):
		return Unauthorized
	case apierrors.IsNotFound(err), apierrors.IsMethodNotSupported(err):
		return NotServed
	case errors.As(err, &status):
		return Failing
	case errors.As(err, &authority), errors.As(err, &invalid), errors.As(err, &host), errors.As(err, &alert):
		return Untrusted
	case errors.As(err, &network), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return Unreachable
	}
	return Failing
}

// plain words an error without the request and without port numbers that differ each time.
func plain(err error) string {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		err = op.Err
	}
	return err.Error()
}

// problemOf words a failure to read a kind of object.
func problemOf(host string, r resource, reason string, err error) string {
	what := fmt.Sprintf("API server %s: ", host)
	switch reason {
	case Unreachable:
		return what + plain(err) + ": everything stays as it was seen last; it is tried again until it answers"
	case Untrusted:
		return what + plain(err) + ": everything stays as it was seen last; correct the certificate authority or the " +
			"client's certificate: the files are read again at each attempt"
	case Unauthorized:
		return what + "it does not accept the credentials: everything stays as it was seen last; renew the token or " +
			"certificate: the files are read again at each attempt"
	case Forbidden:
		return what + fmt.Sprintf("list or watch %s: %s: they stay as they were seen last; let a ClusterRole allow the "+
			"verbs list and watch on %s",
			r.GroupResource(), plain(err), r.GroupResource())
	case VersionNotRead:
		return what + fmt.Sprintf("it serves %s in versions alone that Fairlead doesn't read: they stay as they were seen "+
			"last; use a version of Fairlead that reads them", r.GroupResource())
	case NotServed:
		return what + fmt.Sprintf("it does not serve %s: %s: they stay as they were seen last",
			r.GroupVersionResource.String(), plain(err))
	}
	return what + fmt.Sprintf("list or watch %s: %s: they stay as they were seen last; it is tried again",
		r.GroupResource(), plain(err))
}

// Explain words the error of a request to an API server, without the request, and what to do about it.
func Explain(err error) string { return plain(err) + "; " + remedy(resource{}, reasonOf(err), err) }

// remedy returns what to do where a kind of object can't be read at all.
func remedy(r resource, reason string, err error) string {
	switch reason {
	case Unreachable:
		if errors.Is(err, context.DeadlineExceeded) {
			return "there was no whole answer in time: try again, or see what the server is busy with"
		}
		return "see whether it runs, and whether its address is right"
	case Untrusted:
		return "correct the certificate authority or the client's certificate"
	case Unauthorized:
		return "renew the token or certificate"
	case Forbidden:
		return "let a ClusterRole allow the verb list on " + r.GroupResource().String()
	case NotServed:
		return "see whether the address is that of a Kubernetes API server"
	}
	return "see whether the address is that of a Kubernetes API server, and what its log has"
}

// problem is the trouble for people and programs.
func (t *trouble) problem() source.Problem {
	return source.Problem{Reason: t.reason, Message: t.message, Since: t.since, Retained: true}
}
