package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/kernel/ipvs"
	"fairlead.dev/fairlead/kernel/netlink"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

const longLost = "IPVS forwards no ICMP error about a packet that is too long for its path, and a node's own IPv6 " +
	"fragments don't get through it"

// Capabilities is what the plane supports.
var Capabilities = model.Capabilities{
	Name:       "ipvs",
	Schedulers: model.AllSchedulers &^ model.SchedulersOf(model.Random, model.DestinationHash),
	Tracked:    true,
	PreDNAT:    true,
	Unsupported: model.Unsupported{NoIPVLAN: service.PodsBypass, NoDirect: service.RepliesReturn,
		NoRemote: "its rules lead packets for this node's addresses to IPVS, and no others",
		NoLocal:  "its rules lead node ports alone from loopback addresses to IPVS"},
	Long: []model.Remark{{ID: "long", Text: longLost, About: service.All()},
		{ID: "long-unmatched", Text: longLost, About: &model.Packets{Unmatched: true}}},
	Remarks: []model.Remark{service.RemarkForward, service.RemarkInvalid, service.RemarkRemote,
		{ID: "udp-policy-local", Text: "A UDP flow ends when a traffic policy that becomes Local leaves its Service port " +
			"without a virtual server: if no other of its addresses has policy Cluster.", About: service.Over(model.UDP)},
		{ID: "schedulers", Text: "IPVS has no random scheduler: weighted round-robin replaces it. Its destination hash " +
			"can't pass over an endpoint that terminates, so it isn't offered.",
			About: service.Scheduled(model.Random, model.DestinationHash)},
		{ID: "source-hash-size", Text: "Its source hash has 256 entries (CONFIG_IP_VS_SH_TAB_BITS) for any number of " +
			"endpoints: of ten, six have 26 of them and four 25.", About: service.Scheduled(model.SourceHash)},
		{ID: "local-delivery", Text: "Packets to Services are delivered locally: a firewall must accept them in its " +
			"input chains."},
		{ID: "mtu", Text: "Packets longer than their path's MTU are lost: IPVS forwards no ICMP error about them, and a " +
			"node's own IPv6 fragments don't pass it.", About: service.Over(model.UDP)},
		{ID: "source-port", Text: "A client's port is one connection to an endpoint: the same source port to another " +
			"entry of the Service, if masqueraded, ends the first connection."},
		{ID: "ipv6-loopback", Text: "IPv6 Services are unreachable if IPv6 is off at the loopback device " +
			"(net.ipv6.conf.lo.disable_ipv6) when the agent starts.", About: &model.Packets{Family: 6}},
		{ID: "mark", Text: "Packets to Services carry mark 0x5e in the low 12 bits from prerouting until IPVS has " +
			"forwarded them, then 0x5f: any other mark is replaced."},
		{ID: "affinity-uncounted", Text: "Clients that session affinity remembers are sent to their endpoint by connection " +
			"tracking, so that least-connections schedulers don't count them.", About: &model.Packets{Affinity: true}},
		{ID: "tcp-stale", Text: "TCP connections outlive their endpoint and their Service until they end or are silent " +
			"for a day; stale entries are removed with the next change.", About: service.Over(model.TCP)},
		{ID: "loopback-ports", Text: "Node ports at loopback addresses answer processes that connect from 127.0.0.1, not " +
			"from another loopback address.", About: &model.Packets{NodePorts: true, Origins: model.OriginsOf(model.FromNode)}},
		{ID: "host-ports-loopback", Text: "Host ports don't answer at 127.0.0.1: processes of the node use its own " +
			"address.", About: &model.Packets{Via: model.ViaHostPort, Origins: model.OriginsOf(model.FromNode)}},
		{ID: "no-notices", Text: "IPVS notifies about no changes: changes by other programs are repaired at the " +
			"next check, not at once."},
	},
}

// Options are settings of the plane.
type Options struct {
	Timeouts Timeouts // zero: a day for TCP, the kernel's own for the others
}

// Timeouts are how long silent connections are remembered.
type Timeouts = ipvs.Timeouts

