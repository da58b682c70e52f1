package denial

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/policy/ebpf"
	"fairlead.dev/fairlead/dataplane/policy/nftables"
	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/kernel/nflog"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/verdict"
)

// buffer is a log that tests read.
type buffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

// bed is a node with the engine and a Reader.
type bed struct {
	*policytest.Network
	plane *nftables.Plane
	held  map[nftables.Key]nftables.Fact
	mu    sync.Mutex
	now   *model.Policies
	log   *buffer
	*Reader
	closed atomic.Bool // shop/web
}

func newBed(t *testing.T) *bed {
	return newBedAfter(t, func() error { return nil })
}

// newBedAfter is newBed in a namespace in which before was called.
func newBedAfter(t *testing.T, before func() error) *bed {
	b := &bed{Network: policytest.NewNetwork(t), log: &buffer{}}
	b.Must(b.Node.Do(before))
	b.Must(b.Node.Do(func() (err error) {
		if b.plane, err = nftables.New(); err != nil {
			return err
		}
		b.Reader, err = Open(Options{Group: nftables.LogGroup, Deny: nftables.PrefixDeny, Audit: nftables.PrefixAudit,
			Forged: nftables.PrefixForged,
			Closed: func(s *model.Subject) bool { return b.closed.Load() && s.Pod == "shop/web" },
			Retry:  time.Millisecond, Log: slog.New(slog.NewTextHandler(b.log, nil)),
			Policies: func(f func(*model.Policies)) {
				b.mu.Lock()
				defer b.mu.Unlock()
				f(b.now)
			}})
		return err
	}))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- b.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		b.Reader.Close()
		b.plane.Close()
	})
	return b
}

// decide has the policies of a world evaluated, and enforced too if write.
func (b *bed) decide(t *testing.T, world string, write bool) {
	t.Helper()
	_, objects := policytest.Worlds(t)
	d := policytest.Decide(objects[world])
	b.mu.Lock()
	b.now = d.Now
	b.mu.Unlock()
	if write {
		wanted := policytest.Facts(t, b.plane, d.Parts())
		policytest.Move(t, b.plane, b.held, wanted)
		b.held = wanted
	}
}

// until waits until so many packets were reported.
func (b *bed) until(t *testing.T, packets uint64) Counts {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		c := b.Counts()
		sum := c.Unnamed
		for _, m := range []map[model.PolicyRef]uint64{c.Denied, c.Audited} {
			for _, n := range m {
				sum += n
			}
		}
		if sum >= packets {
			return c
		}
		if time.Now().After(end) {
			t.Fatalf("not %d within 10 s: %+v\n%s", packets, c, b.log)
		}
	}
}

// TestGroupReadAfterOtherProgram has another program read the group when the Reader is opened.
func TestGroupReadAfterOtherProgram(t *testing.T) {
	var other *nflog.Log
	b := newBedAfter(t, func() (err error) {
		other, err = nflog.Listen(nftables.LogGroup, nflog.Headers)
		return err
	})
	if text := b.log.String(); !strings.Contains(text, "denials are not reported") {
		t.Errorf("a taken group is not named: %s", text)
	}
	b.Must(other.Close())
	for end := time.Now().Add(10 * time.Second); !strings.Contains(b.log.String(), "denials are reported again"); {
		if time.Now().After(end) {
			t.Fatalf("the group is not read within 10 s: %s", b.log)
		}
	}
	b.decide(t, "deny-ingress.yaml", true)
	b.Passes(b.Packet(policytest.Behind[2][0], policytest.Behind[0][0], policytest.Served[0]), false)
	b.until(t, 1)
}

// What only a closed pod drops is named as that, and what has a forged source as that.
func TestReasonsBesidePolicies(t *testing.T) {
	b := newBed(t)
	logs := func(want string) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); !strings.Contains(b.log.String(), want); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("the log lacks %q: %s", want, b.log)
			}
		}
	}
	b.decide(t, "deny-ingress.yaml", true)
	b.decide(t, "none.yaml", false)
	client, web := policytest.Behind[2][0], policytest.Behind[0][0]
	b.Passes(b.Packet(client, web, policytest.Served[0]), false)
	logs("changed since")
	b.closed.Store(true)
	b.Passes(b.Packet(client, web, policytest.Served[1]), false)
	logs("pod shop/web drops everything that depends on what the kernel refuses")
	_, objects := policytest.Worlds(t)
	d := policytest.Decide(objects["none.yaml"])
	known := *d.Now.Subjects[client]
	known.Device = policytest.Device(web)
	d.Now.Subjects[client] = &known
	move := func() {
		wanted := policytest.Facts(t, b.plane, d.Parts())
		policytest.Move(t, b.plane, b.held, wanted)
		b.held = wanted
	}
	move()
	b.Passes(b.Packet(client, web, policytest.Served[0]), false)
	logs("packet with a forged source dropped")
	d.Own()
	b.mu.Lock()
	b.now = d.Now
	b.mu.Unlock()
	move()
	b.Inject(web, netip.MustParseAddrPort("10.0.2.2:9"), netip.AddrPortFrom(client, 9), "forged")
	logs("from=10.0.2.2:9") // whose it is not
	logs("10.0.2.2 came in by device pod0 of shop/web, which may not send from it")
}

