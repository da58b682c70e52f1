package health

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/httpserver"
	"fairlead.dev/fairlead/model"
)

// onLoopback opens servers on loopback, on whatever port is free, and tells where.
func onLoopback(at map[uint16]string) func(Key) (net.Listener, error) {
	return func(k Key) (net.Listener, error) {
		port := k.Port
		if port == 1 {
			return nil, fmt.Errorf("port %d is taken", port)
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err == nil {
			at[port] = "http://" + l.Addr().String()
		}
		return l, err
	}
}

func request(t *testing.T, url string) (int, string, http.Header) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body)
	return r.StatusCode, string(b), r.Header
}

func render(p *Plane, hs ...*model.HealthCheck) (facts []Fact) {
	for _, h := range hs {
		facts = append(facts, p.Render(h)...)
	}
	return facts
}

func TestServersRespondAsConfigured(t *testing.T) {
	at := map[uint16]string{}
	p := New(onLoopback(at), nil)
	defer p.Close()
	two := render(p, &model.HealthCheck{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "web"},
		Port: 30999, Local: 2})
	none := render(p, &model.HealthCheck{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "web"},
		Port: 30999})
	if err := p.Write(t.Context(), two, nil); err != nil {
		t.Fatal(err)
	}
	code, body, header := request(t, at[30999])
	var said struct {
		Service             struct{ Namespace, Name string }
		LocalEndpoints      int
		ServiceProxyHealthy bool
	}
	if err := json.Unmarshal([]byte(body), &said); err != nil || code != 200 || said.Service.Namespace != "shop" ||
		said.Service.Name != "web" ||
		said.LocalEndpoints != 2 || !said.ServiceProxyHealthy || header.Get("X-Load-Balancing-Endpoint-Weight") != "2" {
		t.Errorf("with backends: %d %s %v", code, body, err)
	}
	if err := p.Write(t.Context(), none, two); err != nil {
		t.Fatal(err)
	}
	if code, body, _ := request(t, at[30999]); code != 503 || !strings.Contains(body, `"localEndpoints":0`) {
		t.Errorf("without backends: %d %s", code, body)
	}
	if held, _ := p.Read(t.Context()); len(held) != 1 || !held[0].Equal(none[0]) {
		t.Errorf("read: %v, want %v", held, none)
	}
	if err := p.Write(t.Context(), nil, none); err != nil {
		t.Fatal(err)
	}
	if _, err := http.Get(at[30999]); err == nil {
		t.Error("the server still answers after its fact went")
	}
}

// A server is bound to the addresses that it is given, and to no other, also where it was bound to all before.
func TestServersAreBoundToTheirAddresses(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(free.Addr().(*net.TCPAddr).Port)
	free.Close()
	p := New(nil, nil)
	defer p.Close()
	h := &model.HealthCheck{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "web"}, Port: port,
		Local: 1}
	all := render(p, h)
	if err := p.Write(t.Context(), all, nil); err != nil {
		t.Fatal(err)
	}
	h.Addresses = []netip.Addr{netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("127.0.0.3")}
	if err := p.Write(t.Context(), render(p, h), all); err != nil {
		t.Fatal(err)
	}
	for host, open := range map[string]bool{"127.0.0.1": false, "127.0.0.2": true, "127.0.0.3": true} {
		c, err := net.Dial("tcp", net.JoinHostPort(host, strconv.Itoa(int(port))))
		if (err == nil) != open {
			t.Errorf("%s: %v, want open %t", host, err, open)
		}
		if err == nil {
			c.Close()
		}
	}
	h.Addresses = []netip.Addr{}
	if n := len(render(p, h)); n != 0 {
		t.Errorf("%d servers at no address", n)
	}
}

func TestOnePortInUseDoesNotBlockOthers(t *testing.T) {
	at := map[uint16]string{}
	p := New(onLoopback(at), nil)
	defer p.Close()
	err := p.Write(t.Context(),
		render(p, &model.HealthCheck{Owner: model.Owner{Kind: model.KindService, Namespace: "a", Name: "a"}, Port: 1},
			&model.HealthCheck{Owner: model.Owner{Kind: model.KindService, Namespace: "b", Name: "b"}, Port: 2, Local: 1}), nil)
	if err == nil || !strings.Contains(err.Error(), "healthCheckNodePort :1 of Service a/a") {
		t.Errorf("error is %v, want it to name port and Service", err)
	}
	if code, _, _ := request(t, at[2]); code != 200 {
		t.Errorf("the other server answers %d", code)
	}
	if held, _ := p.Read(t.Context()); len(held) != 1 {
		t.Errorf("held: %v, want the one that listens", held)
	}
}

// A load balancer is answered while others hold more connections than a server does.
func TestRespondsWhileConnectionsAreOpen(t *testing.T) {
	at := map[uint16]string{}
	p := New(onLoopback(at), nil)
	defer p.Close()
	if err := p.Write(t.Context(), render(p, &model.HealthCheck{
		Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "web"}, Port: 30999, Local: 2}),
		nil); err != nil {
		t.Fatal(err)
	}
	var first net.Conn
	for range httpserver.MaxConnections + 1 {
		c, err := net.Dial("tcp", strings.TrimPrefix(at[30999], "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if first == nil {
			first = c
		}
	}
	if code, _, _ := request(t, at[30999]); code != http.StatusOK {
		t.Errorf("the answer is %d", code)
	}
	// more than it takes to close a connection, less than one without a request may last
	first.SetReadDeadline(time.Now().Add(3 * time.Second))
	if _, err := io.Copy(io.Discard, first); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the oldest connection is held: %v", err)
	}
}
