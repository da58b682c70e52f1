package attach

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/ipam"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/model"
)

// Line is what makes attachments true: the loops of all planes that a pod needs.
type Line interface {
	Change(put, del []model.NetworkPart)
	// Sync waits until all that was changed before is in the kernel, or refused.
	Sync(context.Context) error
	// SyncOwner waits until an owner's parts are in the kernel. The error says what of them is refused.
	SyncOwner(context.Context, model.Owner) error
}

// Options is what a server is told.
type Options struct {
	Pool *ipam.Pool
	Line Line
	// returns why no pod can be attached yet, as NotReady has it, nil if one can; the default is always nil
	Ready func() error
	// returns how an attachment's pod, in whose network namespace the calling thread is, isn't as it was made; "": it is
	Differs func(*model.Attachment) (string, error)
	// removes flows to and from addresses that others than connection tracking hold; nil: there are none
	Cut     func(of func(netip.Addr) bool) error
	Pods    Pods // nil: attachments are all that pods need
	Chained bool // another plugin connects pods: Line has no attachments, Pool no ranges
	Log     *slog.Logger
	AddWait time.Duration // how long an ADD waits for the kernel; 0: DefaultAddWait
	// how long STATUS waits until pods can be attached; 0: DefaultStatusWait
	StatusWait time.Duration
	// how long released devices have for the end of their pods' namespaces to take them along; 0: DefaultReleasedFor
	ReleasedFor time.Duration
}

// Pods has what pods need besides attachments put into the kernel.
type Pods interface {
	// Attach returns once what else a pod needs is in the kernel: its host ports, if it has some.
	Attach(ctx context.Context, a *model.Attachment, ports bool) error
	// Check returns what of that the kernel lacks.
	Check(ctx context.Context, a *model.Attachment) error
	// Detach is called when a pod has addresses no more, before another pod may get them.
	Detach(a *model.Attachment)
}

// DefaultAddWait is less than the runtime waits for the plugin.
const DefaultAddWait = 30 * time.Second

// DefaultStatusWait is longer than an agent takes from its start until pods can be attached, where the kernel has all
// already. It is less than a kubelet waits for the runtime.
const DefaultStatusWait = 10 * time.Second

// DefaultReleasedFor is longer than a runtime takes from DEL to the namespace's end.
const DefaultReleasedFor = 5 * time.Second

// Server serves the plugin. Its methods may be called from any goroutine.
type Server struct {
	options  Options
	ns       *netns.Namespace // of the node
	s        *netlink.Socket
	flows    *conntrack.Conn
	handled  sync.WaitGroup
	released chan struct{} // holds one while devices wait for their deletion
	freed    chan struct{} // holds one while flows may be left of addresses that are free

	mu       sync.Mutex
	network  *model.Network // nil: not decided yet
	begun    bool           // Line knows what is attached
	attached map[string]*model.Attachment
	sources  map[string][]netip.Prefix // of pods, by name: what they may send from beside their addresses
	busy     map[string]*turn
}

// turn is the requests about one attachment.
type turn struct {
	free    chan struct{} // holds one while no request is served
	cancel  context.CancelFunc
	waiting int
}

// New returns a server for the calling thread's network namespace. It knows the attachments that the pool has records
// of; Line does once Begin is called.
func New(o Options) (*Server, error) {
	o.AddWait = cmp.Or(o.AddWait, DefaultAddWait)
	o.StatusWait = cmp.Or(o.StatusWait, DefaultStatusWait)
	o.ReleasedFor = cmp.Or(o.ReleasedFor, DefaultReleasedFor)
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	socket, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	flows, err := conntrack.Open()
	if err != nil {
		return nil, errors.Join(err, socket.Close(), ns.Close())
	}
	s := &Server{options: o, ns: ns, s: socket, flows: flows, attached: map[string]*model.Attachment{},
		busy: map[string]*turn{}, released: make(chan struct{}, 1), freed: make(chan struct{}, 1)}
	devices, err := s.devices()
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	for _, r := range o.Pool.Records() {
		a := AttachmentOf(r)
		held, err := s.stillThere(a, devices)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		if !held { // the process died in between, or the pod has gone since
			if err := o.Pool.Release(r.ID); err != nil {
				return nil, errors.Join(err, s.Close())
			}
			continue
		}
		s.attached[r.ID] = a
	}
	return s, nil
}