// TestEngineReportsDenials: of an engine that logs nothing, also before its first Write and when its maps are new.
func TestEngineReportsDenials(t *testing.T) {
	b := &bed{Network: policytest.NewNetwork(t), log: &buffer{}}
	var plane *ebpf.Plane
	b.Must(b.Node.Do(func() (err error) {
		plane, err = ebpf.New()
		return err
	}))
	defer func() { b.Must(errors.Join(plane.Clean(context.Background()), plane.Close())) }()
	var err error
	b.Reader, err = Open(Options{Engine: plane, Log: slog.New(slog.NewTextHandler(b.log, nil)),
		Policies: func(f func(*model.Policies)) { f(b.now) }})
	b.Must(err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	_, objects := policytest.Worlds(t)
	d := policytest.Decide(objects["deny-ingress.yaml"])
	b.now = d.Now
	go func() { ended <- b.Run(ctx) }()
	wanted, tcp := policytest.Facts(t, plane, d.Parts()), policytest.Served[0]
	deny := model.PolicyRef{Tier: model.TierNetworkPolicy, Namespace: "shop", Name: "deny"}
	for i := range uint64(2) {
		policytest.Move(t, plane, nil, wanted)
		b.Passes(b.Packet(policytest.Behind[2][i], policytest.Behind[0][i], tcp), false)
		if c := b.until(t, i+1); c.Denied[deny] != i+1 {
			t.Errorf("counts %+v", c)
		}
		policytest.Move(t, plane, wanted, nil)
	}
	d.Own()
	policytest.Move(t, plane, nil, policytest.Facts(t, plane, d.Parts()))
	b.Inject(policytest.Behind[0][0], netip.MustParseAddrPort("10.0.2.2:9"), netip.MustParseAddrPort("10.0.1.4:9"),
		"forged")
	b.until(t, 3)
	cancel()
	b.Must(<-ended)
	if text := b.log.String(); !strings.Contains(text, "10.0.2.2 came in by device pod0 of shop/web") ||
		!strings.Contains(text, "policy denied a connection") ||
		!strings.Contains(text, "to=\"pod shop/web") || !strings.Contains(text, "NetworkPolicy shop/deny ingress") {
		t.Errorf("logged: %s", text)
	}
}

func TestDenialsNamePolicyRuleAndPods(t *testing.T) {
	b := newBed(t)
	client, web := policytest.Behind[2], policytest.Behind[0]
	udp := echo.Port{Number: 53, Protocol: model.UDP}
	b.decide(t, "deny-ingress.yaml", true)
	for i := range client {
		b.Passes(b.Packet(client[i], web[i], udp), false)
	}
	c := b.until(t, 2)
	if len(c.Denied) != 1 || len(c.Audited) != 0 {
		t.Errorf("%+v", c)
	}
	for _, want := range []string{"policy denied a connection", "pod bank/client (10.0.1.4:", "pod shop/web (10.0.1.2:53)",
		"pod shop/web ([fd00:1::2]:53)", "protocol=udp", "NetworkPolicy shop/", "ingress", "isolated by"} {
		if !strings.Contains(b.log.String(), want) {
			t.Errorf("%q is missing:\n%s", want, b.log)
		}
	}
	lines := strings.Count(b.log.String(), "\n")
	b.Passes(b.Packet(client[0], web[0], udp), false) // from another port
	b.until(t, 3)
	if n := strings.Count(b.log.String(), "\n"); n != lines {
		t.Errorf("a packet like one before is logged again:\n%s", b.log)
	}
	if denied, audited, err := b.plane.Packets(); denied != 3 || audited != 0 || err != nil {
		t.Errorf("the engine counts %d denied, %d audited, %v: want 3 denied", denied, audited, err)
	}
	b.decide(t, "none.yaml", false)
	b.Passes(b.Packet(policytest.Behind[1][0], web[0], udp), false)
	if c := b.until(t, 4); c.Unnamed != 1 || !strings.Contains(b.log.String(), "changed since") {
		t.Errorf("policies have changed: %+v\n%s", c, b.log)
	}
}

func TestAuditsAreReported(t *testing.T) {
	b := newBed(t)
	client, web := policytest.Behind[2], policytest.Behind[0]
	b.decide(t, "audit.yaml", true)
	b.closed.Store(true) // what it drops itself is no reason for a packet that passes
	if !b.Passes(b.Packet(client[0], web[0], echo.Port{Number: 80, Protocol: model.TCP}), true) {
		t.Error("an audited policy drops")
	}
	c := b.until(t, 1)
	if len(c.Audited) == 0 || len(c.Denied) != 0 || !strings.Contains(b.log.String(), "would deny") {
		t.Errorf("%+v\n%s", c, b.log)
	}
	for end := time.Now().Add(10 * time.Second); !strings.Contains(b.log.String(), "reason="); { // it is counted before
		if time.Now().After(end) {
			t.Fatal("no line within 10 s")
		}
		time.Sleep(time.Millisecond)
	}
	if !strings.Contains(b.log.String(), `reason="the audited rules would drop it"`) {
		t.Errorf("the reason is missing:\n%s", b.log)
	}
}

func TestPoliciesCountedApartAreBounded(t *testing.T) {
	r := &Reader{counts: Counts{Denied: map[model.PolicyRef]uint64{}}}
	for i := range 2 * policies {
		r.count([]model.RuleRef{{PolicyRef: model.PolicyRef{Name: fmt.Sprint(i)}}}, denied)
	}
	if c := r.Counts(); len(c.Denied) != policies || c.Unnamed != policies {
		t.Errorf("%d policies, %d unnamed: want %d of each", len(c.Denied), c.Unnamed, policies)
	}
}

func TestParse(t *testing.T) {
	four := func(protocol byte, fragment uint16, rest ...byte) []byte {
		b := append(make([]byte, 20), rest...)
		b[0], b[9] = 0x45, protocol
		b[6], b[7] = byte(fragment>>8), byte(fragment)
		copy(b[12:], []byte{10, 0, 0, 1, 10, 0, 0, 2})
		return b
	}
	six := func(next byte, rest ...byte) []byte {
		b := append(make([]byte, 40), rest...)
		b[0], b[6], b[8], b[23], b[24], b[39] = 0x60, next, 0xfd, 1, 0xfd, 2
		return b
	}
	ports := []byte{0x9c, 0x40, 0, 80, 0, 0, 0, 0}
	for _, c := range []struct {
		packet   []byte
		src, dst string
		protocol model.Protocol
		kind     uint8
	}{
		{four(6, 0, ports...), "10.0.0.1:40000", "10.0.0.2:80", 6, 0},
		{four(17, 0x2001, ports...), "10.0.0.1:0", "10.0.0.2:0", 17, 0},
		{four(1, 0, 8, 0, 0, 0), "10.0.0.1:0", "10.0.0.2:0", 1, 0},
		{append([]byte{0x46}, append(four(6, 0)[1:], append([]byte{1, 1, 1, 1}, ports...)...)...), "10.0.0.1:40000",
			"10.0.0.2:80", 6, 0},
		{six(132, ports...), "[fd00::1]:40000", "[fd00::2]:80", 132, 0},
		{six(0, append([]byte{60, 0, 0, 0, 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0, 0}, ports...)...), "[fd00::1]:40000",
			"[fd00::2]:80", 17, 0},
		{six(44, append([]byte{6, 0, 0, 1, 0, 0, 0, 0}, ports...)...), "[fd00::1]:40000", "[fd00::2]:80", 6, 0},
		{six(44, append([]byte{6, 0, 0, 8, 0, 0, 0, 0}, ports...)...), "[fd00::1]:0", "[fd00::2]:0", 6, 0},
		{six(58, 128, 0, 0, 0, 0, 0, 0, 0), "[fd00::1]:0", "[fd00::2]:0", 58, 128},
	} {
		want := verdict.Packet{Src: netip.MustParseAddrPort(c.src), Dst: netip.MustParseAddrPort(c.dst),
			Protocol: c.protocol, Type: c.kind}
		if p, ok := parse(c.packet); !ok || p != want {
			t.Errorf("%x: %+v, %v, want %+v", c.packet, p, ok, want)
		}
	}
	for _, b := range [][]byte{nil, {0x45}, four(6, 0)[:19], six(6)[:39], {0x50}} {
		if p, ok := parse(b); ok {
			t.Errorf("%x: %+v", b, p)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 53, 0, 53, 0, 8, 0, 0})
	f.Add(append(append([]byte{0x60, 0, 0, 0, 0, 8, 44, 64}, make([]byte, 32)...), 17, 0, 0, 1, 0, 0, 0, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, ok := parse(b); ok && (!p.Src.IsValid() || !p.Dst.IsValid()) {
			t.Errorf("%+v", p)
		}
	})
}
