package device

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
)

// age has all entries of flows be without packets for so many seconds more.
func (w *world) age(seconds uint32) {
	w.t.Helper()
	for _, name := range []string{deviceMapFlNatDst, deviceMapFlNatSrc} {
		held := map[Tuple]NatEntry{}
		if err := bpf.ReadAll(w.maps.named[name], func(t Tuple, v NatEntry) { held[t] = v }); err != nil {
			w.t.Fatal(err)
		}
		for t, v := range held {
			v.Seen -= seconds
			if err := w.maps.named[name].Put(t, v); err != nil {
				w.t.Fatal(err)
			}
		}
	}
}

// began returns how many flows began.
func (w *world) began() uint64 {
	w.t.Helper()
	c, err := w.maps.PacketCounts()
	if err != nil {
		w.t.Fatal(err)
	}
	return c.Began
}

// Entries of a TCP connection last as long as connection tracking's: those of one that opens or ends, or whose data
// is not acknowledged, seconds or minutes, others five days.
func TestEntriesExpire(t *testing.T) {
	const day = 24 * 3600
	client, entry, server := ends(0)
	type step struct {
		reply bool
		flags uint8
		data  string // after 10 s
	}
	open := []step{{false, syn, ""}, {true, syn | ack, ""}, {false, ack, ""}}
	after := func(more ...step) []step { return append(open[:3:3], more...) }
	for name, c := range map[string]struct {
		steps []step
		lives uint32 // seconds; after some more it is forgotten
	}{
		"SYN":                     {open[:1], 110},
		"SYN, SYN-ACK":            {open[:2], 50},
		"SYN, SYN-ACK, RST":       {append(open[:2:2], step{false, rst, ""}), 5},
		"SYN, SYN-ACK, ACK":       {open, 5*day - 60},
		"begun before, ACK":       {open[2:], 110},
		"begun before, ACK, data": {[]step{{false, ack, ""}, {true, ack, ""}}, 5*day - 60},
		"begun before, ACK, RST":  {[]step{{false, ack, ""}, {true, rst, ""}}, 5},
		"FIN_WAIT":                {after(step{false, fin | ack, ""}), 110},
		"CLOSE_WAIT":              {after(step{false, fin | ack, ""}, step{true, ack, ""}), 50},
		"server's CLOSE_WAIT":     {after(step{true, fin | ack, ""}, step{false, ack, ""}), 50},
		"LAST_ACK":                {after(step{false, fin | ack, ""}, step{true, fin | ack, ""}), 20},
		"TIME_WAIT": {after(step{true, fin | ack, ""}, step{false, fin | ack, ""},
			step{true, ack, ""}), 110},
		"client's data":          {after(step{false, ack, "ask"}), 290},
		"client's data, answer":  {after(step{false, ack, "ask"}, step{true, ack, ""}), 5*day - 60},
		"backend's data":         {after(step{true, ack, "tell"}), 290},
		"backend's data, answer": {after(step{true, ack, "tell"}, step{false, ack, ""}), 5*day - 60},
		"FIN, then lost data":    {after(step{true, fin | ack, ""}, step{false, ack, "ask"}), 50},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			see := func(s step) {
				if s.data != "" {
					w.age(10)
				}
				program, p := "arrive-14", packet{src: client, dst: entry, protocol: unix.IPPROTO_TCP,
					flags: s.flags, payload: []byte(s.data)}
				if s.reply {
					program, p.src, p.dst = "leave-14", server, client
				}
				w.see(program, p.frame())
			}
			back := func() netip.AddrPort {
				_, out := w.see("leave-14", packet{src: server, dst: client, protocol: unix.IPPROTO_TCP,
					flags: ack}.frame())
				return w.read(out).src
			}
			for _, s := range c.steps {
				see(s)
			}
			w.age(c.lives)
			now, _ := bpf.Seconds()
			for _, m := range []string{deviceMapFlNatDst, deviceMapFlNatSrc} {
				if err := bpf.ReadAll(w.maps.named[m], func(_ Tuple, v NatEntry) {
					if expired(v, unix.IPPROTO_TCP, now) {
						t.Errorf("after %d s, the agent takes an entry of %s for expired", c.lives, m)
					}
				}); err != nil {
					t.Fatal(err)
				}
			}
			w.age(130)
			last := c.steps[len(c.steps)-1]
			if last.reply && last.data != "" {
				// The backend's own packets would keep the connection.
			} else if got := back(); got != server {
				t.Errorf("after %d s, the backend still answers as %s", c.lives+130, got)
			}
			see(step{false, ack, ""})
			if n := w.began(); n != 2 {
				t.Errorf("after %d s, %d flows began", c.lives+130, n)
			}
			if n, err := Drain(w.folder); n != 1 || err != nil {
				t.Errorf("after %d s, %d flows go on, not the last alone: %v", c.lives+130, n, err)
			}
		})
	}
	for lives, steps := range map[uint32][]step{100: {{false, syn, ""}}, 50: {{false, syn, ""}, {true, syn | ack, ""}},
		4 * day: {{false, syn, ""}, {true, syn | ack, ""}, {false, ack, ""}}} {
		w := newWorld(t)
		for _, s := range steps {
			program, p := "arrive-14", packet{src: client, dst: entry, protocol: unix.IPPROTO_TCP, flags: s.flags}
			if s.reply {
				program, p.src, p.dst = "leave-14", server, client
			}
			w.see(program, p.frame())
		}
		w.age(lives)
		_, out := w.see("leave-14", packet{src: server, dst: client, protocol: unix.IPPROTO_TCP, flags: ack}.frame())
		if got := w.read(out).src; got != entry {
			t.Errorf("after %d s, the backend answers as %s", lives, got)
		}
		w.see("arrive-14", packet{src: client, dst: entry, protocol: unix.IPPROTO_TCP, flags: ack}.frame())
		if n := w.began(); n != 1 {
			t.Errorf("after %d s, %d flows began", lives, n)
		}
	}
}