// Plane writes facts into one network namespace. It implements dataplane.Plane[model.ServicePart, Key, string],
// dataplane.Watcher and dataplane.Cleaner.
type Plane struct {
	Options
	nft     *nft.Conn
	ipvs    *ipvs.Conn
	routes  *netlink.Socket
	sysctls map[string]*sysctl.File // nil: this kernel has it not
	// at the loopback device, when the plane was opened: the kernel takes no route there
	withoutIPv6 bool
	numbers     *numbering              // nil: not read yet
	present     map[ipvs.ServiceID]bool // services that are there, also those that are leaving
	leaving     map[ipvs.ServiceID]*leaving
	lingers     map[Key]lingering // by elements of frontends that are no more
}

var (
	_ dataplane.Plane[model.ServicePart, Key, string] = (*Plane)(nil)
	_ dataplane.Watcher                               = (*Plane)(nil)
	_ dataplane.Cleaner                               = (*Plane)(nil)
)

// sysctls are IPVS's settings that the plane needs, by their names below net/ipv4/vs.
var sysctls = map[string]struct {
	want     string
	optional bool // kernels before some version have it not
}{
	"conntrack":          {want: "1"}, // connections are tracked, so that sources can be hidden
	"expire_nodest_conn": {want: "1"}, // a connection whose destination is gone is scheduled anew, or ends
	"conn_reuse_mode":    {want: "1"}, // a client's port that is used again is a new connection
	"sloppy_tcp":         {want: "0"}, // only SYN opens a connection: the rest of a lost one is refused
	"drop_entry":         {want: "0"}, // no connection is forgotten at random
	"drop_packet":        {want: "0"}, // no packet is lost at random
	// nothing reads rates, which cost a walk through all every two seconds
	"run_estimation": {want: "0", optional: true},
}

// Prepare sets the sysctls that a plane needs, for an agent in a container that can't write them. They stay so: a plane
// that finds them set sets none, and restores none.
func Prepare() error {
	c, err := ipvs.Open() // has the kernel load IPVS, which makes them
	if err != nil {
		return err
	}
	errs := []error{c.Close()}
	for name, s := range sysctls {
		_, _, err := sysctl.Ensure("net/ipv4/vs/"+name, s.want)
		if !s.optional || !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// timeoutTCP is how long IPVS remembers a TCP connection that says nothing: its default of 15 minutes cuts what lives.
const timeoutTCP = 24 * time.Hour

// timeouts are IPVS's settings that are no sysctls, by their names here.
var timeouts = map[string]func(*ipvs.Timeouts) *time.Duration{
	"timeout":    func(t *ipvs.Timeouts) *time.Duration { return &t.TCP },
	"timeoutFIN": func(t *ipvs.Timeouts) *time.Duration { return &t.FIN },
	"timeoutUDP": func(t *ipvs.Timeouts) *time.Duration { return &t.UDP },
}

// New opens the plane of the calling thread's network namespace, with the default options.
func New() (*Plane, error) { return Open(Options{}) }

// Open is New, with options.
func Open(o Options) (_ *Plane, err error) {
	o.Timeouts.TCP = cmp.Or(o.Timeouts.TCP, timeoutTCP)
	p := &Plane{Options: o, sysctls: map[string]*sysctl.File{}, present: map[ipvs.ServiceID]bool{},
		leaving: map[ipvs.ServiceID]*leaving{}, lingers: map[Key]lingering{}}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	if p.nft, err = nft.Open(); err != nil {
		return nil, err
	}
	if p.ipvs, err = ipvs.Open(); err != nil {
		return nil, err
	}
	if p.routes, err = netlink.Open(unix.NETLINK_ROUTE, 0); err != nil {
		return nil, fmt.Errorf("ipvs: %w", err)
	}
	off, err := sysctl.Number("net/ipv6/conf/lo/disable_ipv6")
	p.withoutIPv6 = err != nil || off != 0
	for name, s := range sysctls {
		open, err := sysctl.Open("net/ipv4/vs/" + name)
		if err != nil && !(s.optional && errors.Is(err, fs.ErrNotExist)) {
			return nil, fmt.Errorf("ipvs: %w", err)
		}
		p.sysctls[name] = open
	}
	return p, nil
}

// Close closes the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error {
	for _, s := range p.sysctls {
		if s != nil {
			s.Close()
		}
	}
	var errs []error
	if p.routes != nil {
		errs = append(errs, p.routes.Close())
	}
	if p.ipvs != nil {
		errs = append(errs, p.ipvs.Close())
	}
	if p.nft != nil {
		errs = append(errs, p.nft.Close())
	}
	return errors.Join(errs...)
}

// Watch implements dataplane.Watcher, for the table: IPVS itself notifies of nothing.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	return declared.Watch(ctx, p.nft)
}

