package kube

import (
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/metrics"
	"sigs.k8s.io/network-policy-api/apis/v1alpha2"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// Access returns where the API server is and which identity to use there.
type Access struct {
	Kubeconfig string // a file; with no Master either: as a pod's service account
	Master     string // URL of the API server, in place of the kubeconfig's
}

// Config returns the configuration as the files say now, with their content in place of their names; of a token's file
// both, since the transport reads that again every minute.
func (a Access) Config() (*rest.Config, error) {
	c, err := a.config()
	if err == nil {
		err = rest.LoadTLSFiles(c)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", a, err)
	}
	c.CAFile, c.CertFile, c.KeyFile = "", "", ""
	c.QPS = -1 // streams that wait between attempts need no other brake
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeProtobuf,
		runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	c.UserAgent = "fairlead"
	return c, nil
}

func (a Access) config() (*rest.Config, error) {
	if a == (Access{}) {
		c, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			err = errors.New("this process is not in a pod: name a kubeconfig")
		}
		return c, err
	}
	if a.Kubeconfig == "" {
		return &rest.Config{Host: a.Master}, nil
	}
	file, err := clientcmd.LoadFromFile(a.Kubeconfig)
	if err != nil {
		return nil, err
	}
	if err := clientcmd.ResolveLocalPaths(file); err != nil {
		return nil, err
	}
	o := &clientcmd.ConfigOverrides{}
	o.ClusterInfo.Server = a.Master
	return clientcmd.NewDefaultClientConfig(*file, o).ClientConfig()
}

// String names the access for people.
func (a Access) String() string {
	switch {
	case a.Kubeconfig != "":
		return "kubeconfig " + a.Kubeconfig
	case a.Master != "":
		return "API server " + a.Master
	}
	return "service account"
}

// same reports whether two configurations lead to the same server as the same client. Functions can't be compared: a
// proxy is taken for the same.
func same(a, b *rest.Config) bool {
	x, y := *a, *b
	x.Proxy, y.Proxy = nil, nil
	return reflect.DeepEqual(x, y)
}

// client speaks with the API server, as the files say that were read last.
type client struct {
	access  Access
	wrap    func(*rest.Config) // Options.Wrap
	largest int64              // bytes of an answer that is no watch
	mu      sync.Mutex
	config  *rest.Config
	groups  map[schema.GroupVersion]rest.Interface
}

func open(o Options) (*client, error) {
	c := &client{access: o.Access, wrap: o.Wrap, largest: largest}
	return c, c.renew()
}

// renew reads the access anew. On an error the client stays as it is.
func (c *client) renew() error {
	config, err := c.access.Config()
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.config != nil && same(c.config, config) {
		return nil
	}
	groups, err := connect(config, c.largest, c.wrap)
	if err != nil {
		return fmt.Errorf("%s: %w", c.access, err)
	}
	c.config, c.groups = config, groups
	return nil
}

// host is the URL of the API server.
func (c *client) host() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.config.Host
}

// request begins a request for objects of a kind.
func (c *client) request(r resource) *rest.Request {
	return c.get(r.GroupVersion()).Resource(r.Resource)
}

// get begins a request as for a group's kinds.
func (c *client) get(gv schema.GroupVersion) *rest.Request {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.groups[gv].Get()
}

var (
	known      = kinds()
	parameters = runtime.NewParameterCodec(known)
)

// kinds is the scheme of what is read, and nothing else.
func kinds() *runtime.Scheme {
	s := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(s), discoveryv1.AddToScheme(s), networkingv1.AddToScheme(s),
		cnpv1.Install(s)); err != nil {
		panic(err)
	}
	older := schema.GroupVersion(v1alpha2.GroupVersion) // the same fields: objects of it are read as the newer
	s.AddKnownTypeWithName(older.WithKind("ClusterNetworkPolicy"), &cnpv1.ClusterNetworkPolicy{})
	s.AddKnownTypeWithName(older.WithKind("ClusterNetworkPolicyList"), &cnpv1.ClusterNetworkPolicyList{})
	metav1.AddToGroupVersion(s, older)
	return s
}

// bounded ends answers that are too large, but for watches. Of those it measures how long the answer took to begin:
// client-go measures requests that end.
type bounded struct {
	http.RoundTripper
	largest int64
}

// RoundTrip implements http.RoundTripper.
func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	began := time.Now()
	a, err := b.RoundTripper.RoundTrip(r)
	if r.URL.Query().Get("watch") != "" {
		metrics.RequestLatency.Observe(r.Context(), r.Method, *r.URL, time.Since(began))
	} else if err == nil {
		a.Body = http.MaxBytesReader(nil, a.Body, b.largest)
	}
	return a, err
}

// connect makes clients that share their connections. It sends nothing yet.
func connect(config *rest.Config, largest int64, wrap func(*rest.Config)) (map[schema.GroupVersion]rest.Interface,
	error) {
	config = rest.CopyConfig(config)
	if wrap != nil {
		wrap(config)
	}
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return bounded{rt, largest} })
	web, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	groups := map[schema.GroupVersion]rest.Interface{}
	for gv, path := range map[schema.GroupVersion]string{corev1.SchemeGroupVersion: "/api",
		discoveryv1.SchemeGroupVersion: "/apis", networkingv1.SchemeGroupVersion: "/apis",
		schema.GroupVersion(cnpv1.GroupVersion): "/apis", schema.GroupVersion(v1alpha2.GroupVersion): "/apis"} {
		c := rest.CopyConfig(config)
		if gv.Group == cnpv1.GroupName { // custom resources have no protobuf form
			c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
		}
		c.GroupVersion, c.APIPath = &gv, path
		c.NegotiatedSerializer = serializer.NewCodecFactory(known).WithoutConversion()
		if groups[gv], err = rest.RESTClientForConfigAndClient(c, web); err != nil {
			return nil, err
		}
	}
	return groups, nil
}
