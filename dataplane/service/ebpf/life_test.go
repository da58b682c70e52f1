package ebpf_test

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/sandbox/echo"
)

// sortedFacts puts facts in order, to be compared.
func sortedFacts(facts []ebpf.Fact) []ebpf.Fact {
	l := slices.Clone(facts)
	slices.SortFunc(l, func(a, b ebpf.Fact) int {
		if a.Key.Kind != b.Key.Kind {
			return int(a.Key.Kind) - int(b.Key.Kind)
		}
		return strings.Compare(a.Key.Name, b.Key.Name)
	})
	return l
}

func read(t testing.TB, p *ebpf.Plane) []ebpf.Fact {
	t.Helper()
	facts, err := p.Read(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return sortedFacts(facts)
}

// everything is parts of all kinds.
func everything() []model.ServicePart {
	node := copyOfNode()
	node.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	node.NodePorts = []model.Range{{First: netip.MustParseAddr("127.0.0.3"), Last: netip.MustParseAddr("255.0.0.0")}}
	four, six, none := poolOf(1, false, model.TCP, 1, 2, 3), poolOf(2, true, model.UDP, 1, 2), poolOf(3, false, model.TCP)
	four.Affinity, four.Scheduler = 3*time.Hour, model.WeightedRoundRobin
	four.Backends[1].Weight = 7
	four.Backends[0].Local, four.Backends[2].Remote = true, true
	node.DSR, node.Nodes = true, []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("10.244.0.9")}
	maglev := poolOf(1<<63, true, model.TCP, 1, 3)
	maglev.Scheduler = model.Maglev
	hidden, split := frontendOf("0.0.0.0:30080", four), frontendOf("10.96.0.2:80", none)
	hidden.Masquerade, hidden.DSR = model.AllOrigins, model.OriginsOf(model.FromExternal)
	split.External = model.Target{Pool: four, Empty: model.Drop}
	sctp := frontendOf("10.96.0.1:80", four)
	sctp.Entry.Protocol = model.SCTP
	return []model.ServicePart{&node, four, six, none, maglev, hidden, split, sctp,
		frontendOf("10.96.0.1:80", four), frontendOf("[fd00:96::1]:53", six), frontendOf("[fd00:96::1]:80", maglev)}
}

// What one agent wrote the next one reads; and what none wants is removed without a trace.
func TestReadReturnsWhatWasWritten(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		p := opened(t, o)
		want := sortedFacts(render(p, everything()...))
		write(t, p, want, nil)
		if diff := cmp.Diff(want, read(t, p)); diff != "" {
			t.Errorf("wanted less, read more:\n%s", diff)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		next := opened(t, o)
		if diff := cmp.Diff(want, read(t, next)); diff != "" {
			t.Errorf("after a restart, wanted less, read more:\n%s", diff)
		}
		slices.Reverse(want)
		write(t, next, nil, want)
		if left := read(t, next); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
		if err := next.Close(); err != nil {
			t.Error(err)
		}
	}, endpoints...)
}

// A node whose backends' nodes answer clients has other programs at its devices, in place of those that it had.
func TestDSRReplacesPrograms(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		p := opened(t, o)
		defer clean(t, p)
		direct := copyOfNode()
		direct.DSR = true
		for _, n := range []struct{ from, to []model.ServicePart }{
			{nil, []model.ServicePart{theNode}},
			{[]model.ServicePart{theNode}, []model.ServicePart{&direct}},
			{[]model.ServicePart{&direct}, []model.ServicePart{theNode}},
		} {
			if from, to := render(p, n.from...), render(p, n.to...); cmp.Equal(from, to) {
				t.Error("the facts are the same")
			}
			change(t, p, n.from, n.to)
			if diff := cmp.Diff(sortedFacts(render(p, n.to...)), read(t, p)); diff != "" {
				t.Errorf("wanted less, read more:\n%s", diff)
			}
		}
	})
}

