package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"fairlead.dev/fairlead/source/kube"
)

// API is what the measurement needs of a Kubernetes API server: pods, their logs and Services of one namespace.
type API struct {
	web       *http.Client
	base      string // URL without a path
	Namespace string
}

// Open returns the API that a configuration leads to.
func Open(c *rest.Config, namespace string) (*API, error) {
	web, err := rest.HTTPClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("open the Kubernetes API: %w", err)
	}
	u, _, err := rest.DefaultServerUrlFor(c)
	if err != nil {
		return nil, fmt.Errorf("open the Kubernetes API: %w", err)
	}
	return &API{web: web, base: strings.TrimSuffix(u.String(), "/"), Namespace: namespace}, nil
}

// errNotFound is why an object can't be read or deleted.
var errNotFound = errors.New("not found")

// mostBytes limits an answer, and answerTime how long one may take.
const (
	mostBytes  = 16 << 20
	answerTime = 30 * time.Second
)

// do sends a request and returns the answer. path is below the namespace, such as "pods/a".
func (a *API) do(ctx context.Context, method, path string, body any) ([]byte, error) {
	var in io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		in = bytes.NewReader(b)
	}
	ctx, stop := context.WithTimeout(ctx, answerTime)
	defer stop()
	to := a.base + "/api/v1/namespaces/" + url.PathEscape(a.Namespace) + "/" + path
	r, err := http.NewRequestWithContext(ctx, method, to, in)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Accept", "application/json, */*")
	answer, err := a.web.Do(r)
	if err != nil {
		return nil, a.failed(method, path, err)
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(io.LimitReader(answer.Body, mostBytes))
	if err != nil {
		return nil, a.failed(method, path, err)
	}
	return b, a.refused(method, path, answer.StatusCode, b)
}

// operation returns "list pods", "delete services/a".
func operation(method, path string) string {
	verb := map[string]string{http.MethodPost: "create", http.MethodDelete: "delete", http.MethodGet: "get"}[method]
	path, _, _ = strings.Cut(path, "?")
	if method == http.MethodGet && !strings.Contains(path, "/") {
		verb = "list"
	}
	return verb + " " + path
}

// failed returns the error of a request that got no whole answer.
func (a *API) failed(method, path string, err error) error {
	return fmt.Errorf("%s in namespace %s: the Kubernetes API at %s: %s", operation(method, path), a.Namespace, a.base,
		kube.Explain(err))
}

// refused returns the error that an answer is, nil for none.
func (a *API) refused(method, path string, code int, body []byte) error {
	if code < 300 {
		return nil
	}
	var s struct{ Message string }
	if json.Unmarshal(body, &s) != nil || s.Message == "" {
		s.Message = http.StatusText(code)
	}
	err := fmt.Errorf("%s in namespace %s: %s", operation(method, path), a.Namespace, s.Message)
	switch {
	case code == http.StatusForbidden:
		return fmt.Errorf("%w; what the run needs is printed by fairlead lab run cluster --print-rbac with the same "+
			"--namespace and --placements", err)
	case code == http.StatusUnauthorized:
		return fmt.Errorf("%w; renew the token or certificate in the kubeconfig", err)
	case code == http.StatusNotFound && method == http.MethodPost:
		return fmt.Errorf("%w; make the namespace: fairlead lab run cluster --print-rbac | kubectl apply -f -", err)
	case code == http.StatusNotFound:
		return errors.Join(err, errNotFound)
	}
	return err
}

// create makes an object of a resource and reads into out what the server made of it, unless that is nil.
func (a *API) create(ctx context.Context, resource string, o, out any) error {
	b, err := a.do(ctx, http.MethodPost, resource, o)
	if err == nil && out != nil {
		err = a.decode(http.MethodPost, resource, b, out)
	}
	return err
}

// decode reads an answer.
func (a *API) decode(method, path string, b []byte, out any) error {
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("%s in namespace %s: %s answers %.40q: see whether it is a Kubernetes API server",
			operation(method, path), a.Namespace, a.base, b)
	}
	return nil
}

// get reads an object, or a list of those with a label.
func (a *API) get(ctx context.Context, path string, out any) error {
	b, err := a.do(ctx, http.MethodGet, path, nil)
	if err == nil {
		err = a.decode(http.MethodGet, path, b, out)
	}
	return err
}

// remove deletes an object that may be gone already.
func (a *API) remove(ctx context.Context, path string) error {
	if _, err := a.do(ctx, http.MethodDelete, path, nil); err != nil && !errors.Is(err, errNotFound) {
		return err
	}
	return nil
}
