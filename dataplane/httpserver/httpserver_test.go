package httpserver

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// serve serves h on loopback and returns where.
func serve(t *testing.T, s *http.Server) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go s.Serve(l)
	t.Cleanup(func() { s.Close() })
	return l.Addr().String()
}

func ok(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") }

// probe queries as a kubelet does: by a connection of its own.
func probe(t *testing.T, address string) {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Second} // a kubelet's default
	r, err := c.Get("http://" + address + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if b, err := io.ReadAll(r.Body); err != nil || string(b) != "ok" {
		t.Fatalf("a probe has %q, %v", b, err)
	}
}

// ends reports whether the server closes a connection.
func ends(c net.Conn) bool {
	// more than it takes to close one, less than one without a request may last
	c.SetReadDeadline(time.Now().Add(3 * time.Second))
	_, err := io.Copy(io.Discard, c)
	return !errors.Is(err, os.ErrDeadlineExceeded)
}

func TestProbeSucceedsWhileManyConnectionsAreOpen(t *testing.T) {
	for _, c := range []struct {
		name, sent string
		many       int
	}{
		{"idle after an answer", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", 5000},
		{"nothing sent", "", 1000},
		{"half a request", "GET / HTTP/1.1\r\n", 1000},
	} {
		t.Run(c.name, func(t *testing.T) {
			address := serve(t, New(http.HandlerFunc(ok)))
			var held []net.Conn
			for i := range c.many {
				conn, err := net.Dial("tcp", address)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				held = append(held, conn)
				if io.WriteString(conn, c.sent); c.name == "idle after an answer" {
					if _, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil {
						t.Fatalf("connection %d: %v", i, err)
					}
				}
				if i%500 == 499 {
					probe(t, address)
				}
			}
			var n atomic.Int32
			var read sync.WaitGroup
			for _, conn := range held {
				read.Go(func() {
					if !ends(conn) {
						n.Add(1)
					}
				})
			}
			if read.Wait(); n.Load() > MaxConnections {
				t.Errorf("%d of %d connections are held", n.Load(), c.many)
			}
			probe(t, address)
		})
	}
}

func TestConnectionInUseOutlivesIdleOnes(t *testing.T) {
	s := New(http.HandlerFunc(ok))
	follow, accepted := s.ConnState, make(chan struct{}, MaxConnections)
	s.ConnState = func(c net.Conn, state http.ConnState) {
		if follow(c, state); state == http.StateNew {
			accepted <- struct{}{}
		}
	}
	address := serve(t, s)
	dial := func() net.Conn {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		<-accepted // else one burst of the backlog later pushes out the connection in use
		return c
	}
	used := dial()
	responses := bufio.NewReader(used)
	for range 10 {
		for range MaxConnections / 4 {
			dial()
		}
		fmt.Fprint(used, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		if _, err := http.ReadResponse(responses, nil); err != nil {
			t.Fatal(err)
		}
		io.CopyN(io.Discard, responses, 2)
	}
}

func TestSlowReaderIsCutOff(t *testing.T) {
	s := New(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for b := make([]byte, 1<<20); ; {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	}))
	if s.IdleTimeout != 30*time.Second || s.WriteTimeout != 10*time.Second || s.ReadTimeout != 10*time.Second ||
		s.ReadHeaderTimeout != 5*time.Second {
		t.Errorf("timeouts: idle %v, write %v, read %v, header %v", s.IdleTimeout, s.WriteTimeout, s.ReadTimeout,
			s.ReadHeaderTimeout)
	}
	s.WriteTimeout = 100 * time.Millisecond
	ended := make(chan struct{})
	h := s.Handler
	s.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { h.ServeHTTP(w, r); close(ended) })
	c, err := net.Dial("tcp", serve(t, s))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("a client that reads nothing holds its handler")
	}
}

// A profile takes longer than an answer may.
func TestProfileOutlastsTheWriteTimeout(t *testing.T) {
	for path, h := range map[string]http.HandlerFunc{"/debug/pprof/profile": pprof.Profile,
		"/debug/pprof/trace": pprof.Trace} {
		s := New(h)
		s.WriteTimeout = 300 * time.Millisecond
		r, err := http.Get("http://" + serve(t, s) + path + "?seconds=1")
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil || r.StatusCode != http.StatusOK || len(b) == 0 {
			t.Errorf("%s: %d, %d bytes, %v", path, r.StatusCode, len(b), err)
		}
	}
}