// exitAll deletes the frontends.
func (w *world) exitAll() {
	w.t.Helper()
	for six := range entries {
		for _, port := range []uint16{80, 81} {
			for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
				k := service.Entry{Port: bpf.Port(port), Protocol: protocol}
				k.Address.Word = bpf.Words(entries[six])
				w.maps.Exit(k)
				if err := w.maps.DeleteFrontends([]service.Entry{k}); err != nil {
					w.t.Fatal(err)
				}
			}
		}
	}
}

// Ports of flows that are over cost no look-up any more once their bits are rebuilt; those of others do, also of flows
// that begin meanwhile.
func TestPortBitsRebuilt(t *testing.T) {
	w := newWorld(t)
	inUse := func(port uint16) bool {
		const either = devicePortBitBIT_MASQ_PORT | devicePortBitBIT_MASQ_PORT<<generationShift
		return w.maps.portBits.ports.Of[bpf.Port(port)]&uint16(either) != 0
	}
	put := func(port uint16, age uint32) { // a client masqueraded with a port
		now, _ := bpf.Seconds()
		k := Tuple{Sport: bpf.Port(8080), Dport: bpf.Port(port), Protocol: unix.IPPROTO_TCP}
		if err := w.maps.named[deviceMapFlNatDst].Put(k, NatEntry{Seen: now - age}); err != nil {
			t.Fatal(err)
		}
		ports := w.maps.portBits.ports
		set(ports, k.Dport, devicePortBit(ofGeneration(devicePortBitBIT_MASQ_PORT, ports.Generation)), true)
	}
	request := func(port uint16) netip.AddrPort {
		_, out := w.see("arrive-14", packet{src: netip.AddrPortFrom(clients[0], port),
			dst: netip.AddrPortFrom(entries[0], 80), protocol: unix.IPPROTO_TCP, flags: syn}.frame())
		return w.read(out).dst
	}
	reply := func(port uint16) netip.AddrPort {
		_, out := w.see("leave-14", packet{src: netip.AddrPortFrom(servers[0], 8080),
			dst: netip.AddrPortFrom(clients[0], port), protocol: unix.IPPROTO_TCP, flags: syn | ack}.frame())
		return w.read(out).src
	}
	entry := netip.AddrPortFrom(entries[0], 80)
	for port := uint16(1024); port != 0; port++ {
		put(port, 300)
	}
	put(5000, 0)
	request(1)
	for round := range uint16(3) {
		err := w.maps.rebuildPortBits(func() error {
			request(100 + round)
			put(6000+round, 0)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for port := uint16(1024); port != 0; port++ {
			if want := port == 5000 || port >= 6000 && port <= 6000+round; inUse(port) != want {
				t.Fatalf("round %d: port %d is taken: %t", round, port, !want)
			}
		}
		for _, port := range []uint16{1, 100 + round} {
			if got := reply(port); got != entry {
				t.Errorf("round %d: the flow from port %d is answered by %s", round, port, got)
			}
		}
	}
	w.exitAll() // what is left of entries without a frontend are flows

	for _, want := range []netip.AddrPort{netip.AddrPortFrom(servers[0], 8080), entry} {
		if err := w.maps.rebuildPortBits(func() error { return nil }); err != nil {
			t.Fatal(err)
		}
		if got := request(1); got != want {
			t.Errorf("a packet of the flow from port 1 goes to %s, not %s", got, want)
		}
		w.age(300)
	}
}
