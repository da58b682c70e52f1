package testbed

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

// nginx is an nginx that answers in a pair's far end, instead of the lab's own server.
type nginx struct {
	process  *Process
	patience time.Duration // that its first answer may take
	words    *load.Words
}

// FindNginx returns the program's path and version, both empty where there is none.
func FindNginx() (path, version string) {
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

// NginxPage is the size of its answers' body: with the header about as long as an answer of the lab's own server.
const NginxPage = 612 // nginx's own welcome page has as many

// nginxConfig is one process with one thread that serves one small file. A connection carries as many requests as is
// said.
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

// ServeNginx starts nginx in a pair's far end, on the load's processor. A connection carries so many requests each.
func (b *Testbed) ServeNginx(ctx context.Context, p *Pair, path string, each int) error {
	dir := filepath.Join(b.Dir, "nginx-"+p.Far.Name)
	if err := os.MkdirAll(filepath.Join(dir, "www"), 0o755); err != nil {
		return fmt.Errorf("start nginx: %w", err)
	}
	err := errors.Join(os.Chmod(b.Dir, 0o755), // nginx may read as another user
		os.WriteFile(filepath.Join(dir, "nginx.conf"), fmt.Appendf(nil, nginxConfig, dir, each, ServerPort), 0o644),
		os.WriteFile(filepath.Join(dir, "www", "index.html"), bytes.Repeat([]byte{'x'}, NginxPage), 0o644))
	if err != nil {
		return fmt.Errorf("start nginx: %w", err)
	}
	log, err := os.Create(filepath.Join(dir, "says.log"))
	if err != nil {
		return fmt.Errorf("start nginx: %w", err)
	}
	w := &nginx{process: &Process{name: "nginx in " + p.Far.Name, log: log}, patience: b.Within(Patience)}
	cmd := exec.Command(path, "-c", filepath.Join(dir, "nginx.conf"), "-e", filepath.Join(dir, "error.log"))
	cmd.Stdout, cmd.Stderr = log, log
	if w.process.Child, err = child.Start(cmd, p.Far.Do); err != nil {
		return errors.Join(fmt.Errorf("start nginx: %w", err), log.Close())
	}
	p.servers = append(p.servers, w)
	if err := w.learn(ctx, p); err != nil {
		return fmt.Errorf("nginx in %s: %w: %s", p.Far.Name, err, w.process.last())
	}
	p.Words = w.words
	if err := pin(w.process.Child.PID, b.CPUs.Load); err != nil || !b.realtime {
		return err
	}
	return unix.SchedSetAttr(w.process.Child.PID, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO,
		Priority: 1}, 0)
}

// CPU is the processor time of its threads, 0 where it can't be read.
func (w *nginx) CPU() time.Duration { return w.process.CPU() }

// Close ends it.
func (w *nginx) Close() error {
	w.process.End()
	return nil
}

// learn requests the page on a kept connection and on one that ends, as soon as nginx answers, to know how long the
// answers are.
func (w *nginx) learn(ctx context.Context, p *Pair) error {
	const get = "GET / HTTP/1.1\r\nHost: service\r\n"
	w.words = &load.Words{Persist: []byte(get + "\r\n"), Bye: []byte(get + "Connection: close\r\n\r\n")}
	for end := time.Now().Add(w.patience); ; {
		persisted, err := answerLength(p, w.words.Persist)
		if err == nil {
			byed, err := answerLength(p, w.words.Bye)
			w.words.Persisted, w.words.Byed = persisted, byed
			return err
		}
		select {
		case <-w.process.Child.Ended():
			return fmt.Errorf("it ended by itself: %v", w.process.Child.Err())
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Millisecond):
		}
		if time.Now().After(end) {
			return err
		}
	}
}

// answerLength sends a request in the far end and returns the length of the answer, header included.
func answerLength(p *Pair, request []byte) (n int, err error) {
	err = p.Far.Do(func() error {
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(ServerAddr(0), ServerPort).String(), time.Second)
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
		if err == nil && (resp.StatusCode != http.StatusOK || len(body) != NginxPage) {
			err = fmt.Errorf("it answers %s with %d bytes", resp.Status, len(body))
		}
		n = all.Len()
		return err
	})
	return n, err
}