// Equal parts give equal facts, and each fact's key prints.
func TestRenderIsPure(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		a, b := opened(t, o), opened(t, o)
		defer a.Close()
		defer b.Close()
		if diff := cmp.Diff(render(a, everything()...), render(b, everything()...)); diff != "" {
			t.Error(diff)
		}
		var lines []string
		for _, f := range sortedFacts(render(a, everything()...)) {
			lines = append(lines, f.Key.String())
		}
		for _, want := range []string{"prefix 10.244.0.0/16", "prefix 127.0.0.3/32", "pool 0000000000000001",
			"left to others 0000000000000001 of pod", "frontend *4:30080/tcp", "frontend [fd00:96::1]:53/udp", "hooks"} {
			if !slices.Contains(lines, want) {
				t.Errorf("no %q among\n%s", want, strings.Join(lines, "\n"))
			}
		}
	})
}

// looped has a loop bring a plane to where it should be.
func looped(t testing.TB, p *ebpf.Plane, parts []model.ServicePart) {
	t.Helper()
	l := reconcile.New(p, reconcile.Options[model.ServicePart]{})
	ctx, stop := context.WithTimeout(context.Background(), 30*time.Second)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	l.Change(withLinks(parts), nil)
	if err := l.Sync(ctx); err != nil {
		t.Error(err)
	}
	stop()
	<-ended
}

// While agents end and others take over, also one whose maps have another layout, every connection is served.
func TestTrafficGoesOnThroughUpgrades(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		v := poolOf(1, false, model.TCP, 1, 2, 3)
		parts := []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}
		first := opened(t, o)
		looped(t, first, parts)
		other := opened(t, o)
		defer clean(t, other)
		node, err := netns.Current()
		if err != nil {
			t.Fatal(err)
		}
		defer node.Close()
		done := make(chan struct{})
		go func() {
			defer close(done)
			if err := first.Close(); err != nil {
				t.Error(err)
			}
			for i := range 6 {
				now := o
				if i%2 == 0 {
					now.Sizes = service.Sizes{Frontends: 128 << i, Pools: 128, Slots: 4096}
				}
				var p *ebpf.Plane
				err := node.Do(func() (err error) {
					p, err = ebpf.Open(now)
					return err
				})
				if err != nil {
					t.Error(err)
					return
				}
				looped(t, p, parts)
				if err := p.Close(); err != nil {
					t.Error(err)
				}
			}
		}()
		for n := 0; ; n++ {
			select {
			case <-done:
				if folder, _, err := bpf.Folder(); err == nil {
					if left, _ := filepath.Glob(filepath.Join(folder, "maps-*")); len(left) != 1 || n == 0 {
						t.Errorf("%d connections; folders of maps: %v", n, left)
					}
				}
				return
			default:
			}
			if _, err := request(model.TCP, "10.96.0.1:80", echo.Options{}); err != nil {
				t.Fatalf("connection %d: %v", n, err)
			}
		}
	}, endpoints...)
}

// Damage is seen and repaired: pins of hooks or maps that are removed, one or all.
func TestDamageIsRepaired(t *testing.T) {
	for _, gone := range []string{"links/connect4", "links/recvmsg6", "links", "."} {
		t.Run(gone, func(t *testing.T) {
			inside(t, func(o ebpf.Options) {
				serve(t)
				v := poolOf(1, false, model.TCP, 1)
				p := opened(t, o)
				defer clean(t, p)
				l := reconcile.New(p, reconcile.Options[model.ServicePart]{})
				ctx, stop := context.WithTimeout(context.Background(), 30*time.Second)
				ended := make(chan error, 1)
				go func() { ended <- l.Run(ctx) }()
				defer func() { stop(); <-ended }()
				l.Change([]model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}, nil)
				if err := l.Sync(ctx); err != nil {
					t.Fatal(err)
				}
				folder, _, err := bpf.Folder()
				if err != nil {
					t.Fatal(err)
				}
				for l.Status().Repairs == 0 { // the watch may not have begun when the first goes
					if err := os.RemoveAll(filepath.Join(folder, gone)); err != nil {
						t.Fatal(err)
					}
					for end := time.After(time.Second); l.Status().Repairs == 0 && end != nil; {
						select {
						case <-end:
							end = nil
						case <-time.After(time.Millisecond):
						}
					}
					if ctx.Err() != nil {
						t.Fatal("nothing was repaired")
					}
				}
				if err := l.Sync(ctx); err != nil {
					t.Error(err)
				}
				if _, err := request(model.TCP, "10.96.0.1:80", echo.Options{}); err != nil {
					t.Error(err)
				}
			}, endpoints...)
		})
	}
}

