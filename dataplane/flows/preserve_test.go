package flows

import (
	"io"
	"net"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
)

// A connection lives through the end of the rules that began it, others' don't count, and flows of UDP go.
func TestConnectionsSurviveModeChange(t *testing.T) {
	ns := netnstest.New(t)
	do := func(f func() error) {
		t.Helper()
		if err := ns.Do(f); err != nil {
			t.Fatal(err)
		}
	}
	sh := func(command string) {
		t.Helper()
		do(func() error {
			out, err := exec.Command("sh", "-c", command).CombinedOutput()
			if err != nil {
				t.Logf("%s: %s", command, out)
			}
			return err
		})
	}
	sh("ip link set lo up && ip address add 10.1.0.1/24 dev lo")
	var servers [2]net.Listener
	var packets net.PacketConn
	do(func() (err error) {
		for i := range servers {
			if servers[i], err = net.Listen("tcp4", "10.1.0.1:0"); err != nil {
				return err
			}
			t.Cleanup(func() { servers[i].Close() })
			go func() {
				for {
					c, err := servers[i].Accept()
					if err != nil {
						return
					}
					go func() { io.Copy(c, c); c.Close() }()
				}
			}()
		}
		packets, err = net.ListenPacket("udp4", servers[0].Addr().String())
		return err
	})
	defer packets.Close()
	port := func(i int) string { return netip.MustParseAddrPort(servers[i].Addr().String()).String() }
	sh(`nft -f - <<.
table ip begins {
	chain output {
		type nat hook output priority -100
		ip daddr 10.1.0.9 tcp dport 80 dnat to ` + port(0) + `
		ip daddr 10.1.0.9 udp dport 80 dnat to ` + port(0) + `
		ip daddr 10.1.0.8 tcp dport 80 dnat to ` + port(1) + `
	}
}
.`)
	dial := func(network, to string) (c net.Conn) {
		t.Helper()
		do(func() (err error) {
			c, err = net.DialTimeout(network, to, 5*time.Second)
			return err
		})
		t.Cleanup(func() { c.Close() })
		return c
	}
	lives := func(c net.Conn) {
		t.Helper()
		c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.Write([]byte("?")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	ours, others, datagrams := dial("tcp4", "10.1.0.9:80"), dial("tcp4", "10.1.0.8:80"), dial("udp4", "10.1.0.9:80")
	lives(ours)
	lives(others)
	if _, err := datagrams.Write([]byte("?")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := packets.ReadFrom(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}

	do(func() error { return Preserve() })
	do(func() error { return Preserve() })
	// who keeps the kernel translating by rules of its own waits for no other
	do(func() error { _, err := Release(nil, false); return err })
	sh("! nft list table inet " + PreservedTable)
	do(func() error { return Preserve() })
	sh("nft delete table ip begins")
	lives(ours)
	address := netip.MustParseAddr("10.1.0.9")
	entries := Entries{{Addr: address, Port: 80, Protocol: model.TCP}: true,
		{Addr: address, Port: 80, Protocol: model.UDP}: true}
	release := func(want int) {
		t.Helper()
		do(func() error {
			n, err := Release(entries, false)
			if n != want {
				t.Errorf("%d connections are kept, not %d", n, want)
			}
			return err
		})
	}
	release(1)
	lives(ours)
	count := func(protocol model.Protocol) (n int) {
		t.Helper()
		do(func() error {
			c, err := conntrack.Open()
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Cut(func(f conntrack.Flow) bool {
				is := f.Protocol == uint8(protocol) && f.Destination.Addr() == address
				if is {
					n++
				}
				return false
			})
			return err
		})
		return n
	}
	if n := count(model.UDP); n > 0 {
		t.Errorf("%d flows of UDP are translated still", n)
	}
	// it stays with connection tracking, in TIME_WAIT, and is waited for no more
	for _, c := range []net.Conn{ours, others} {
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(c); err != nil {
			t.Fatal(err)
		}
	}
	release(0)
	if count(model.TCP) == 0 {
		t.Error("connection tracking has forgotten the connection already")
	}
	sh("! nft list table inet " + PreservedTable)
}

// Nothing is made where nothing translates, nor could yet.
func TestNothingPreservedWithoutConnections(t *testing.T) {
	ns := netnstest.New(t)
	retained := func() (yes bool) {
		t.Helper()
		err := ns.Do(func() error {
			err := Preserve("fairlead")
			yes = exec.Command("nft", "list", "table", "inet", PreservedTable).Run() == nil
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return yes
	}
	if retained() {
		t.Error("it is kept that the kernel translates, which it doesn't")
	}
	if err := ns.Do(exec.Command("nft", "add table inet fairlead").Run); err != nil {
		t.Fatal(err)
	}
	if !retained() {
		t.Error("connections that begin by rules that are there are not kept")
	}
}

// What a proxy's connections leave in connection tracking goes once they have ended; what is open stays, and so does
// what goes elsewhere.
func TestCutUntranslated(t *testing.T) {
	ns := netnstest.New(t)
	do := func(f func() error) {
		t.Helper()
		if err := ns.Do(f); err != nil {
			t.Fatal(err)
		}
	}
	do(exec.Command("sh", "-ec", "ip link set lo up; ip address add 10.1.0.1/24 dev lo; "+
		"nft add table ip t; nft add chain ip t c '{ type nat hook output priority -100; }'; nft add rule ip t c "+
		"ct status 1").Run)
	var l [2]net.Listener
	for i := range l {
		do(func() (err error) { l[i], err = net.Listen("tcp4", "10.1.0.1:0"); return err })
		defer l[i].Close()
	}
	dial := func(i int) net.Conn {
		var c net.Conn
		do(func() (err error) { c, err = net.Dial("tcp4", l[i].Addr().String()); return err })
		return c
	}
	entries := Entries{{Addr: netip.MustParseAddr("10.1.0.1"), Protocol: model.TCP,
		Port: netip.MustParseAddrPort(l[0].Addr().String()).Port()}: true}
	open := dial(0)
	defer open.Close()
	for i := range l {
		reset := dial(i)
		reset.(*net.TCPConn).SetLinger(0)
		reset.Close()
	}
	left := func() (ended, all int) {
		do(func() error {
			c, err := conntrack.Open()
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Cut(func(f conntrack.Flow) bool {
				if f.Protocol == uint8(model.TCP) {
					if all++; f.Ended {
						ended++
					}
				}
				return false
			})
			return err
		})
		return ended, all
	}
	if ended, all := left(); ended != 2 || all != 3 {
		t.Fatalf("%d of %d connections have ended, not 2 of 3", ended, all)
	}
	do(func() error { return CutUntranslated(entries) })
	if ended, all := left(); ended != 1 || all != 2 {
		t.Errorf("%d of %d connections are left that have ended, not 1 of 2", ended, all)
	}
}