// routed reports whether the node reaches a pod by its own child of the uplink.
func (s *Server) routed(a *model.Attachment) (bool, error) {
	devices, err := link.Veths(s.s, model.ChildDevice)
	if err != nil {
		return false, err
	}
	r, found, err := route.To(s.s, a.Addresses[0])
	return found && devices[r.Dev].Name == model.ChildDevice, err
}

// stillThere reports whether what a record stands for is still on the node, with its devices.
func (s *Server) stillThere(a *model.Attachment, devices map[string]bool) (bool, error) {
	switch {
	case a.Kind.IPVLAN():
		return s.routed(a)
	case s.options.Chained && a.Device == "":
		return true, nil // where it isn't known, its DEL says that it goes
	}
	return devices[a.Device], nil
}

// Attached returns what is attached, the newest last.
func (s *Server) Attached() []*model.Attachment {
	s.mu.Lock()
	defer s.mu.Unlock()
	made := func(a *model.Attachment) time.Time {
		r, _ := s.options.Pool.Record(a.ID)
		return r.Made
	}
	return slices.SortedFunc(maps.Values(s.attached), func(a, b *model.Attachment) int { return made(a).Compare(made(b)) })
}

// Begin passes the first parts of the pod network to Line, with all attachments that there are. Before, a DEL releases
// the device itself: Line would keep what it learns of later.
func (s *Server) Begin(put, del []model.NetworkPart) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun = true
	for _, a := range s.attached {
		put = append(put, a)
	}
	s.options.Line.Change(put, del)
}

// Close closes the server's handles, once Serve and Follow have returned.
func (s *Server) Close() error {
	return errors.Join(s.flows.Close(), s.s.Close(), s.ns.Close())
}

// devices returns the names of the node's devices of pods' kinds that may be attachments'.
func (s *Server) devices() (map[string]bool, error) {
	prefix := cni.DevicePrefix
	if s.options.Chained {
		prefix = ""
	}
	veths, err := link.Veths(s.s, prefix)
	names := make(map[string]bool, len(veths))
	for _, v := range veths {
		names[v.Name] = v.Group != link.ReleasedGroup
	}
	return names, err
}

// AttachmentOf returns the attachment of a record.
func AttachmentOf(r ipam.Record) *model.Attachment {
	a := &model.Attachment{ID: r.ID, Pod: r.Pod, UID: r.UID, Addresses: r.Addresses, Kind: model.DeviceKindOf(r.Device),
		Interface: r.Interface, Device: cni.Device(r.ID), NetNS: r.NetNS, MTU: r.MTU, Limits: model.Limits(r.Limits)}
	if r.Foreign {
		a.Device = r.End
		return a
	}
	if a.Kind.IPVLAN() {
		return a
	}
	a.MACs.Node, a.MACs.Pod = macOf(r.ID, 'n'), macOf(r.ID, 'p')
	return a
}

// macOf returns a locally administered link-layer address, a function of an attachment's ID and end.
func macOf(id string, end byte) (mac [6]byte) {
	mac[0], mac[1] = 0x02, end
	h := cni.Hash(id)
	for i := range 4 {
		mac[2+i] = byte(h >> (8 * i))
	}
	return mac
}

// SetNetwork sets what new attachments get: addresses of its ranges, and its MTU. nil: none can be made.
func (s *Server) SetNetwork(n *model.Network) {
	s.mu.Lock()
	s.network = n
	s.mu.Unlock()
	if n != nil {
		s.options.Pool.SetRanges(n.Ranges)
		netlink.Signal(s.freed) // of what a process before this one has left
	}
}

// Serve serves a listener until ctx ends, and closes it.
func (s *Server) Serve(ctx context.Context, l *net.UnixListener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer s.handled.Wait()
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("accept from the CNI plugin: %w", err)
		}
		s.handled.Go(func() { s.handle(ctx, c) })
	}
}

// idle is how long a connection may be without a whole request.
const idle = 5 * time.Second

