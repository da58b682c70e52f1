package nflog

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

func TestReceive(t *testing.T) {
	netnstest.Do(t, func() {
		for _, c := range [][]string{{"ip", "link", "set", "lo", "up"},
			{"iptables-legacy", "-w", "300", "-A", "OUTPUT", "-p", "udp", "-j", "NFLOG", "--nflog-prefix", "seen: "}} {
			if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
				t.Errorf("%v: %v: %s", c, err, out)
				return
			}
		}
		before, _ := os.ReadFile(sysctlName)
		l, err := Open()
		if err != nil {
			t.Error(err)
			return
		}
		if _, err := Open(); !errors.Is(err, unix.EPERM) {
			t.Errorf("a second one to hear the group: %v, want EPERM", err)
		}
		c, err := net.Dial("udp4", "127.0.0.1:9")
		if err == nil {
			_, err = c.Write([]byte("hello"))
		}
		received, err2 := l.Receive()
		if err != nil || err2 != nil || len(received) != 1 || received[0].Prefix != "seen: " ||
			!strings.HasSuffix(string(received[0].Payload), "hello") {
			t.Errorf("%+v, %v, %v", received, err, err2)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if after, _ := os.ReadFile(sysctlName); string(after) != string(before) {
			t.Errorf("nf_log/2 was %q and is %q", before, after)
		}
	})
}