// Affinity returns how many clients are remembered, by family. It may be called at any time.
func (p *Plane) Affinity() (uses []service.AffinityUse, err error) {
	for _, f := range protos {
		n, err := p.nft.Count(Table, "affinity"+f.Name)
		if err != nil {
			return nil, err
		}
		uses = append(uses, service.AffinityUse{Family: "IPv" + f.Name, Entries: n, Limit: affinitySize})
	}
	return uses, nil
}

// Clean implements dataplane.Cleaner: packets are let go first, then IPVS forgets, then all is set back.
func (p *Plane) Clean(context.Context) error {
	for _, f := range protos {
		if err := deliveryOf(f).remove(p.routes); err != nil {
			return err
		}
	}
	services, err := p.ipvs.Services()
	if err != nil {
		return err
	}
	var b ipvs.Batch
	for _, s := range services {
		if ours(s.ServiceID) {
			b.DelService(s.ServiceID)
		}
	}
	if err := p.ipvs.Run(&b); err != nil {
		return err
	}
	p.forget()
	return p.removeTable()
}

// forget forgets what is only in the kernel.
func (p *Plane) forget() {
	p.numbers, p.present = newNumbering(), map[ipvs.ServiceID]bool{}
	p.leaving, p.lingers = map[ipvs.ServiceID]*leaving{}, map[Key]lingering{}
}

// ours reports whether a service is one of this plane's.
func ours(s ipvs.ServiceID) bool { return s.Mark&ourBits == claimed }

// A chain without rules remembers a setting that we changed, for Clean: was-NAME-VALUE.
const was = "was-"

// remember leaves a mark of what a setting was, if that isn't remembered yet.
func (p *Plane) remember(setting, value string) error {
	chains, err := p.nft.Chains(Table)
	if err != nil {
		return err
	}
	for _, c := range chains {
		if strings.HasPrefix(c, was+setting+"-") {
			return nil
		}
	}
	var tx nft.Tx
	tx.AddChain(Table, nft.Chain{Name: was + setting + "-" + value})
	return p.nft.Commit(&tx)
}

// setBack returns settings the values that they had, and forgets these.
func (p *Plane) setBack(chains []string, settings func(string) bool) error {
	var tx nft.Tx
	for _, c := range chains {
		i := strings.LastIndexByte(c, '-')
		if !strings.HasPrefix(c, was) || i < len(was) || !settings(c[len(was):i]) {
			continue
		}
		if err := p.writeSetting(c[len(was):i], c[i+1:]); err != nil {
			return err
		}
		tx.DelChain(Table, c)
	}
	return p.nft.Commit(&tx)
}

// writeSetting sets a setting.
func (p *Plane) writeSetting(setting, value string) error {
	of := timeouts[setting]
	if of == nil {
		return p.writeSysctl(setting, value)
	}
	d, err := time.ParseDuration(value)
	if err != nil {
		return fmt.Errorf("ipvs: read %q as the %s: %w", value, setting, err)
	}
	var t ipvs.Timeouts
	*of(&t) = d
	return p.ipvs.SetTimeouts(t)
}

// setting returns a setting's value, and for one that this kernel hasn't the wanted one.
func (p *Plane) setting(name string) (string, error) {
	if of := timeouts[name]; of != nil {
		t, err := p.ipvs.Timeouts()
		return of(&t).String(), err
	}
	s := p.sysctls[name]
	if s == nil {
		return sysctls[name].want, nil
	}
	value, err := s.Get()
	if err != nil {
		return "", fmt.Errorf("ipvs: %w", err)
	}
	return value, nil
}

// writeSysctl sets a sysctl of the plane's namespace.
func (p *Plane) writeSysctl(name, value string) error {
	s := p.sysctls[name]
	if s == nil {
		return nil
	}
	if err := s.Set(value); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	return nil
}
