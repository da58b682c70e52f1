package lab

import (
	"bufio"
	"bytes"
	"context"
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
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/child"
	"fairlead.dev/fairlead/lab/load"
)

// web is an nginx that answers in a pair's far end, in place of the lab's own server.
type web struct {
	*process
	words *load.Words
}

// findNginx gives the program and its version, both empty where there is none.
func findNginx() (path, version string) {
	for _, name := range []string{"nginx", "/usr/sbin/nginx"} {
		p, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		out, err := exec.Command(p, "-v").CombinedOutput()
		if _, v, ok := strings.Cut(string(out), "nginx version: "); ok && err == nil {
			return p, strings.TrimSpace(v)
		}
	}
	return "", ""
}

// page is the body of its answers, in bytes: with the header as long as the lab's own server's answer, or nearly.
const page = 612 // nginx's own welcome page has as many

// nginxConfig is one process with one thread that serves one small file. What the article had by default is said: a connection
// carries 100 requests.
const nginxConfig = `daemon off;
master_process off;
pid %[1]s/pid;
error_log %[1]s/error.log;
events { worker_connections 4096; }
http {
	access_log off;
	sendfile on;
	keepalive_requests %[2]d;
	client_body_temp_path %[1]s/t1;
	proxy_temp_path %[1]s/t2;
	fastcgi_temp_path %[1]s/t3;
	uwsgi_temp_path %[1]s/t4;
	scgi_temp_path %[1]s/t5;
	server {
		listen %[3]d backlog=65535;
		root %[1]s/www;
	}
}
`

// serveWeb starts nginx in a pair's far end, on the load's processor.
func (r *run) serveWeb(ctx context.Context, p *pair, nginx string, each int) error {
	dir := filepath.Join(r.tmp, "nginx-"+p.far.Name)
	if err := os.MkdirAll(filepath.Join(dir, "www"), 0o755); err != nil {
		return fmt.Errorf("start nginx: %w", err)
	}
	err := errors.Join(os.Chmod(r.tmp, 0o755), // nginx may read as another user
		os.WriteFile(filepath.Join(dir, "nginx.conf"), fmt.Appendf(nil, nginxConfig, dir, each, serverPort), 0o644),
		os.WriteFile(filepath.Join(dir, "www", "index.html"), bytes.Repeat([]byte{'x'}, page), 0o644))
	if err != nil {
		return fmt.Errorf("start nginx: %w", err)
	}
	log, err := os.Create(filepath.Join(dir, "says.log"))
	if err != nil {
		return fmt.Errorf("start nginx: %w", err)
	}
	w := &web{process: &process{name: p.far.Name, log: log, web: &http.Client{}}}
	cmd := exec.Command(nginx, "-c", filepath.Join(dir, "nginx.conf"), "-e", filepath.Join(dir, "error.log"))
	cmd.Stdout, cmd.Stderr = log, log
	if w.child, err = child.Start(cmd, p.far.Do); err != nil {
		return errors.Join(fmt.Errorf("start nginx: %w", err), log.Close())
	}
	p.servers = append(p.servers, w)
	if err := w.learn(ctx, p); err != nil {
		return fmt.Errorf("nginx in %s: %w: %s", p.far.Name, err, w.last())
	}
	p.words = w.words
	if err := pin(w.child.PID, r.cpus.load); err != nil || !r.realtime {
		return err
	}
	return unix.SchedSetAttr(w.child.PID, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0)
}

// Close ends it.
func (w *web) Close() error {
	w.end()
	return nil
}

// learn asks for the page both ways, as soon as somebody answers, to know how long the answers are.
func (w *web) learn(ctx context.Context, p *pair) error {
	const ask = "GET / HTTP/1.1\r\nHost: service\r\n"
	w.words = &load.Words{Keep: []byte(ask + "\r\n"), Bye: []byte(ask + "Connection: close\r\n\r\n")}
	for end := time.Now().Add(within(patience)); ; {
		kept, err := answerLength(p, w.words.Keep)
		if err == nil {
			byed, err := answerLength(p, w.words.Bye)
			w.words.Kept, w.words.Byed = kept, byed
			return err
		}
		select {
		case <-w.child.Ended():
			return fmt.Errorf("it ended by itself: %v", w.child.Err())
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Millisecond):
		}
		if time.Now().After(end) {
			return err
		}
	}
}

// answerLength asks in the far end and gives the bytes of the answer, header and all.
func answerLength(p *pair, request []byte) (n int, err error) {
	err = p.far.Do(func() error {
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(serverAddr(0), serverPort).String(), time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		if _, err := c.Write(request); err != nil {
			return err
		}
		var all bytes.Buffer
		resp, err := http.ReadResponse(bufio.NewReader(io.TeeReader(c, &all)), nil)
		if err != nil {
			return err
		}
		body, err := io.ReadAll(resp.Body)
		if err == nil && (resp.StatusCode != http.StatusOK || len(body) != page) {
			err = fmt.Errorf("it answers %s with %d bytes", resp.Status, len(body))
		}
		n = all.Len()
		return err
	})
	return n, err
}
