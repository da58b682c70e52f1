package agent

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/service"
	"fairlead.dev/fairlead/model"
)

// Mode ebpf tracks no connection, unless there is a Service of SCTP, and then only while there is.
func TestEBPFTracksNothing(t *testing.T) {
	m, err := mode.Of("ebpf")
	if err != nil {
		t.Fatal(err)
	}
	inNode(t, func(ctx context.Context) error {
		s, err := service.OpenPlanes(m, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		frontend := func(p model.Protocol) (l []model.ServicePart) {
			pool := &model.Pool{ID: uint64(p), Protocol: p,
				Backends: []model.Backend{{Addr: netip.MustParseAddrPort("127.0.0.1:8080")}}}
			to := model.Target{Pool: pool}
			at := model.Entry{Addr: netip.MustParseAddr("10.96.0.1"), Port: 80, Protocol: p}
			return []model.ServicePart{pool, &model.Frontend{Entry: at, Internal: to, External: to}}
		}
		node, sctp := &model.ServiceNode{Node: &model.Node{Name: "a"}}, frontend(model.SCTP)
		for _, step := range []struct {
			put, del []model.ServicePart
			tracks   bool
		}{
			{append(frontend(model.TCP), node), nil, false}, {sctp, nil, true}, {nil, sctp, false},
		} {
			s.Change(step.put, step.del)
			if err := s.Sync(ctx); err != nil {
				return err
			}
			tracks, err := tracking()
			// a table's rules go in the background (nf_tables_trans_destroy_work)
			for err == nil && tracks && !step.tracks && ctx.Err() == nil {
				tracks, err = tracking()
			}
			if err != nil || tracks != step.tracks {
				t.Errorf("connections are tracked: %t, want %t: %v", tracks, step.tracks, err)
			}
			tables, err := exec.Command("nft", "list", "tables").CombinedOutput()
			if has := strings.TrimSpace(string(tables)) != ""; err != nil || has != step.tracks {
				t.Errorf("tables: %s %v", tables, err)
			}
		}
		return s.Close()
	})
}

// tracking reports whether the kernel tracks a connection that is made now, in the thread's network namespace.
func tracking() (bool, error) {
	const tracked = "/proc/sys/net/netfilter/nf_conntrack_count"
	before, err := os.ReadFile(tracked)
	if err != nil {
		return false, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return false, err
	}
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return false, err
	}
	defer conn.Close()
	after, err := os.ReadFile(tracked)
	if err != nil {
		return false, err
	}
	was, err := strconv.Atoi(strings.TrimSpace(string(before)))
	if err != nil {
		return false, err
	}
	is, err := strconv.Atoi(strings.TrimSpace(string(after)))
	return is > was, err
}
