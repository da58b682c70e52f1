package nodes

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// api is a cluster's API server.
type api struct {
	name, kubeconfig string
	printed          string // by cluster up
	at               string
	client           *http.Client
}

// dial returns the API server of a cluster.
func dial(t *testing.T, name string) api {
	t.Helper()
	kubeconfig := filepath.Join("/var/lib/fairlead/clusters", name, "kubeconfig")
	text, err := os.ReadFile(kubeconfig)
	check(t, err)
	var k struct {
		Clusters []struct {
			Cluster struct {
				Server    string `json:"server"`
				Authority []byte `json:"certificate-authority-data"`
			} `json:"cluster"`
		} `json:"clusters"`
		Users []struct {
			User struct {
				Certificate []byte `json:"client-certificate-data"`
				Key         []byte `json:"client-key-data"`
			} `json:"user"`
		} `json:"users"`
	}
	check(t, yaml.Unmarshal(text, &k))
	pair, err := tls.X509KeyPair(k.Users[0].User.Certificate, k.Users[0].User.Key)
	check(t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(k.Clusters[0].Cluster.Authority)
	return api{name, kubeconfig, "", k.Clusters[0].Cluster.Server, &http.Client{Timeout: 10 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}}}}}
}

// call sends an object, given as YAML, and returns the response.
func (a api) call(ctx context.Context, method, path, object string) ([]byte, error) {
	body, err := yaml.YAMLToJSON([]byte(object))
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, method, a.at+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	response, err := a.client.Do(r)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, response.Status, text)
	}
	return text, err
}

// must is call, which must succeed.
func (a api) must(t *testing.T, method, path, object string) {
	t.Helper()
	_, err := a.call(t.Context(), method, path, object)
	check(t, err)
}

// pod is what the test reads of a Pod.
type pod struct {
	Metadata struct{ Name string }
	Spec     struct{ NodeName string }
	Status   struct {
		HostIP     string
		Conditions []struct{ Type, Status string }
	}
}

func (p pod) ready() bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True"
		}
	}
	return false
}

// pods returns those with a label app.
func (a api) pods(ctx context.Context, app string) ([]pod, error) {
	return a.labelled(ctx, "default", "app%3D"+app)
}

// labelled returns the pods of a namespace with a label.
func (a api) labelled(ctx context.Context, namespace, selector string) ([]pod, error) {
	text, err := a.call(ctx, "GET", "/api/v1/namespaces/"+namespace+"/pods?labelSelector="+selector, "")
	var list struct{ Items []pod }
	if err == nil {
		err = json.Unmarshal(text, &list)
	}
	return list.Items, err
}
