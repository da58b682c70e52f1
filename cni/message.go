package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Versions are the versions of the specification that the plugin speaks, the newest last.
var Versions = []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// ListVersions are those of the network configuration that the agent writes for its own network, the newest last. A
// runtime uses the newest that it knows (libcni since 1.2), or the first without knowing of the others.
var ListVersions = []string{"1.0.0", "1.1.0"}

// The error codes of the specification, and those of this plugin, from 100 on.
const (
	CodeVersion     = 1 // of the specification, not spoken here
	CodeEnvironment = 4
	CodeIO          = 5
	CodeDecode      = 6
	CodeConfig      = 7
	CodeTryAgain    = 11
	CodeUnavailable = 50 // STATUS: no ADD can be served, pods that are there work
	CodeLimited     = 51 // STATUS: no ADD can be served, pods that are there may be cut off
	CodeFailed      = 100
	CodeCheck       = 101 // CHECK: an attachment isn't as it should be
)

// Error is an error as the runtime reads it.
type Error struct {
	Version string `json:"cniVersion,omitempty"`
	Code    uint   `json:"code"`
	Msg     string `json:"msg"`
	Details string `json:"details,omitempty"`
}

// Error implements error.
func (e *Error) Error() string {
	if e.Details == "" {
		return e.Msg
	}
	return e.Msg + ": " + e.Details
}

// Errorf returns an error of a code.
func Errorf(code uint, format string, args ...any) *Error {
	return &Error{Code: code, Msg: fmt.Sprintf(format, args...)}
}

// ErrorOf returns err as an Error.
func ErrorOf(err error) *Error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return e
	}
	return Errorf(CodeFailed, "%s", err)
}

// The verbs.
const (
	Add     = "ADD"
	Del     = "DEL"
	Check   = "CHECK"
	GC      = "GC"
	Status  = "STATUS"
	Version = "VERSION"
)

// Attachment names one interface of a container.
type Attachment struct {
	Container string `json:"containerID"`
	Interface string `json:"ifname"`
}

// Request is what the plugin sends to the agent: one line of JSON. With ADD and CHECK comes the pod's network namespace
// as a file descriptor.
type Request struct {
	Command string `json:"command"`
	Network string `json:"network"` // the name of the configuration
	Attachment
	NetNS  string       `json:"netns,omitempty"` // its path, as the runtime has it
	Pod    string       `json:"pod,omitempty"`   // "namespace/name", as far as known
	UID    string       `json:"uid,omitempty"`   // of that Pod, likewise
	IPs    []netip.Addr `json:"ips,omitempty"`   // ADD: addresses that the pod must have, of each family at most one
	Ports  bool         `json:"ports,omitempty"` // ADD: the pod has host ports
	Limits Bandwidth    `json:"limits,omitzero"` // ADD: how much the pod may receive and send
	Valid  []Attachment `json:"valid,omitempty"` // GC: all that are to stay
	Prev   *Result      `json:"prev,omitempty"`  // ADD: what the plugin before this one returned; CHECK: what ADD returned
}

// Bandwidth is how many bits a second a pod may receive and send, by the names of the CNI conventions' capability
// bandwidth; 0: as many as it can. How much may pass at once is decided by the rate: runtimes ask for half a gigabyte.
type Bandwidth struct {
	Ingress uint64 `json:"ingressRate,omitempty"`
	Egress  uint64 `json:"egressRate,omitempty"`
}

// leastRate is the least that Kubernetes' annotations may ask for, bits a second.
const leastRate = 1000

// check returns an error where a rate is less than a network can do with.
func (b Bandwidth) check() error {
	for _, rate := range []uint64{b.Ingress, b.Egress} {
		if rate != 0 && rate < leastRate {
			return fmt.Errorf("%d bits a second: use at least %d", rate, leastRate)
		}
	}
	return nil
}

// check returns an error where a request isn't one that the plugin sends.
func (r *Request) check() error {
	about := r.Command == Add || r.Command == Check || r.Command == Del
	if about && (!isContainerID(r.Container) || !isInterface(r.Interface)) {
		return fmt.Errorf("invalid interface %q of container %q", r.Interface, r.Container)
	}
	for i, a := range r.IPs {
		same := func(b netip.Addr) bool { return a.Is4() == b.Is4() }
		if !a.IsValid() || a.Zone() != "" || a.Is4In6() || slices.ContainsFunc(r.IPs[:i], same) {
			return fmt.Errorf("addresses %v: use one of each family", r.IPs)
		}
	}
	return errors.Join(r.Limits.check(), r.Prev.check())
}