// Maps of which a part is missing, or all, are made anew, and the programs with them.
func TestMissingMapsAreMadeAnew(t *testing.T) {
	for _, gone := range []string{"maps-*/slots", "maps-*", "state", "state/connected-*"} {
		t.Run(gone, func(t *testing.T) {
			inside(t, func(o ebpf.Options) {
				serve(t)
				v := poolOf(1, false, model.TCP, 1)
				parts := []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}
				p := opened(t, o)
				defer clean(t, p)
				looped(t, p, parts)
				folder, _, err := bpf.Folder()
				if err != nil {
					t.Fatal(err)
				}
				files, _ := filepath.Glob(filepath.Join(folder, gone))
				if len(files) != 1 || os.RemoveAll(files[0]) != nil {
					t.Fatal("nothing to remove", files)
				}
				looped(t, p, parts)
				now := poolOf(1, false, model.TCP, 2)
				change(t, p, parts, []model.ServicePart{theNode, now, frontendOf("10.96.0.1:80", now)})
				if who, err := request(model.TCP, "10.96.0.1:80", echo.Options{}); who != "10.244.0.2" {
					t.Errorf("%s answers, %v", who, err)
				}
			}, endpoints...)
		})
	}
}

// What doesn't fit is refused by name, and everything else is served.
func TestFullMaps(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		o.Sizes = service.Sizes{Frontends: 4, Pools: 8, Slots: 33}
		p := opened(t, o)
		defer clean(t, p)
		v := poolOf(1, false, model.TCP, 1)
		write(t, p, render(p, theNode, v, frontendOf("10.96.0.1:80", v)), nil)
		big := poolOf(2, false, model.TCP, 1, 2, 3)
		for i := range 64 {
			big.Backends = append(
				big.Backends,
				model.Backend{Addr: netip.AddrPortFrom(netip.MustParseAddr("10.244.1.1"), uint16(i+1))},
			)
		}
		if err := p.Write(
			context.Background(),
			p.Render(big),
			nil,
		); err == nil ||
			!strings.Contains(
				err.Error(),
				"more slots for backends don't fit: there is room for 32; give more with --ebpf-map-entries",
			) {
			t.Errorf("a pool of 67 backends in 32 slots: %v", err)
		}
		var err error
		for i := 0; i < 64 && err == nil; i++ {
			err = p.Write(context.Background(), render(p, frontendOf(fmt.Sprintf("10.96.1.1:%d", i+1), v)), nil)
		}
		if err == nil ||
			!strings.Contains(err.Error(), "the map fl_services is full, with room for 4: give more with --ebpf-map-entries") {
			t.Errorf("64 frontends in a map of 4: %v", err)
		}
		picky := frontendOf("10.96.0.1:80", v)
		for i := range 64 {
			picky.Sources = append(picky.Sources, netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 32))
		}
		err = p.Write(context.Background(), p.Render(picky), nil)
		if err == nil || !strings.Contains(err.Error(), "10.96.0.1:80/tcp from 192.0.2.") ||
			!strings.Contains(
				err.Error(),
				"the map fl_allowed_src is full, with room for 4: give more with --ebpf-map-entries",
			) {
			t.Errorf("64 sources in a map of 4: %v", err)
		}
		if _, err := request(model.TCP, "10.96.0.1:80", echo.Options{}); err != nil {
			t.Error(err)
		}
	}, endpoints...)
}

// Of two planes of one node, each learns that the other wrote, and neither of its own writes.
func TestAnotherPlaneIsNoticed(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		v, now := poolOf(1, false, model.TCP, 1), poolOf(1, false, model.TCP, 2)
		p, other := opened(t, o), opened(t, o)
		defer other.Close()
		defer clean(t, p)
		write(t, p, render(p, theNode, v, frontendOf("10.96.0.1:80", v)), nil)
		read(t, p)
		signals, stop := watched(t, p)
		defer stop()
		write(t, p, p.Render(now), p.Render(v))
		read(t, other)
		select {
		case <-signals:
			t.Error("an own write, or another's read, is told")
		default:
		}
		write(t, other, p.Render(v), p.Render(now))
		select {
		case <-signals:
		case <-time.After(20 * time.Second):
			t.Error("another's write is not told")
		}
	})
}

