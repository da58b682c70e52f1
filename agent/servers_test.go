package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"
	"unicode"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/service"
	"fairlead.dev/fairlead/dataplane/httpserver"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
)

// still is an agent without planes, and with loops that don't run: what it is told stays on its way.
func still(t *testing.T, o Options) *Agent {
	t.Helper()
	return stillWith(t, o, &service.Planes{})
}

// stillWith is still with planes.
func stillWith(t *testing.T, o Options, planes *service.Planes) *Agent {
	t.Helper()
	if o.Mode.Name == "" {
		var err error
		if o.Mode, err = mode.Of(""); err != nil {
			t.Fatal(err)
		}
	}
	o.Log, o.Resolve = slog.New(slog.DiscardHandler), resolve.Config{Node: "a"}
	a := newAgent(o, planes)
	a.batches.count = 1
	return a
}

// say reports the agent of objects.
func (a *Agent) say(ctx context.Context, objects ...source.Object) {
	var b source.Batch
	for _, o := range objects {
		b.Changes = append(b.Changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	a.consume(ctx, b)
}

func get(h http.Handler, path string) (int, string) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w.Code, w.Body.String()
}

func TestPages(t *testing.T) {
	o := Options{Why: "because", Servers: Servers{Config: map[string]any{
		"kubeproxy.config.k8s.io": map[string]string{"mode": "ipvs"}}, Flags: map[string]string{"v": "2"}}}
	h := still(t, o).handler()
	for path, want := range map[string]string{"/proxyMode": "nftables",
		"/configz": `{"kubeproxy.config.k8s.io":{"mode":"ipvs"}}`, "/flagz": "v=2", "/statusz": "/metrics",
		"/healthz": "ok", "/livez": "ok", "/status": `"why":"because"`,
		"/metrics": "kubeproxy_sync_proxy_rules_last_timestamp_seconds"} {
		if code, body := get(h, path); path != "/metrics" && (code != 200 || !strings.Contains(body, want)) {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	if code, _ := get(h, "/readyz"); code != 503 {
		t.Errorf("/readyz before the first sync: %d", code)
	}
	if code, _ := get(h, "/debug/pprof/"); code != 404 {
		t.Errorf("/debug/pprof/ without being asked for: %d", code)
	}
	o.Servers.Profiling = true
	if code, _ := get(still(t, o).handler(), "/debug/pprof/"); code != 200 {
		t.Errorf("/debug/pprof/: %d", code)
	}
}

func TestPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	log := slog.New(slog.DiscardHandler)
	if got, err := (Servers{}).listen(log, l.Addr().String(), "--x"); got != nil || err != nil {
		t.Errorf("it must be tried again: %v, %v", got, err)
	}
	if _, err := (Servers{HardFail: true}).listen(log, l.Addr().String(), "--x"); err == nil ||
		!strings.Contains(err.Error(), "--x") {
		t.Errorf("hard: %v", err)
	}
	if got, err := (Servers{HardFail: true}).listen(log, "[::1]:0", "--x"); err != nil {
		t.Errorf("IPv6: %v", err)
	} else {
		got.Close()
	}
}

// A probe is answered while others hold more connections than a server does.
func TestProbeSucceedsWhileConnectionsAreOpen(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		ended <- Servers{}.serve(ctx, slog.New(slog.DiscardHandler), l, l.Addr().String(),
			still(t, Options{}).handler())
	}()
	held := make([]net.Conn, httpserver.MaxConnections+1)
	for i := range held {
		if held[i], err = net.Dial("tcp", l.Addr().String()); err != nil {
			t.Fatal(err)
		}
		defer held[i].Close()
	}
	if r, err := http.Get("http://" + l.Addr().String() + "/livez"); err != nil || r.StatusCode != http.StatusOK {
		t.Errorf("/livez: %v, %v", r, err)
	}
	// more than it takes to close a connection, less than one without a request may last
	held[0].SetReadDeadline(time.Now().Add(3 * time.Second))
	if _, err := io.Copy(io.Discard, held[0]); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the oldest connection is held: %v", err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Text of others controls no terminal that a page is printed on.
func TestPagesEscapeForeignText(t *testing.T) {
	const evil = "C1 \u009b31m, \u202eright to left, \x7f, \x1b[2J"
	a := still(t, Options{Why: evil, Servers: Servers{Flags: map[string]string{"v": evil}}})
	a.problems = []source.Problem{{File: evil, Message: evil}}
	for _, path := range []string{"/status", "/statusz", "/flagz"} {
		_, body := get(a.handler(), path)
		if strings.ContainsFunc(body, func(r rune) bool { return r != '\n' && !unicode.IsGraphic(r) }) {
			t.Errorf("%s: %q", path, body)
		}
	}
	var s State
	if _, body := get(a.handler(), "/status"); json.Unmarshal([]byte(body), &s) != nil ||
		s.Problems[0].Message != evil {
		t.Errorf("/status says something else to programs: %+v", s.Problems)
	}
}

// A problem of the time before anything is known is over once the source has told, and the log says so.
func TestProblemWhileWaitingIsOver(t *testing.T) {
	a := still(t, Options{})
	var log strings.Builder
	a.options.Log = slog.New(slog.NewTextHandler(&log, nil))
	unreachable := source.Problem{Reason: "Unreachable", Message: "the API server is away", Since: time.Now()}
	a.consume(t.Context(), source.Batch{Waiting: true, Problems: []source.Problem{unreachable}})
	a.consume(t.Context(), source.Batch{})
	for _, text := range []string{`problem problem="the API server is away`,
		"problem resolved"} {
		if !strings.Contains(log.String(), text) {
			t.Errorf("the log lacks %q: %s", text, log.String())
		}
	}
}

// Documents of kinds that are not read are counted in one line, and listed one by one where the log is verbose.
func TestUnreadDocumentsAreCounted(t *testing.T) {
	a := still(t, Options{})
	var log strings.Builder
	a.options.Log = slog.New(slog.NewTextHandler(&log, nil))
	a.notify([]source.Problem{{Object: source.Key{Kind: "Deployment", Name: "a"}, Reason: source.KindNotRead},
		{Object: source.Key{Kind: "Deployment", Name: "b"}, Reason: source.KindNotRead}, {Reason: "Syntax", Message: "odd"}})
	if got := log.String(); strings.Count(got, "\n") != 2 || !strings.Contains(got, "2 Deployment") ||
		!strings.Contains(got, "odd (Syntax)") {
		t.Errorf("the log is\n%s", got)
	}
}

// Policies of kinds that are not evaluated are named in one line, once.
func TestOtherPoliciesAreNamedOnce(t *testing.T) {
	a := still(t, Options{})
	var log strings.Builder
	a.options.Log = slog.New(slog.NewTextHandler(&log, nil))
	admin, _ := source.OtherPolicyKind("policy.networking.k8s.io/v1alpha1", "AdminNetworkPolicy")
	calicos, _ := source.OtherPolicyKind("crd.projectcalico.org/v1", "NetworkPolicy")
	problems := []source.Problem{admin.Problem(source.Key{Name: "a"}), admin.Problem(source.Key{Name: "b"}),
		calicos.Problem(source.Key{Namespace: "shop", Name: "a"})}
	a.notify(problems)
	a.notify(append(problems, source.Problem{Reason: "Syntax", Message: "odd"}))
	const want = "level=WARN msg=\"3 policies of kinds that Fairlead doesn't evaluate: 2 AdminNetworkPolicy, " +
		"1 NetworkPolicy.crd.projectcalico.org; fairlead policy convert"
	if got := log.String(); strings.Count(got, "\n") != 2 || !strings.Contains(got, want) {
		t.Errorf("the log is\n%s", got)
	}
}

// The status page has all its keys from the first, and no null but for the fast path, which only mode ebpf has, and
// policies, which are off.
func TestStatusHasAllKeys(t *testing.T) {
	a := still(t, Options{})
	_, body := get(a.handler(), "/status")
	if strings.Contains(strings.NewReplacer(`"fastPath":null`, "", `"policies":null`, "").Replace(body), "null") {
		t.Errorf("/status has a null: %s", body)
	}
	var page struct {
		State map[string]any
		Loops map[string]map[string]any
	}
	if err := errors.Join(json.Unmarshal([]byte(body), &page.State), json.Unmarshal([]byte(body), &page)); err != nil {
		t.Fatal(err)
	}
	for _, k := range []string{"node", "leaving", "mode", "why", "ready", "batches", "loops", "fastPath", "problems"} {
		if _, ok := page.State[k]; !ok {
			t.Errorf("/status lacks %q: %s", k, body)
		}
	}
	for _, k := range []string{"lastChange", "firstSync", "serving", "notServing", "error", "failing"} {
		if _, ok := page.Loops["health"][k]; !ok {
			t.Errorf("/status lacks %q of a loop: %s", k, body)
		}
	}
}

// A configuration that is not in force is a problem of the Node, for the status page, commands and Events, until one
// is.
func TestRejectedConfigurationIsAProblem(t *testing.T) {
	var r RejectedConfig
	a := still(t, Options{Rejected: &r})
	notified := 0
	r.follow(func() { notified++ })
	r.Set(errors.New("no such mode"))
	want := source.Key{Kind: source.Node, Name: "a"}
	decided, err := a.decided()
	if err != nil {
		t.Fatal(err)
	}
	for what, problems := range map[string][]source.Problem{"active": a.activeProblems(),
		"status": a.state().Problems, "decided": decided.Problems} {
		if len(problems) != 1 || problems[0].Object != want || problems[0].Reason != "ConfigurationRefused" ||
			!strings.Contains(problems[0].Message, "no such mode") {
			t.Errorf("%s: %v", what, problems)
		}
	}
	r.Set(nil)
	if p := a.activeProblems(); len(p) > 0 || notified != 2 {
		t.Errorf("%v stands; %d reports", p, notified)
	}
}
