package conformance

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"golang.org/x/tools/txtar"
	"sigs.k8s.io/yaml"
)

// A Case is one behaviour: a cluster, packets, and what must become of them; then changes, and packets again.
type Case struct {
	File    string // where it was read
	Comment string // what must hold, and why
	Steps   []Step
}

// Step is a set of changes that come at once, and what must hold after them.
type Step struct {
	Config      *Config     // agents start anew with this configuration
	YAML        []manifest  // objects that are now
	Slices      []sliceLine // the same for EndpointSlices, in short
	Remove      []string    // objects that are no more, "KIND NAMESPACE/NAME" or "slice SERVICE"
	Names       []nameLine  // what addresses domain names have
	Restart     []string    // nodes whose agent is stopped and started anew
	InjectFault []string    // nodes where a stranger damages what the data plane wrote
	MTU         []mtuLine   // how long the packets are that reach hosts
	Unless      []unlessLine
	Packets     []packetLine
	Health      []healthLine
	Problems    []problemLine

	expects          bool // Packets, Health or Problems were given: the next change starts a new step
	problemsExplicit bool // Problems are all that must stand, also if there are none
	problemsLine     int
}

// Config is what an agent is told beside the objects; the same on every node.
type Config struct {
	MasqueradeAll      bool     `json:"masqueradeAll,omitempty"`
	ClusterCIDRs       []string `json:"clusterCIDRs,omitempty"`
	PodInterfaces      string   `json:"podInterfaces,omitempty"` // a name, or the beginning of names and "*"
	NodePortAddresses  []string `json:"nodePortAddresses,omitempty"`
	ProxyName          string   `json:"proxyName,omitempty"`
	DirectServerReturn bool     `json:"directServerReturn,omitempty"`

	HostPorts bool `json:"hostPorts,omitempty"`

	ExternalIPs resolve.ExternalIPs `json:"externalIPs,omitempty"`
	Limits      resolve.Limits      `json:"limits,omitzero"`
	Policies    PolicyConfig        `json:"policies,omitzero"`
}

// PolicyConfig is what an agent is told about policies.
type PolicyConfig struct {
	Audit       bool               `json:"audit,omitempty"`
	Cut         bool               `json:"cut,omitempty"` // connections that are no longer allowed
	UnknownPods policy.UnknownPods `json:"unknownPods,omitempty"`
}

// manifest is a section of Kubernetes YAML.
type manifest struct {
	Text string
	Line int // of its first line in the case's file
}

// unlessLine names a mode of which the case is not asked from its step on, and why: the mode says so itself in its
// notes.
type unlessLine struct{ Mode, Why string }

// mtuLine is how long the packets are that get through to a host on their last hop.
type mtuLine struct {
	Host  *member
	Bytes int // 0: as the wire takes
}

// parseMTU reads a line of an mtu section.
func parseMTU(text string) (l mtuLine, err error) {
	name, bytes, _ := strings.Cut(text, " ")
	l.Bytes, err = strconv.Atoi(strings.TrimSpace(bytes))
	if l.Host = memberNamed(name); l.Host == nil || l.Host.Host || err != nil || l.Bytes < 0 {
		return l, fmt.Errorf("%q is not of the form: NAME BYTES, a name of the cast with a network of its own", text)
	}
	return l, nil
}

// nameLine is a domain name and the addresses that it has from now on; none: it has none any more.
type nameLine struct {
	Name      string
	Addresses []netip.Addr
}

// parseName reads a line of a names section.
func parseName(text string) (l nameLine, err error) {
	name, addresses, found := strings.Cut(text, ":")
	if l.Name = name; !found || name == "" || strings.Contains(name, " ") {
		return l, fmt.Errorf("%q is not of the form: NAME: ADDRESS…", text)
	}
	for _, f := range strings.Fields(addresses) {
		a, err := netip.ParseAddr(f)
		if err != nil {
			return l, err
		}
		l.Addresses = append(l.Addresses, a)
	}
	return l, nil
}

// healthLine expects a health check on a node: "a default/web:32000 local=2". Without local=, that there is none.
type healthLine struct {
	Line  int
	Text  string
	Node  string
	Owner model.Owner // the Service
	Port  int
	Local int // -1: there must be no such health check
}