// What another wrote is told to who watches only then, whether they had found nothing, had read what was there, or
// had made it.
func TestAnotherPlaneIsNoticedLate(t *testing.T) {
	v, now := poolOf(1, false, model.TCP, 1), poolOf(1, false, model.TCP, 2)
	all := func(p *ebpf.Plane) []ebpf.Fact { return render(p, theNode, v, frontendOf("10.96.0.1:80", v)) }
	for name, before := range map[string]func(t *testing.T, p, other *ebpf.Plane){
		"nothing": func(t *testing.T, p, other *ebpf.Plane) {
			read(t, p)
			write(t, other, all(other), nil)
		},
		"read": func(t *testing.T, p, other *ebpf.Plane) {
			write(t, other, all(other), nil)
			read(t, p)
			read(t, other)
			write(t, other, other.Render(now), other.Render(v))
		},
		"made": func(t *testing.T, p, other *ebpf.Plane) {
			write(t, p, all(p), nil)
			read(t, other)
			write(t, other, other.Render(now), other.Render(v))
		},
	} {
		t.Run(name, func(t *testing.T) {
			inside(t, func(o ebpf.Options) {
				p, other := opened(t, o), opened(t, o)
				defer p.Close()
				defer clean(t, other)
				before(t, p, other)
				signals, stop := watched(t, p)
				defer stop()
				select {
				case <-signals:
				case <-time.After(20 * time.Second):
					t.Error("what another wrote is not told")
				}
			})
		})
	}
}

// Others look when they are told: what was written must be there by then, whatever they saw before.
func TestWritesAreAnnouncedAfterwards(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		v := poolOf(1, false, model.TCP, 1)
		p, other := opened(t, o), opened(t, o)
		defer other.Close()
		defer clean(t, p)
		all := render(p, theNode, v, frontendOf("10.96.0.1:80", v))
		write(t, p, all, nil)
		folder, _, err := bpf.Folder()
		if err != nil {
			t.Fatal(err)
		}
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		for path, mask := range map[string]uint32{folder: unix.IN_CREATE, filepath.Join(folder, "links"): unix.IN_DELETE} {
			if _, err := unix.InotifyAddWatch(fd, path, mask); err != nil {
				t.Fatal(err)
			}
		}
		read(t, other)
		hooks := slices.DeleteFunc(slices.Clone(all), func(f ebpf.Fact) bool { return f.Key.Kind != ebpf.KindHooks })
		write(t, other, nil, hooks)
		b := make([]byte, 1<<16)
		n, err := unix.Read(fd, b)
		if err != nil {
			t.Fatal(err)
		}
		deleted, announced := bytes.LastIndex(b[:n], []byte("connect4")), bytes.LastIndex(b[:n], []byte("writer-"))
		if deleted < 0 || announced < deleted {
			t.Errorf("a hook goes at %d of the events, the last announcement comes at %d", deleted, announced)
		}
	})
}

// State that traffic wrote outlives a layout: a client's backend, and the peer of a connected socket.
func TestUpgradesPreserveTrafficState(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		v := poolOf(1, false, model.UDP, 1, 2, 3)
		v.Affinity = time.Hour
		parts := []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}
		p := opened(t, o)
		looped(t, p, parts)
		h, err := echo.Open(t.Context(), model.UDP, netip.MustParseAddrPort("10.96.0.1:80"), echo.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		a, err := h.Request(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		p.Close()
		o.Sizes = service.Sizes{Frontends: 64, Pools: 64, Slots: 1024}
		next := opened(t, o)
		defer clean(t, next)
		looped(t, next, parts)
		if who := answers(t, 20, model.UDP, "10.96.0.1:80", echo.Options{}); who[a.Server.Addr().String()] != 20 {
			t.Errorf("the client was %s's, and is now %v's", a.Server.Addr(), who)
		}
		now := poolOf(1, false, model.UDP)
		change(t, next, parts, []model.ServicePart{theNode, now, frontendOf("10.96.0.1:80", now)})
		if _, err := h.Request(t.Context()); err == nil {
			t.Error("a socket connected before the upgrade was not closed when its backend went")
		}
	}, endpoints...)
}