func (s *Server) handle(ctx context.Context, c *net.UnixConn) {
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(idle))
	r, file, err := cni.Receive(c)
	var out cni.Response
	if err == nil {
		out.Result, err = s.serve(ctx, r, file)
	}
	file.Close()
	if err != nil {
		s.options.Log.Warn("CNI request failed", "command", r.Command, "pod", r.Pod, "container", r.Container, "error", err)
		out.Error = cni.ErrorOf(err)
	}
	if ctx.Err() == nil { // else the plugin calls the process that comes next
		cni.Reply(c, out)
	}
}

// serve serves one request.
func (s *Server) serve(ctx context.Context, r cni.Request, ns *os.File) (*cni.Result, error) {
	id := cni.Key(r.Container, r.Interface)
	switch r.Command {
	case cni.Add:
		if ns == nil {
			return nil, cni.Errorf(cni.CodeEnvironment, "no network namespace came with ADD")
		}
		return s.add(ctx, id, r, ns)
	case cni.Del:
		return nil, s.exclusively(ctx, id, true, func(ctx context.Context) error { return s.detach(ctx, id) })
	case cni.Check:
		if ns == nil {
			return nil, cni.Errorf(cni.CodeEnvironment, "no network namespace came with CHECK")
		}
		return nil, s.check(ctx, id, r, ns)
	case cni.GC:
		return nil, s.collect(ctx, r)
	case cni.Status:
		return nil, s.awaitStatus(ctx)
	}
	return nil, cni.Errorf(cni.CodeEnvironment, "unknown command %q", r.Command)
}

// NotReady returns the error of Options.Ready for a reason, nil without one. limited reports that pods
// that run may be cut off.
func NotReady(why string, limited bool) error {
	switch {
	case why == "":
		return nil
	case limited:
		return cni.Errorf(cni.CodeLimited, "this node is not ready: %s", why)
	}
	return cni.Errorf(cni.CodeUnavailable, "this node is not ready: %s", why)
}