// problemLine expects a problem of the whole cluster: "Reason Kind namespace/name".
type problemLine struct {
	Line           int
	Reason, Object string
}

//go:embed cases/service/*.txt cases/policy/*.txt cases/network/*.txt
var caseFiles embed.FS

// Cases returns every case of a subsystem, the folder below cases, by file name.
func Cases(subsystem string) ([]*Case, error) {
	folder := path.Join("cases", subsystem)
	entries, err := caseFiles.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	var cases []*Case
	for _, e := range entries {
		b, err := caseFiles.ReadFile(path.Join(folder, e.Name()))
		if err != nil {
			return nil, err
		}
		c, err := Parse(path.Join(folder, e.Name()), b)
		if err != nil {
			return nil, err
		}
		cases = append(cases, c)
	}
	return cases, nil
}

// lineError is a fault at a line of a case's file.
type lineError struct {
	file string
	line int
	err  error
}

func (e *lineError) Error() string { return fmt.Sprintf("%s:%d: %v", e.file, e.line, e.err) }
func (e *lineError) Unwrap() error { return e.err }

// Parse reads a case. Its error names file and line of each fault. cases/README.md has the format.
func Parse(file string, text []byte) (*Case, error) {
	a := txtar.Parse(text)
	c := &Case{File: file, Comment: strings.TrimSpace(string(a.Comment)), Steps: []Step{{}}}
	var errs []error
	fail := func(line int, err error) {
		if err != nil {
			errs = append(errs, &lineError{file, line, err})
		}
	}
	if c.Comment == "" {
		fail(1, errors.New("no comment says what must hold, and why"))
	}
	line := 1 + bytes.Count(a.Comment, []byte("\n"))
	for _, s := range a.Files {
		c.section(s.Name, string(s.Data), line, fail)
		line += 1 + bytes.Count(s.Data, []byte("\n"))
	}
	if last := c.Steps[len(c.Steps)-1]; !last.expects {
		fail(max(1, line-1),
			errors.New("nothing is expected after the last change: a packets, health or problems section is missing"))
	}
	c.checkFlows(fail)
	return c, errors.Join(errs...)
}

// section takes one section whose marker stands at the given line.
func (c *Case) section(name, data string, line int, fail func(int, error)) {
	parse, known := sections[name]
	if strings.HasSuffix(name, ".yaml") {
		s, m := c.change(), manifest{data, line + 1}
		s.YAML = append(s.YAML, m)
		_, err := m.decode()
		fail(line, err)
		return
	}
	if !known {
		fail(line, fmt.Errorf("no section is called %q (known: *.yaml, %s)", name, sectionNames))
		return
	}
	if parse.expectation {
		last := &c.Steps[len(c.Steps)-1]
		last.expects = true
		if name == "problems" {
			last.problemsExplicit, last.problemsLine = true, line
		}
	} else {
		c.change()
	}
	s := &c.Steps[len(c.Steps)-1]
	if parse.whole != nil {
		fail(line, parse.whole(s, data))
		return
	}
	for i, l := range strings.Split(data, "\n") {
		l, _, _ = strings.Cut(" "+l, " # ")
		if l = strings.TrimSpace(l); l != "" && l[0] != '#' {
			fail(line+1+i, parse.line(s, line+1+i, l))
			if name == "packets" && !strings.HasPrefix(c.File, "cases/service/") {
				if twin, ok := s.Packets[len(s.Packets)-1].twin(); ok {
					s.Packets = append(s.Packets, twin)
				}
			}
		}
	}
}

// change returns the step that a change belongs to: a new one if the last already has expectations.
func (c *Case) change() *Step {
	if c.Steps[len(c.Steps)-1].expects {
		c.Steps = append(c.Steps, Step{})
	}
	return &c.Steps[len(c.Steps)-1]
}

