package connect

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// datagrams is where the Service of UDP is: no other has that address.
var datagrams = netip.AddrPortFrom(generate.ServiceAddress(generate.MaxServices-1), 80)

// exchange is what sockets do while programs' runs are counted.
type exchange struct {
	name      string // in results
	family    int
	kind      int  // of socket
	connected bool // datagrams' socket is
}

var exchanges = []exchange{
	{"TCP", unix.AF_INET, unix.SOCK_STREAM, true},
	{"TCP by IPv6 socket", unix.AF_INET6, unix.SOCK_STREAM, true},
	{"UDP, connected", unix.AF_INET, unix.SOCK_DGRAM, true},
	{"UDP", unix.AF_INET, unix.SOCK_DGRAM, false},
	{"UDP by IPv6 socket, connected", unix.AF_INET6, unix.SOCK_DGRAM, true},
}

// to returns where an exchange goes beside so many Services.
func (e exchange) to(services int) unix.Sockaddr {
	at := testbed.ServiceEntry(experiment.ServiceAt(experiment.Middle, services))
	if e.kind == unix.SOCK_DGRAM {
		at = datagrams
	}
	if e.family == unix.AF_INET {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
}

// do makes a socket, has it connect and ask for its peer, or send a datagram and hear the answer, or both, and closes
// it.
func (e exchange) do(to unix.Sockaddr) error {
	fd, err := unix.Socket(e.family, e.kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	wait := unix.NsecToTimeval(int64(time.Second))
	if e.kind == unix.SOCK_STREAM {
		err = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // no port is used up
	}
	if err = errors.Join(err, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait)); err != nil {
		return err
	}
	if e.connected {
		if err := unix.Connect(fd, to); err != nil {
			return fmt.Errorf("connect: %w", err)
		}
		if _, err := unix.Getpeername(fd); err != nil {
			return fmt.Errorf("ask for the peer: %w", err)
		}
		to = nil
	}
	if e.kind == unix.SOCK_STREAM {
		return nil
	}
	return exchangeDatagram(fd, to)
}

// exchangeDatagram sends a datagram and hears the answer.
func exchangeDatagram(fd int, to unix.Sockaddr) error {
	b := [16]byte{}
	var err error
	if to == nil {
		_, err = unix.Write(fd, b[:])
	} else {
		err = unix.Sendto(fd, b[:], 0, to)
	}
	if err != nil {
		return fmt.Errorf("send a datagram: %w", err)
	}
	err = unix.EINTR // a socket whose wait has a limit isn't waited for again after a signal, such as Go's own (signal(7))
	for err == unix.EINTR {
		_, _, err = unix.Recvfrom(fd, b[:], 0)
	}
	if err != nil {
		return fmt.Errorf("hear a datagram: %w", err)
	}
	return nil
}

// readPrograms records how large the programs are, and what to count their runs takes; and adds a Service of UDP.
func (r *trial) readPrograms(ctx context.Context) error {
	nodes := r.grid.NodesOf(experiment.ArmEBPF)
	runs, err := programs(nodes[0])
	if err != nil {
		return err
	}
	for _, p := range runs {
		b := result.Block{Arm: experiment.ArmEBPF, Params: result.Params{"program": p.Hook}}
		if err := errors.Join(r.out.AddValue(b, "instructions", float64(p.Instructions)),
			r.out.AddValue(b, "verified", float64(p.Verified))); err != nil {
			return err
		}
	}
	for i := range overheads {
		shown, cost, err := bpf.Overhead()
		if err != nil {
			return err
		}
		b := result.Block{Arm: experiment.ArmEBPF, Round: i}
		if err := errors.Join(r.out.AddValue(b, "shown", float64(shown)),
			r.out.AddValue(b, "cost", float64(cost))); err != nil {
			return err
		}
	}
	for _, n := range nodes {
		if err := r.addDatagrams(ctx, n); err != nil {
			return fmt.Errorf("add a Service of UDP to %s: %w", n.Pair.Near.Name, err)
		}
	}
	return nil
}

// overheads is how many times the cost of counting is measured.
const overheads = 21

// programs returns what the kernel knows of a node's programs.
func programs(n *testbed.Node) (runs []bpf.Run, err error) {
	err = n.Pair.Near.Do(func() error {
		runs, err = ebpf.Runs()
		return err
	})
	return runs, err
}

// addDatagrams adds a Service of UDP to a node's cluster, and a server behind it that says back what it hears.
func (r *trial) addDatagrams(ctx context.Context, n *testbed.Node) error {
	for i := range testbed.Endpoints {
		var c net.PacketConn
		err := n.Pair.Far.Do(func() (err error) {
			c, err = net.ListenPacket("udp4", netip.AddrPortFrom(testbed.ServerAddr(i), testbed.ServerPort).String())
			return err
		})
		if err != nil {
			return err
		}
		r.bed.Defer(c.Close)
		go repeat(c)
	}
	return n.Change(ctx, func() error {
		for _, o := range datagramService() {
			if _, err := n.Folder.Save(o); err != nil {
				return err
			}
		}
		return nil
	})
}

// repeat sends back what comes until the socket is closed.
func repeat(c net.PacketConn) {
	b := make([]byte, 1500)
	for {
		n, from, err := c.ReadFrom(b)
		if err == nil {
			_, err = c.WriteTo(b[:n], from)
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
	}
}

// datagramService returns the EndpointSlice of a Service of UDP, then the Service.
func datagramService() []source.Object {
	c, udp := testbed.NewCluster(1), corev1.ProtocolUDP
	e := c.Slice(0)
	s := c.Objects[1].(*corev1.Service)
	s.Name, s.Spec.ClusterIP, s.Spec.ClusterIPs = "datagrams", datagrams.Addr().String(),
		[]string{datagrams.Addr().String()}
	s.Spec.Ports[0].Protocol = udp
	e.Name, e.Labels = s.Name, map[string]string{discoveryv1.LabelServiceName: s.Name}
	e.Ports[0].Protocol = &udp
	return []source.Object{e, s}
}

// countRuns has the kernel count the runs of programs in a block of each exchange at each number of Services.
func (r *trial) countRuns(ctx context.Context, round int) error {
	stop, err := bpf.Measure()
	if err != nil {
		return err
	}
	defer stop.Close()
	nodes := r.grid.NodesOf(experiment.ArmEBPF)
	for _, e := range exchanges {
		for _, n := range nodes {
			if err := r.countBlock(ctx, round, n, e); err != nil {
				return fmt.Errorf("%s at %d Services: %w", e.name, n.Pair.Services, err)
			}
		}
	}
	return nil
}

// countBlock records what ran, how often for each exchange and how long each time, in a block of one kind.
func (r *trial) countBlock(ctx context.Context, round int, n *testbed.Node, e exchange) error {
	before, err := programs(n)
	if err != nil {
		return err
	}
	begin := time.Now()
	err = r.bed.ClientThread(n.Pair).Do(func() error {
		to := e.to(n.Pair.Services)
		for range r.profile.Each {
			if err := errors.Join(e.do(to), ctx.Err()); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	b := result.Block{Arm: experiment.ArmEBPF, Round: round, Start: begin, Wall: time.Since(begin)}
	after, err := programs(n)
	if err != nil {
		return err
	}
	for i, p := range after {
		count, elapsed := p.Count-before[i].Count, p.Time-before[i].Time
		// the others run as for an IPv4 socket
		if count == 0 || e.family == unix.AF_INET6 && !strings.HasSuffix(p.Hook, "6") {
			continue
		}
		b.Params = testbed.ServiceParams(n.Pair.Services).With("program", p.Hook+", "+e.name)
		if err := errors.Join(r.out.AddValue(b, "run", float64(elapsed)/float64(count)),
			r.out.AddValue(b, "runs", float64(count)/float64(r.profile.Each))); err != nil {
			return err
		}
	}
	return nil
}

// programMeasures are those of eBPF programs.
func programMeasures(p profile) []result.Measure {
	return []result.Measure{
		{ID: "run", Title: "run time of an eBPF program", Unit: "ns", Stat: result.Value,
			Text: fmt.Sprintf("by the kernel's statistics, on average over a block of %d exchanges, what they show of a "+
				"program that does nothing included; median over %d blocks", p.Each, p.Counted)},
		{ID: "runs", Detail: true, Title: "runs of an eBPF program for each exchange", Stat: result.Value,
			Text: "likewise: a socket that is made, used once and closed. Packets' programs run for every packet of the node, " +
				"also for those that they have no part in, as here: clients on the node are translated before"},
		{ID: "shown", Title: "statistics' own part of a run time", Unit: "ns", Stat: result.Value,
			Text: "what they show of a program that does nothing"},
		{ID: "cost", Title: "statistics' cost for each run", Unit: "ns", Stat: result.Value,
			Text: "how much longer a run of that program takes while runs are counted"},
		{ID: "instructions", Title: "instructions of an eBPF program", Stat: result.Value, Exact: true,
			Text: "with its functions, after the verifier has rewritten it (bpftool calls that xlated); a run executes a " +
				"part of them"},
		{ID: "verified", Title: "instructions that the verifier walked", Stat: result.Value, Exact: true,
			Text: "along every way through the program, functions that it verifies by themselves included; the kernel's limit " +
				"is 1,000,000"},
	}
}