// awaitStatus returns the status once pods can be attached, or can't for long: the runtime has the node be NotReady
// then, with all pods that run, which the start of an agent must not do.
func (s *Server) awaitStatus(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.options.StatusWait)
	defer cancel()
	for {
		err := s.status()
		if err == nil {
			return nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

// status returns why no pod can be attached now. Addresses that are all in use are no reason: pods that go free them.
func (s *Server) status() error {
	if s.options.Ready != nil {
		if err := s.options.Ready(); err != nil {
			return err
		}
	}
	if s.options.Chained {
		return nil
	}
	s.mu.Lock()
	n := s.network
	s.mu.Unlock()
	if n == nil || len(n.Ranges) == 0 {
		return cni.Errorf(cni.CodeUnavailable, "this node has no range of addresses for pods yet")
	}
	return nil
}

// exclusively runs f while no other request about an attachment is served. An interrupting one ends that which is.
func (s *Server) exclusively(ctx context.Context, id string, interrupts bool, f func(context.Context) error) error {
	s.mu.Lock()
	t := s.busy[id]
	if t == nil {
		t = &turn{free: make(chan struct{}, 1)}
		t.free <- struct{}{}
		s.busy[id] = t
	}
	t.waiting++
	if interrupts && t.cancel != nil {
		t.cancel()
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if t.waiting--; t.waiting == 0 {
			delete(s.busy, id)
		}
	}()
	select {
	case <-t.free:
	case <-ctx.Done():
		return ctx.Err()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.mu.Lock()
	if !interrupts {
		t.cancel = cancel
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		t.cancel = nil
		s.mu.Unlock()
		t.free <- struct{}{}
	}()
	return f(ctx)
}

func ownerOf(id string) model.Owner { return model.Owner{Kind: model.KindAttachment, Name: id} }

// add attaches a pod. One that is attached already has the same result.
func (s *Server) add(ctx context.Context, id string, r cni.Request, ns *os.File) (result *cni.Result, err error) {
	err = s.exclusively(ctx, id, false, func(ctx context.Context) error {
		result, err = s.attach(ctx, id, r, ns)
		return err
	})
	return result, err
}

func (s *Server) attach(ctx context.Context, id string, r cni.Request, ns *os.File) (*cni.Result, error) {
	if err := s.status(); err != nil {
		return nil, cni.Errorf(cni.CodeTryAgain, "%s", err)
	}
	if s.options.Chained != (r.Prev != nil) {
		return nil, errChain(s.options.Chained)
	}
	s.mu.Lock()
	was := s.attached[id]
	s.mu.Unlock()
	if was != nil && was.NetNS != r.NetNS { // the runtime lost a DEL
		if err := s.detach(ctx, id); err != nil {
			return nil, err
		}
	}
	first := was == nil || was.NetNS != r.NetNS
	record := s.allocate
	if s.options.Chained {
		record = s.adopt
	} else if first {
		if err := s.vacant(ns, r); err != nil {
			return nil, err
		}
	}
	a, err := record(id, r)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.options.AddWait)
	defer cancel()
	err = s.connect(ctx, a, ns, r.Ports, first)
	if err != nil {
		if a.Kind.IPVLAN() {
			err = errors.Join(err, deleteChild(ns, a.Interface))
		}
		err = errors.Join(err, s.detach(context.WithoutCancel(ctx), id))
		if ctx.Err() != nil {
			err = cni.Errorf(cni.CodeTryAgain, "%s", err)
		}
		return nil, err
	}
	if s.options.Chained {
		return nil, nil
	}
	return s.resultOf(a, r.NetNS)
}

// connect has all that a pod needs in the kernel: its attachment, and beside that what Pods has. A pod that was
// attached before may have changed its end as it likes.
func (s *Server) connect(ctx context.Context, a *model.Attachment, ns *os.File, ports, first bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	beside := make(chan error, 1)
	if s.options.Pods == nil {
		beside <- nil
	} else {
		go func() { beside <- s.options.Pods.Attach(ctx, a, ports) }()
	}
	err := s.put(ctx, a, ns)
	if err == nil && first && !s.options.Chained {
		err = s.await(ctx, a, ns)
	}
	if err != nil {
		cancel()
		<-beside
		return err
	}
	return <-beside
}

// errChain returns the error of an ADD with or without a plugin before this one.
func errChain(chained bool) error {
	if chained {
		return cni.Errorf(cni.CodeConfig, "the network configuration has no plugin before fairlead-cni, and the agent has "+
			"network.mode Chained: use the list that the agent writes, or network.mode Own")
	}
	return cni.Errorf(cni.CodeConfig, "the network configuration has another plugin before fairlead-cni, and the agent "+
		"has network.mode Own: remove that plugin, or use network.mode Chained")
}

// vacant returns an error where a pod's network namespace has an interface of the requested name already. What is left
// there of an attachment that was released goes.
func (s *Server) vacant(ns *os.File, r cni.Request) error {
	return netns.In(ns, func() error {
		pod, err := netlink.Open(unix.NETLINK_ROUTE, 0)
		if err != nil {
			return err
		}
		defer pod.Close()
		index, _, err := link.VethNamed(pod, r.Interface)
		if err == nil && index != 0 {
			if err = link.DeleteReleased(s.s, isPods); err == nil {
				index, _, err = link.VethNamed(pod, r.Interface)
			}
		}
		if err == nil && index != 0 {
			err = cni.Errorf(cni.CodeEnvironment, "CNI_IFNAME is %q: network namespace %s has an interface of that name "+
				"already; delete that interface, or recreate the pod", r.Interface, r.NetNS)
		}
		return err
	})
}

// isPods reports whether a device is named as the node's ends of pods' are.
func isPods(v link.Veth) bool { return strings.HasPrefix(v.Name, cni.DevicePrefix) }

// allocate returns the attachment of a pod with addresses of its own.
func (s *Server) allocate(id string, r cni.Request) (*model.Attachment, error) {
	s.mu.Lock()
	mtu, kind := s.network.MTU, s.network.Device
	s.mu.Unlock()
	if kind.IPVLAN() && r.Limits.Ingress > 0 {
		return nil, cni.Errorf(cni.CodeConfig, "%s has an ingress bandwidth, which device %s can't limit: remove the "+
			"annotation kubernetes.io/ingress-bandwidth, or set network.device to veth", r.Pod, kind)
	}
	record, err := s.options.Pool.Allocate(ipam.Record{ID: id, Pod: r.Pod, UID: r.UID, Interface: r.Interface,
		NetNS: r.NetNS, Network: r.Network, MTU: mtu, Addresses: r.IPs, Device: kind.String(), Limits: r.Limits})
	if inUse := (*ipam.InUse)(nil); errors.As(err, &inUse) {
		return nil, cni.Errorf(cni.CodeConfig, "%s", err)
	} else if err != nil {
		return nil, cni.Errorf(cni.CodeTryAgain, "%s", err)
	}
	if l := record.Reused; len(l) > 0 {
		if err := s.cut(func(a netip.Addr) bool { return slices.Contains(l, a) }); err != nil {
			return nil, errors.Join(err, s.options.Pool.Release(id))
		}
	}
	return AttachmentOf(record), nil
}

// cut removes flows to and from addresses that another pod had: what they translate would reach the one that has the
// address now.
func (s *Server) cut(of func(netip.Addr) bool) error {
	var err error
	if s.options.Cut != nil {
		err = s.options.Cut(of)
	}
	_, failed := s.flows.Cut(func(f conntrack.Flow) bool {
		return of(f.Source.Addr()) || of(f.Destination.Addr()) || of(f.ReplySource.Addr())
	})
	if err = errors.Join(err, failed); err != nil {
		return fmt.Errorf("cut the connections of pods that have gone: %w", err)
	}
	return nil
}

// put has the kernel hold an attachment, in place of the same one, if there is one. While it is made, it has the
// network
// namespace by the file that came with the request.
func (s *Server) put(ctx context.Context, a *model.Attachment, ns *os.File) error {
	made := *a
	made.NetNS = fmt.Sprintf("/proc/self/fd/%d", ns.Fd())
	s.exchange(a.ID, &made)
	err := s.options.Line.SyncOwner(ctx, ownerOf(a.ID))
	s.exchange(a.ID, a)
	return err
}

// await waits until the kernel has done in the background what follows from an attachment: before, packets are lost.
func (s *Server) await(ctx context.Context, a *model.Attachment, ns *os.File) error {
	return netns.In(ns, func() error {
		pod, err := netlink.Open(unix.NETLINK_ROUTE, 0)
		if err != nil {
			return err
		}
		defer pod.Close()
		for wait := 50 * time.Microsecond; ; wait = min(2*wait, 5*time.Millisecond) {
			lacks, err := s.lacks(a, pod)
			if err != nil || lacks == "" {
				return err
			}
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return fmt.Errorf("%s: %w", lacks, ctx.Err())
			}
		}
	})
}

// lacks returns what a new attachment still lacks, "" for nothing: both ends of its device are to pass packets, and the
// pod to take packets to its addresses. pod is a socket in its network namespace.
func (s *Server) lacks(a *model.Attachment, pod *netlink.Socket) (string, error) {
	if !a.Kind.IPVLAN() {
		for _, end := range []struct {
			*netlink.Socket
			name string
		}{{s.s, a.Device}, {pod, a.Interface}} {
			if up, err := link.Operational(end.Socket, end.name); err != nil || !up {
				return "device " + end.name + " passes no packets", err
			}
		}
	}
	for _, x := range a.Addresses {
		if r, _, err := route.To(pod, x); err != nil || r.Type != route.Local {
			return fmt.Sprintf("the pod takes no packets to %s", x), err
		}
	}
	return "", nil
}

// exchange puts an attachment in place of what there is under its ID; nil: nothing.
func (s *Server) exchange(id string, a *model.Attachment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replace(id, a)
}

// replace is exchange. s.mu is held.
func (s *Server) replace(id string, a *model.Attachment) {
	var put, del []model.NetworkPart
	if was := s.attached[id]; was != nil {
		del = append(del, was)
		delete(s.attached, id)
	}
	if a != nil {
		a.Sources = s.sources[a.Pod]
		put = append(put, a)
		s.attached[id] = a
	}
	if s.begun {
		s.options.Line.Change(put, del)
	}
}

// SetSources sets what pods may send from beside their addresses, by their names.
func (s *Server) SetSources(sources map[string][]netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sources = sources
	for id, a := range s.attached {
		if !slices.Equal(a.Sources, sources[a.Pod]) {
			other := *a
			s.replace(id, &other)
		}
	}
}

// detach makes an attachment untrue and frees its addresses. One that isn't there is no error.
func (s *Server) detach(ctx context.Context, id string) error {
	s.mu.Lock()
	a, begun := s.attached[id], s.begun
	if a != nil && !begun { // so that Begin doesn't pass it on
		delete(s.attached, id)
	}
	s.mu.Unlock()
	if a != nil && s.options.Pods != nil {
		s.options.Pods.Detach(a)
	}
	if a != nil && begun {
		s.exchange(id, nil)
		s.options.Line.Sync(ctx) // the error may be about other pods; the kernel tells about this one
	}
	var device netlink.Batch
	link.Release(&device, cni.Device(id)) // it is, unless Line failed or isn't there yet
	if err := s.s.Apply(&device); err != nil {
		return cni.Errorf(cni.CodeTryAgain, "the addresses of %s aren't free: %s", id, err)
	}
	err := s.options.Pool.Release(id)
	netlink.Signal(s.released)
	netlink.Signal(s.freed)
	return err
}

// deleteChild deletes a pod's interface after an ADD that failed: another pod can't have its addresses before. After a
// DEL, the plugin does, which sees the pod's network namespace wherever the agent runs.
func deleteChild(ns *os.File, name string) error {
	return netns.In(ns, func() error {
		pod, err := netlink.Open(unix.NETLINK_ROUTE, 0)
		if err != nil {
			return err
		}
		defer pod.Close()
		var b netlink.Batch
		link.DeleteNamed(&b, name)
		return pod.Apply(&b)
	})
}

// check returns how an attachment isn't as it was made.
func (s *Server) check(ctx context.Context, id string, r cni.Request, ns *os.File) error {
	s.mu.Lock()
	a := s.attached[id]
	s.mu.Unlock()
	if a == nil {
		return cni.Errorf(cni.CodeCheck, "container %s has no interface %s", r.Container, r.Interface)
	}
	if s.options.Chained {
		if err := s.stands(a, r); err != nil {
			return err
		}
		return s.inForce(ctx, a)
	}
	for _, ip := range prevIPs(r) {
		if x := ip.Address.Addr(); !slices.Contains(a.Addresses, x) && ip.Interface != nil {
			return cni.Errorf(cni.CodeCheck, "address %s is not that of the interface, which has %v", x, a.Addresses)
		}
	}
	if err := s.options.Line.SyncOwner(ctx, ownerOf(id)); err != nil {
		return cni.Errorf(cni.CodeCheck, "%s", err)
	}
	var differs string
	err := netns.In(ns, func() (err error) {
		differs, err = s.options.Differs(a)
		return err
	})
	if err == nil && differs != "" {
		err = cni.Errorf(cni.CodeCheck, "%s; the pod changed it: recreate the pod", differs)
	}
	if err == nil {
		err = s.inForce(ctx, a)
	}
	return err
}

func prevIPs(r cni.Request) []cni.IP {
	if r.Prev == nil {
		return nil
	}
	return r.Prev.IPs
}

// collect detaches what of a network isn't valid any more.
func (s *Server) collect(ctx context.Context, r cni.Request) (err error) {
	valid := map[string]bool{}
	for _, a := range r.Valid {
		valid[cni.Key(a.Container, a.Interface)] = true
	}
	for _, record := range s.options.Pool.Records() {
		if record.Network == r.Network && !valid[record.ID] {
			err = errors.Join(err, s.exclusively(ctx, record.ID, true, func(ctx context.Context) error {
				return s.detach(ctx, record.ID)
			}))
		}
	}
	return err
}

// Follow detaches pods that lost their devices with their network namespaces, until ctx ends. Of pods that are
// connected by ipvlan no device of the node tells that: their DEL does, or GC. It deletes devices that were
// released, and cuts flows of addresses that are free, at first those that an earlier agent left.
func (s *Server) Follow(ctx context.Context) error {
	var cuts sync.WaitGroup
	defer cuts.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cuts.Go(func() { s.settle(ctx) })
	signals, err := link.WatchDevices(ctx, s.ns, link.Gone)
	if err != nil {
		return err
	}
	socket, err := netlink.OpenIn(s.ns, unix.NETLINK_ROUTE) // of its own: a deletion takes its time
	if err != nil {
		return err
	}
	defer socket.Close()
	for due := time.After(0); ; {
		task, err := "", error(nil)
		select {
		case _, more := <-signals:
			if !more {
				return nil
			}
			task, err = "pods whose network namespaces have gone are still attached", s.sweep(ctx)
		case <-s.released:
			if due == nil {
				due = time.After(s.options.ReleasedFor)
			}
		case <-due:
			due = nil
			// each program at a device that goes costs a grace period under the RTNL lock
			if err = bpf.Expedited(func() error { return link.DeleteReleased(socket, isPods) }); err != nil {
				task, due = "devices of pods that have gone are still there", time.After(s.options.ReleasedFor)
			}
		}
		if err != nil && ctx.Err() == nil {
			s.options.Log.Warn(task+", retrying", "error", err)
		}
	}
}

// leastSettled is how long settle leaves between two cuts, at least.
const leastSettled = time.Second

// settle cuts what is left of flows of addresses that are free, until ctx ends, so that who has one of them next need
// not wait for that: connection tracking is read whole, once a family. It leaves nine times as long as a cut takes
// between two.
func (s *Server) settle(ctx context.Context) {
	for {
		select {
		case <-s.freed:
		case <-ctx.Done():
			return
		}
		began := time.Now()
		if err := s.options.Pool.Settle(s.cut); err != nil {
			s.options.Log.Warn("connections of pods that have gone are still there, retrying", "error", err)
			netlink.Signal(s.freed)
		}
		select {
		case <-time.After(max(leastSettled, 9*time.Since(began))):
		case <-ctx.Done():
			return
		}
	}
}

func (s *Server) sweep(ctx context.Context) error {
	devices, err := s.devices()
	if err != nil {
		return err
	}
	s.mu.Lock()
	var gone []*model.Attachment
	for id, a := range s.attached {
		if a.Device != "" && !devices[a.Device] && !a.Kind.IPVLAN() && s.busy[id] == nil {
			gone = append(gone, a)
		}
	}
	s.mu.Unlock()
	for _, a := range gone {
		if !s.options.Chained && lives(a.NetNS) {
			continue // the loop makes the device again
		}
		err = errors.Join(err, s.exclusively(ctx, a.ID, true, func(ctx context.Context) error {
			if there, err := s.devices(); err != nil || there[a.Device] { // it has come since
				return err
			}
			return s.detach(ctx, a.ID)
		}))
	}
	return err
}

// lives reports whether a network namespace can be opened by its path.
func lives(path string) bool {
	if path == "" || strings.HasPrefix(path, "/proc/self/fd/") {
		return false
	}
	file, err := os.Open(path)
	if err != nil {
		return false
	}
	defer file.Close()
	return netns.In(file, func() error { return nil }) == nil
}

// ends returns the name of the node's end of an attachment's device, and the link-layer addresses of both ends.
func (s *Server) ends(a *model.Attachment) (string, model.Ends, error) {
	if !a.Kind.IPVLAN() {
		return a.Device, a.MACs, nil
	}
	devices, err := link.Veths(s.s, model.ChildDevice)
	for _, v := range devices {
		if v.Name == model.ChildDevice {
			return v.Name, model.Ends{Node: v.MAC, Pod: v.MAC}, err
		}
	}
	return "", model.Ends{}, errors.Join(err, fmt.Errorf("this node has no device %s any more", model.ChildDevice))
}

// resultOf returns the CNI result of an attachment.
func (s *Server) resultOf(a *model.Attachment, ns string) (*cni.Result, error) {
	device, macs, err := s.ends(a)
	if err != nil {
		return nil, cni.Errorf(cni.CodeTryAgain, "%s", err)
	}
	inside := 1
	r := &cni.Result{Interfaces: []cni.Interface{
		{Name: device, MAC: net.HardwareAddr(macs.Node[:]).String(), MTU: a.MTU},
		{Name: a.Interface, MAC: net.HardwareAddr(macs.Pod[:]).String(), MTU: a.MTU, Sandbox: ns}}}
	for _, x := range a.Addresses {
		gateway, all := model.Gateways[0], netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if x.Is6() {
			gateway, all = model.Gateways[1], netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		r.IPs = append(r.IPs, cni.IP{Address: netip.PrefixFrom(x, x.BitLen()), Gateway: &gateway, Interface: &inside})
		r.Routes = append(r.Routes, cni.Route{Dst: all, GW: &gateway})
	}
	return r, nil
}