// Response is the agent's reply: one line of JSON.
type Response struct {
	Result *Result `json:"result,omitempty"` // of ADD; nil: that of the plugin before this one stands
	Error  *Error  `json:"error,omitempty"`
}

// Result is an attachment as it is, by version 1.1.0.
type Result struct {
	Interfaces []Interface `json:"interfaces,omitempty"`
	IPs        []IP        `json:"ips,omitempty"`
	Routes     []Route     `json:"routes,omitempty"`
}

// check returns an error where a result has no address for one that it lists.
func (r *Result) check() error {
	if r != nil && slices.ContainsFunc(r.IPs, func(ip IP) bool { return !ip.Address.IsValid() }) {
		return errors.New("an entry of ips has no address")
	}
	return nil
}

// Interface is a network device, of the host if it has no Sandbox.
type Interface struct {
	Name    string `json:"name"`
	MAC     string `json:"mac,omitempty"`
	MTU     int    `json:"mtu,omitempty"` // since 1.1.0
	Sandbox string `json:"sandbox,omitempty"`
}

// IP is an address of one of the interfaces.
type IP struct {
	Version   string       `json:"version,omitempty"` // "4" or "6", up to 0.4.0
	Address   netip.Prefix `json:"address"`
	Gateway   *netip.Addr  `json:"gateway,omitempty"`
	Interface *int         `json:"interface,omitempty"`
}

// Route is a route of the pod.
type Route struct {
	Dst netip.Prefix `json:"dst"`
	GW  *netip.Addr  `json:"gw,omitempty"`
}

// in returns the result as a version of the specification has it.
func (r *Result) in(version string) any {
	out := *r
	out.Interfaces, out.IPs = slices.Clone(r.Interfaces), slices.Clone(r.IPs)
	if version != "1.1.0" {
		for i := range out.Interfaces {
			out.Interfaces[i].MTU = 0
		}
	}
	if version == "0.3.1" || version == "0.4.0" {
		for i := range out.IPs {
			out.IPs[i].Version = "6"
			if out.IPs[i].Address.Addr().Is4() {
				out.IPs[i].Version = "4"
			}
		}
	}
	return struct {
		Version string `json:"cniVersion"`
		Result
	}{version, out}
}

// config is what of the network configuration on standard input means something here.
type config struct {
	Version string          `json:"cniVersion"`
	Name    string          `json:"name"`
	Type    string          `json:"type"`
	Socket  string          `json:"socket"`  // of the agent; "": DefaultSocket
	Records string          `json:"records"` // folder of the agent's records; "": DefaultRecords
	Prev    json.RawMessage `json:"prevResult"`
	Valid   []Attachment    `json:"cni.dev/valid-attachments"`
	Runtime struct {
		IPs          []string          `json:"ips"` // addresses, or prefixes of them
		PortMappings []json.RawMessage `json:"portMappings"`
		Bandwidth    Bandwidth         `json:"bandwidth"`
	} `json:"runtimeConfig"`
}

// requestedIPs returns the addresses that the runtime asks for (CNI conventions, capability ips).
func (c *config) requestedIPs() (l []netip.Addr, err error) {
	for _, text := range c.Runtime.IPs {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			var a netip.Addr
			a, err = netip.ParseAddr(text)
			p = netip.PrefixFrom(a, 0)
		}
		a := p.Addr().Unmap()
		same := func(b netip.Addr) bool { return a.Is4() == b.Is4() }
		if err != nil || a.Zone() != "" || slices.ContainsFunc(l, same) {
			return nil, Errorf(CodeConfig, "runtimeConfig.ips has %q: use one address of each family", text)
		}
		l = append(l, a)
	}
	return l, nil
}

// Where the agent's socket and records are, unless the configuration says otherwise.
const (
	DefaultSocket  = "/run/fairlead/cni.sock"
	DefaultRecords = "/run/fairlead/attachments"
)

