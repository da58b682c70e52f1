package nfacct

import (
	"encoding/hex"
	"errors"
	"io/fs"
	"net"
	"os/exec"
	"testing"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// A counter counts what a rule of iptables matches, stays while the rule does, and is gone after it.
func TestCounterCountsWhatARuleMatches(t *testing.T) {
	netnstest.Do(t, func() {
		const name = "fairlead-test"
		check := func(what string, err error) {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		if !Supported() {
			t.Error("this kernel has no nfnetlink_acct")
			return
		}
		run := func(args ...string) {
			out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
			check(string(out), err)
		}
		counted := func(want uint64) {
			t.Helper()
			if n, err := Packets(name); n != want || err != nil {
				t.Errorf("counted %d packets, %v; want %d", n, err, want)
			}
		}
		gone := func() {
			t.Helper()
			if _, err := Packets(name); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("there is a counter, or %v", err)
			}
		}
		gone()
		check("create", Ensure(name))
		counted(0)
		check("create again", Ensure(name))
		run("ip", "link", "set", "lo", "up")
		run("iptables-nft", "-A", "OUTPUT", "-p", "udp", "--dport", "9", "-m", "nfacct", "--nfacct-name", name)
		c, err := net.Dial("udp", "127.0.0.1:9")
		check("dial", err)
		_, err = c.Write([]byte{0})
		check("send", err)
		c.Close()
		counted(1)
		check("delete while a rule has it", Delete(name))
		counted(1)
		run("iptables-nft", "-F", "OUTPUT")
		check("delete", Delete(name))
		gone()
		check("delete again", Delete(name))
	})
}

func FuzzPackets(f *testing.F) {
	b, err := hex.DecodeString("000000000f000100666169726c6561645f7800000c0002000000000000000003" +
		"0c00030000000000000000000800040000000001")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[:30])
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, ok := packets(b); n > 0 && !ok {
			t.Errorf("%d packets in %x", n, b)
		}
	})
}
