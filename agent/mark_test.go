package agent

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// A connection whose client mode ebpf hides goes on when another owner's program, which lets all packets pass, takes
// from them the mark that they had until then.
func TestConnectionsGoOnUnmarked(t *testing.T) {
	cluster := served30080(t, "ebpf")
	var held *echo.Flow
	probe := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if _, err := held.Request(ctx); err != nil {
			t.Fatal(err)
		}
	}
	err := cluster.External().Do(func() (err error) {
		held, err = echo.Open(context.Background(), model.TCP, nodePort, echo.Options{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	probe()
	probe()

	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer pass.Close()
	node, err := cluster.Node("a")
	if err != nil {
		t.Fatal(err)
	}
	err = node.Do(func() error {
		devices, err := net.Interfaces()
		for _, d := range devices {
			l, err := link.AttachTCX(link.TCXOptions{Interface: d.Index, Program: pass, Attach: ebpf.AttachTCXIngress,
				Anchor: link.Tail()})
			if err != nil {
				return err
			}
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	probe()
}