// call is one call of the plugin.
type call struct {
	Request
	config config
	args   string // CNI_ARGS
}

// parse reads a call. The environment is looked up by name.
func parse(environment func(string) string, stdin []byte) (c call, err error) {
	c.Command = environment("CNI_COMMAND")
	if !slices.Contains([]string{Add, Del, Check, GC, Status, Version}, c.Command) {
		return c, Errorf(CodeEnvironment, "CNI_COMMAND is %q: use ADD, DEL, CHECK, GC, STATUS or VERSION", c.Command)
	}
	if err := json.Unmarshal(stdin, &c.config); err != nil && (c.Command != Version || len(stdin) > 0) {
		return c, Errorf(CodeDecode, "network configuration on standard input: %s", err)
	}
	if c.Command == Version {
		return c, nil
	}
	if !slices.Contains(Versions, c.config.Version) {
		return c, Errorf(CodeVersion, "cniVersion %q: use one of %s", c.config.Version, strings.Join(Versions, ", "))
	}
	if c.config.Name == "" {
		return c, Errorf(CodeConfig, "the network configuration has no name")
	}
	c.Network, c.Valid = c.config.Name, c.config.Valid
	if err := c.readPrevious(); err != nil {
		return c, err
	}
	if c.Command == Add {
		c.Ports, c.Limits = len(c.config.Runtime.PortMappings) > 0, c.config.Runtime.Bandwidth
		if err := c.Limits.check(); err != nil {
			return c, Errorf(CodeConfig, "runtimeConfig.bandwidth: %s", err)
		}
	}
	if c.Command == GC || c.Command == Status {
		return c, nil
	}
	if c.IPs, err = c.config.requestedIPs(); err != nil {
		return c, err
	}
	return c, c.identify(environment)
}

// readPrevious reads the result that ADD and CHECK may come with.
func (c *call) readPrevious() error {
	if len(c.config.Prev) == 0 || c.Command != Add && c.Command != Check {
		return nil
	}
	err := json.Unmarshal(c.config.Prev, &c.Prev)
	if err == nil {
		err = c.Prev.check()
	}
	if err != nil {
		return Errorf(CodeDecode, "prevResult in the network configuration: %s", err)
	}
	return nil
}

// identify reads which attachment a call is about.
func (c *call) identify(environment func(string) string) error {
	c.Container, c.Interface, c.NetNS = environment("CNI_CONTAINERID"), environment("CNI_IFNAME"), environment("CNI_NETNS")
	c.args = environment("CNI_ARGS")
	c.Pod, c.UID = podOf(c.args)
	switch {
	case !isContainerID(c.Container):
		return Errorf(CodeEnvironment, "CNI_CONTAINERID is %q: use letters, digits, '.', '_' and '-'", c.Container)
	case !isInterface(c.Interface):
		return Errorf(CodeEnvironment, "CNI_IFNAME is %q: use the name of an interface, of at most 15 characters",
			c.Interface)
	case c.NetNS == "" && c.Command != Del:
		return Errorf(CodeEnvironment, "CNI_NETNS is empty: use the path of the pod's network namespace")
	case c.Command == Check && c.Prev == nil:
		return Errorf(CodeConfig, "CHECK needs prevResult in the network configuration")
	}
	return nil
}

func isContainerID(s string) bool {
	for i, r := range s {
		letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !letter && (i == 0 || r != '.' && r != '_' && r != '-') {
			return false
		}
	}
	return s != "" && len(s) <= 256
}

func isInterface(s string) bool {
	return s != "" && len(s) <= 15 && s != "." && s != ".." && !strings.ContainsAny(s, "/: \t\n\r\v\f\x00")
}

// podOf returns the pod that CNI_ARGS name as Kubernetes' runtimes do, and its UID, "" where they don't.
func podOf(args string) (pod, uid string) {
	var namespace, name string
	for a := range strings.SplitSeq(args, ";") {
		switch k, v, _ := strings.Cut(a, "="); k {
		case "K8S_POD_NAMESPACE":
			namespace = v
		case "K8S_POD_NAME":
			name = v
		case "K8S_POD_UID":
			uid = v
		}
	}
	if namespace == "" || name == "" {
		return "", ""
	}
	return namespace + "/" + name, uid
}