// sections are the sections that are not YAML: one function for each line, or for the whole.
var sections = map[string]struct {
	expectation bool
	line        func(s *Step, line int, text string) error
	whole       func(s *Step, text string) error
}{
	"config": {whole: func(s *Step, text string) error {
		s.Config = &Config{}
		return yaml.UnmarshalStrict([]byte(text), s.Config)
	}},
	"slices": {line: func(s *Step, line int, text string) error {
		l, err := parseSlice(text)
		l.Line = line
		s.Slices = append(s.Slices, l)
		return err
	}},
	"remove": {line: func(s *Step, _ int, text string) error {
		s.Remove = append(s.Remove, text)
		_, err := parseKey(text)
		return err
	}},
	"names": {line: func(s *Step, _ int, text string) error {
		l, err := parseName(text)
		s.Names = append(s.Names, l)
		return err
	}},
	"restart": {line: func(s *Step, _ int, text string) error { return appendNodes(&s.Restart, text) }},
	"disturb": {line: func(s *Step, _ int, text string) error { return appendNodes(&s.InjectFault, text) }},
	"mtu": {line: func(s *Step, _ int, text string) error {
		l, err := parseMTU(text)
		s.MTU = append(s.MTU, l)
		return err
	}},
	"unless": {line: func(s *Step, _ int, text string) error {
		mode, why, found := strings.Cut(text, " ")
		if !found {
			return fmt.Errorf("%q is not of the form: MODE REASON", text)
		}
		s.Unless = append(s.Unless, unlessLine{mode, why})
		return nil
	}},
	"packets": {expectation: true, line: func(s *Step, line int, text string) error {
		l, err := parsePacket(text)
		l.Line = line
		s.Packets = append(s.Packets, l)
		return err
	}},
	"health": {expectation: true, line: func(s *Step, line int, text string) error {
		l, err := parseHealth(text)
		l.Line = line
		s.Health = append(s.Health, l)
		return err
	}},
	"problems": {expectation: true, line: func(s *Step, line int, text string) error {
		f := strings.Fields(text)
		if len(f) != 3 {
			return fmt.Errorf("%q is not of the form: REASON KIND NAMESPACE/NAME", text)
		}
		s.Problems = append(s.Problems, problemLine{line, f[0], f[1] + " " + f[2]})
		return nil
	}},
}

const sectionNames = "config, slices, remove, names, restart, disturb, mtu, unless, packets, health, problems"

// parseKey reads "KIND NAMESPACE/NAME"; the namespace may be left out where it is default. "slice NAME" names what a
// line of a slices section made.
func parseKey(text string) (source.Key, error) {
	kind, name, _ := strings.Cut(text, " ")
	if kind == "slice" {
		kind = string(source.EndpointSlice)
	}
	for _, k := range source.Kinds() {
		if string(k) != kind || name == "" || strings.Contains(name, " ") {
			continue
		}
		if !k.Namespaced() {
			return source.Key{Kind: k, Name: name}, nil
		}
		ns, n, found := strings.Cut(name, "/")
		if !found {
			ns, n = "default", name
		}
		return source.Key{Kind: k, Namespace: ns, Name: n}, nil
	}
	return source.Key{}, fmt.Errorf("%q is not of the form: KIND NAMESPACE/NAME", text)
}

func appendNodes(l *[]string, text string) error {
	for _, n := range strings.Fields(text) {
		if n != "a" && n != "b" {
			return fmt.Errorf("%q is no node of the cast: a or b", n)
		}
		*l = append(*l, n)
	}
	return nil
}

// parseHealth reads "NODE NAMESPACE/NAME:PORT local=N" or "NODE NAMESPACE/NAME:PORT none".
func parseHealth(text string) (healthLine, error) {
	bad := fmt.Errorf("%q is not of the form: NODE NAMESPACE/NAME:PORT local=N, or none in place of local=N", text)
	l := healthLine{Text: text, Local: -1}
	f := strings.Fields(text)
	if len(f) != 3 || f[0] != "a" && f[0] != "b" {
		return l, bad
	}
	service, port, _ := strings.Cut(f[1], ":")
	n, err := strconv.ParseUint(port, 10, 16)
	namespace, name, found := strings.Cut(service, "/")
	if err != nil || !found {
		return l, bad
	}
	l.Node, l.Owner, l.Port = f[0], model.Owner{Kind: model.KindService, Namespace: namespace, Name: name}, int(n)
	if f[2] == "none" {
		return l, nil
	}
	local, found := strings.CutPrefix(f[2], "local=")
	if l.Local, err = strconv.Atoi(local); err != nil || !found || l.Local < 0 {
		return l, bad
	}
	return l, nil
}
