package cluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// The measures.
const (
	roundTrip  = "rr"
	connection = "crr"
	stream     = "stream"
)

// streamSizes are those of a stream: so many bytes for each answer of one.
var streamSizes = load.Sizes{Request: 1 << 20, Response: 1}

// Target is what an arm's client connects to: a server at two ports, one after the other.
type Target struct {
	Arm string
	To  netip.AddrPort // for round trips; the next port is for streams
}

// Job is what a client's pod measures: each target in an order drawn for each operation.
type Job struct {
	Targets []Target
	Samples int           // operations of a block
	Stream  time.Duration // of a block
	Seed    uint64
	Round   int
}

// Serve answers on a port and the next one, on all addresses, until ctx ends. First it writes what machine it runs on.
func Serve(ctx context.Context, port uint16, w io.Writer) error {
	for i, sizes := range []load.Sizes{testbed.OneByte, streamSizes} {
		v4 := netip.AddrPortFrom(netip.IPv4Unspecified(), port+uint16(i))
		both := []netip.AddrPort{v4, netip.AddrPortFrom(netip.IPv6Unspecified(), v4.Port())}
		s, err := load.Serve(load.ServerConfig{Sizes: sizes, ID: 1, Listen: both})
		if err != nil { // without IPv6
			s, err = load.Serve(load.ServerConfig{Sizes: sizes, ID: 1, Listen: both[:1]})
		}
		if err != nil {
			return err
		}
		defer s.Close()
	}
	if err := json.NewEncoder(w).Encode(testbed.ReadMachine()); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// Measure does a job and writes a block of each operation and target, one to a line.
func Measure(ctx context.Context, j Job, w io.Writer) error {
	r, out := rand.New(rand.NewPCG(j.Seed, uint64(j.Round))), json.NewEncoder(w)
	for _, i := range r.Perm(3) {
		op := []load.Op{load.RR, load.CRR, load.Stream}[i]
		for _, k := range r.Perm(len(j.Targets)) {
			b, err := j.block(ctx, op, j.Targets[k], r.Uint64())
			if err != nil {
				return err
			}
			if err := out.Encode(b); err != nil {
				return err
			}
		}
	}
	return nil
}

// warm is how long an operation runs before it is measured, and patience how long a block of so many may take.
const (
	warm     = 20 * time.Millisecond
	patience = time.Minute
)

func (j Job) block(ctx context.Context, op load.Op, t Target, seed uint64) (b result.Block, err error) {
	c := load.Client{Targets: []netip.AddrPort{t.To}, Seed: seed, Sizes: testbed.OneByte, Close: load.Reset, Warm: warm,
		Most: j.Samples}
	d := patience
	if op == load.Stream {
		c.Targets[0] = netip.AddrPortFrom(t.To.Addr(), t.To.Port()+1)
		c.Sizes, c.Most, d = streamSizes, 0, j.Stream
	}
	s, err := c.Run(ctx, op, d)
	if err != nil {
		return b, fmt.Errorf("%s: %w", t.Arm, err)
	}
	if b, err = (result.Block{Measure: op.String(), Arm: t.Arm, Round: j.Round}).Timed(s); err != nil {
		return b, err
	}
	if op == load.Stream {
		if b.Counters == nil {
			b.Counters = map[string]float64{}
		}
		b.Counters["bytes"] = float64(streamSizes.Request) * float64(s.Ops)
	}
	return b, nil
}

// readBlocks returns the blocks that a client wrote, which must be of a job's arms and round, one of each operation.
func readBlocks(log []byte, j Job) (l []result.Block, err error) {
	in := bufio.NewScanner(bytes.NewReader(log))
	in.Buffer(nil, mostBytes)
	for in.Scan() {
		var b result.Block
		if err := json.Unmarshal(in.Bytes(), &b); err != nil {
			return nil, fmt.Errorf("the client's log is no measurement: %.200q", in.Text())
		}
		known := slices.ContainsFunc(j.Targets, func(t Target) bool { return t.Arm == b.Arm })
		if !known || !slices.Contains([]string{roundTrip, connection, stream}, b.Measure) || b.Round != j.Round {
			return nil, fmt.Errorf("the client's log has a block of %q of %q in round %d, which was not asked for", b.Measure,
				b.Arm, b.Round)
		}
		if b.Ops == 0 {
			return nil, fmt.Errorf("no %s of %s came through: %v; does a network policy of the namespace forbid it?",
				b.Measure, b.Arm, b.Errors)
		}
		l = append(l, b)
	}
	if in.Err() == nil && len(l) != 3*len(j.Targets) {
		return nil, fmt.Errorf("the client's log has %d blocks of %d", len(l), 3*len(j.Targets))
	}
	return l, errors.Join(in.Err())
}
