package rules

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/bpf"

	"fairlead.dev/fairlead/model"
)

// unless turns a match round.
func unless(not bool, m match) match {
	if not {
		return func(w *walk) bool { return !m(w) }
	}
	return m
}

// generalMatches reads the options that every rule may have.
func generalMatches(c clause) (l []match, err error) {
	for _, o := range c.options {
		m, err := generalMatch(o)
		if err != nil {
			return nil, fmt.Errorf("option %s %s: %w", o.name, o.value(), err)
		}
		l = append(l, unless(o.not, m))
	}
	return l, nil
}

func generalMatch(o option) (match, error) {
	switch o.name {
	case "-s", "-d":
		p, err := prefix(o.value())
		if o.name == "-s" {
			return func(w *walk) bool { return p.Contains(w.from.Addr()) }, err
		}
		return func(w *walk) bool { return p.Contains(w.to.Addr()) }, err
	case "-i":
		return func(w *walk) bool { return device(o.value(), w.in()) }, nil
	case "-o":
		return func(w *walk) bool { return device(o.value(), w.out()) }, nil
	}
	n, err := protocol(o.value())
	return func(w *walk) bool { return n == 0 || w.Protocol == n }, err
}

// in is the device that the hook knows the packet came by.
func (w *walk) in() string {
	if w.hook == prerouting || w.hook == input || w.hook == forward {
		return w.In
	}
	return ""
}

// out is the device that the hook knows the packet leaves by.
func (w *walk) out() string {
	if w.hook == postrouting || w.hook == output || w.hook == forward {
		return w.Out
	}
	return ""
}

// device compares a device with a name or, if that ends in "+", its beginning.
func device(name, dev string) bool {
	if start, ok := strings.CutSuffix(name, "+"); ok {
		return strings.HasPrefix(dev, start)
	}
	return name == dev
}

// matchers read the matches by name.
var matchers = map[string]func(clause) ([]match, error){
	"nfacct":    func(c clause) ([]match, error) { return nil, c.only("--nfacct-name") }, // it counts, and matches all
	"comment":   func(c clause) ([]match, error) { return nil, c.only("--comment") },
	"tcp":       func(c clause) ([]match, error) { return portMatches(c, model.TCP) },
	"udp":       func(c clause) ([]match, error) { return portMatches(c, model.UDP) },
	"sctp":      func(c clause) ([]match, error) { return portMatches(c, model.SCTP) },
	"multiport": multiportMatches,
	"conntrack": conntrackMatches,
	"state":     conntrackMatches,
	"addrtype":  addrtypeMatches,
	"mark":      markMatches,
	"statistic": statisticMatches,
	"recent":    recentMatches,
	"iprange":   iprangeMatches,
	"bpf":       bpfMatches,
	"rpfilter":  reverseMatches,
	// one packet is within any limit
	"limit": func(c clause) ([]match, error) { return nil, c.only("--limit", "--limit-burst") },
}

// each reads every option of a clause by itself.
func each(c clause, read func(o option) (match, error)) (l []match, err error) {
	for _, o := range c.options {
		m, err := read(o)
		if err != nil {
			return nil, fmt.Errorf("match %s: option %s %s: %w", c.name, o.name, strings.Join(o.values, " "), err)
		}
		l = append(l, unless(o.not, m))
	}
	return l, nil
}

var errOption = errors.New("is not understood")

// side picks a packet's source or destination by an option's name.
func side(source bool) func(*walk) addrPort {
	if source {
		return func(w *walk) addrPort { return w.from }
	}
	return func(w *walk) addrPort { return w.to }
}

func portMatches(c clause, p model.Protocol) ([]match, error) {
	l, err := each(c, func(o option) (match, error) {
		switch o.name {
		case "--dport", "--destination-port", "--sport", "--source-port":
			first, last, err := ports(o.value())
			of := side(strings.HasPrefix(o.name, "--s"))
			return func(w *walk) bool { n := of(w).Port(); return first <= n && n <= last }, err
		case "--syn":
			return func(w *walk) bool { return !w.Established }, nil
		case "--tcp-flags":
			return tcpFlags(o.values)
		}
		return nil, errOption
	})
	return append([]match{func(w *walk) bool { return w.Protocol == p }}, l...), err
}

var flagNames = []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG"}

// tcpFlags reads "SYN,ACK SYN": which flags to look at, and which of them must be set.
func tcpFlags(v []string) (match, error) {
	if len(v) != 2 {
		return nil, errOption
	}
	mask, errMask := flagBits(v[0])
	set, errSet := flagBits(v[1])
	return func(w *walk) bool { return w.flags()&mask == set }, errors.Join(errMask, errSet)
}

func flagBits(s string) (bits byte, err error) {
	for _, name := range strings.Split(s, ",") {
		i := slices.Index(flagNames, name)
		switch {
		case i >= 0:
			bits |= 1 << i
		case name == "ALL":
			bits = 1<<len(flagNames) - 1
		case name != "NONE":
			err = fmt.Errorf("flag %s %w", name, errOption)
		}
	}
	return bits, err
}

// flags are the packet's TCP flags: SYN, or those of data.
func (p *Packet) flags() byte {
	if p.Established {
		return 1<<3 | 1<<4
	}
	return 1 << 1
}

func multiportMatches(c clause) ([]match, error) {
	return each(c, func(o option) (match, error) {
		var of []func(*walk) addrPort
		switch o.name {
		case "--dports", "--destination-ports":
			of = append(of, side(false))
		case "--sports", "--source-ports":
			of = append(of, side(true))
		case "--ports":
			of = append(of, side(true), side(false))
		default:
			return nil, errOption
		}
		var ranges [][2]uint16
		for _, s := range strings.Split(o.value(), ",") {
			first, last, err := ports(s)
			if err != nil {
				return nil, err
			}
			ranges = append(ranges, [2]uint16{first, last})
		}
		return func(w *walk) bool {
			return slices.ContainsFunc(of, func(of func(*walk) addrPort) bool {
				n := of(w).Port()
				return slices.ContainsFunc(ranges, func(r [2]uint16) bool { return r[0] <= n && n <= r[1] })
			})
		}, nil
	})
}

func conntrackMatches(c clause) ([]match, error) {
	return each(c, func(o option) (match, error) {
		switch o.name {
		case "--ctstate", "--state":
			return states(o.value())
		case "--ctorigdst":
			p, err := prefix(o.value())
			return func(w *walk) bool { return p.Contains(w.Dst.Addr()) }, err
		case "--ctorigsrc":
			p, err := prefix(o.value())
			return func(w *walk) bool { return p.Contains(w.Src.Addr()) }, err
		case "--ctorigdstport":
			first, last, err := ports(o.value())
			return func(w *walk) bool { return first <= w.Dst.Port() && w.Dst.Port() <= last }, err
		case "--ctproto":
			n, err := protocol(o.value())
			return func(w *walk) bool { return w.Protocol == n }, err
		case "--ctdir":
			original := o.value() == "ORIGINAL"
			return func(*walk) bool { return original }, nil
		}
		return nil, errOption
	})
}

// states reads a list of connection states.
func states(s string) (match, error) {
	l := strings.Split(s, ",")
	for _, name := range l {
		if !slices.Contains([]string{"NEW", "ESTABLISHED", "RELATED", "INVALID", "UNTRACKED", "DNAT", "SNAT"}, name) {
			return nil, fmt.Errorf("state %q %w", name, errOption)
		}
	}
	return func(w *walk) bool {
		return slices.Contains(l, w.state()) || w.translated && slices.Contains(l, "DNAT") ||
			w.done.Masqueraded && slices.Contains(l, "SNAT")
	}, nil
}

func (w *walk) state() string {
	switch {
	case w.untracked:
		return "UNTRACKED"
	case w.Established:
		return "ESTABLISHED"
	}
	return "NEW"
}

func addrtypeMatches(c clause) ([]match, error) {
	return each(c, func(o option) (match, error) {
		if o.name != "--dst-type" && o.name != "--src-type" ||
			!slices.Contains([]string{"LOCAL", "UNICAST", "MULTICAST"}, o.value()) {
			return nil, errOption
		}
		of := side(o.name == "--src-type")
		return func(w *walk) bool {
			a, is := of(w).Addr(), "UNICAST"
			switch {
			case w.local(a):
				is = "LOCAL"
			case a.IsMulticast():
				is = "MULTICAST"
			}
			return is == o.value()
		}, nil
	})
}

func markMatches(c clause) ([]match, error) {
	return each(c, func(o option) (match, error) {
		if o.name != "--mark" {
			return nil, errOption
		}
		m, err := marks(o.value())
		return func(w *walk) bool { return w.mark&m.mask == m.value }, err
	})
}

// statisticMatches reads draws. A rule that takes every n-th packet takes, in the long run, one in n of those that come
// to it: so it counts as a draw.
func statisticMatches(c clause) ([]match, error) {
	mode, _ := c.get("--mode")
	var p float64
	var o option
	var err error
	switch mode.value() {
	case "random":
		if err := c.only("--mode", "--probability"); err != nil {
			return nil, err
		}
		o, _ = c.get("--probability")
		p, err = strconv.ParseFloat(o.value(), 64)
		p = math.Round(p*(1<<31)) / (1 << 31) // as the kernel has it
	case "nth":
		if err := c.only("--mode", "--every", "--packet"); err != nil {
			return nil, err
		}
		o, _ = c.get("--every")
		p, err = strconv.ParseFloat(o.value(), 64)
		p = 1 / p
	default:
		err = fmt.Errorf("mode %q %w", mode.value(), errOption)
	}
	if err != nil || math.IsNaN(p) || p < 0 || p > 1 {
		return nil, fmt.Errorf("match statistic: %v is no probability: %w", p, cmpErr(err))
	}
	return []match{unless(o.not, func(w *walk) bool { return w.happens(p) })}, nil
}

// cmpErr returns err, or what stands for none.
func cmpErr(err error) error {
	if err == nil {
		return errOption
	}
	return err
}

// recentMatches reads matches of lists that packets write: setting always matches.
func recentMatches(c clause) ([]match, error) {
	if err := c.only("--set", "--rcheck", "--update", "--remove", "--seconds", "--reap", "--name", "--mask",
		"--rsource"); err != nil {
		return nil, err
	}
	name, _ := c.get("--name")
	if _, sets := c.get("--set"); sets {
		return nil, nil
	}
	o, found := c.get("--rcheck", "--update", "--remove")
	if !found {
		return nil, fmt.Errorf("match recent: nothing to do %w", errOption)
	}
	return []match{unless(o.not, func(w *walk) bool { return w.rules.recent[listed{name.value(), w.from.Addr()}] })}, nil
}

// reverseMatches reads whether the packet's source is reached by the device that it came by. Since routing isn't
// walked, that is taken for granted.
func reverseMatches(c clause) (l []match, err error) {
	_, invert := c.get("--invert")
	return []match{unless(invert, func(*walk) bool { return true })},
		c.only("--invert", "--loose", "--validmark", "--accept-local")
}

func iprangeMatches(c clause) ([]match, error) {
	return each(c, func(o option) (match, error) {
		if o.name != "--src-range" && o.name != "--dst-range" {
			return nil, errOption
		}
		r, err := addrRange(o.value())
		of := side(o.name == "--src-range")
		return func(w *walk) bool { return r.Contains(of(w).Addr()) }, err
	})
}

// addrRange reads "10.0.0.1-10.0.0.9" or one address.
func addrRange(s string) (r model.Range, err error) {
	first, last, ranged := strings.Cut(s, "-")
	if !ranged {
		last = first
	}
	a, err1 := netip.ParseAddr(first)
	b, err2 := netip.ParseAddr(last)
	return model.Range{First: a, Last: b}, errors.Join(err1, err2)
}

// bpfMatches reads programs of classic BPF, as "2,48 0 0 9,6 0 0 1". They see the packet from its network header on.
func bpfMatches(c clause) ([]match, error) {
	return each(c, func(o option) (match, error) {
		if o.name != "--bytecode" {
			return nil, errOption
		}
		lines := strings.Split(strings.Trim(o.value(), ", "), ",")
		var program []bpf.Instruction
		for _, l := range lines[1:] {
			var r bpf.RawInstruction
			if _, err := fmt.Sscan(l, &r.Op, &r.Jt, &r.Jf, &r.K); err != nil {
				return nil, err
			}
			program = append(program, r.Disassemble())
		}
		vm, err := bpf.NewVM(program)
		return func(w *walk) bool {
			network, transport := w.header()
			n, err := vm.Run(append(network, transport...))
			return err == nil && n > 0
		}, err
	})
}

// decides makes a target of a verdict.
func decides(v verdict) func(clause) (target, error) {
	return func(clause) (target, error) { return func(*walk) verdict { return v }, nil }
}

// targets read the targets by name.
var targets = map[string]func(clause) (target, error){
	"ACCEPT":     decides(accept),
	"DROP":       decides(drop),
	"REJECT":     decides(reject),
	"RETURN":     decides(back),
	"LOG":        decides(next),
	"NFLOG":      decides(next),
	"TRACE":      decides(next),
	"SET":        decides(next),
	"MARK":       markTarget,
	"DNAT":       dnatTarget,
	"MASQUERADE": masqueradeTarget,
	"SNAT":       masqueradeTarget,
	"NOTRACK":    func(clause) (target, error) { return untrack, nil },
	"CT":         ctTarget,
}

// markTarget reads the ways to change a mark.
func markTarget(c clause) (target, error) {
	if len(c.options) != 1 {
		return nil, fmt.Errorf("target MARK: %d options: one is understood", len(c.options))
	}
	o := c.options[0]
	m, err := marks(o.value())
	if err != nil {
		return nil, fmt.Errorf("target MARK: %w", err)
	}
	change := map[string]func(old uint32) uint32{
		"--set-xmark": func(old uint32) uint32 { return old&^m.mask ^ m.value },
		"--set-mark":  func(old uint32) uint32 { return old&^(m.mask|m.value) ^ m.value },
		"--or-mark":   func(old uint32) uint32 { return old | m.value },
		"--xor-mark":  func(old uint32) uint32 { return old ^ m.value },
		"--and-mark":  func(old uint32) uint32 { return old & m.value },
	}[o.name]
	if change == nil {
		return nil, fmt.Errorf("target MARK: option %s %w", o.name, errOption)
	}
	return func(w *walk) verdict { w.mark = change(w.mark); return next }, nil
}

// dnatTarget reads a translation to one address, or one port, or both.
func dnatTarget(c clause) (target, error) {
	if err := c.only("--to-destination", "--random", "--persistent"); err != nil {
		return nil, err
	}
	o, _ := c.get("--to-destination")
	to, err := netip.ParseAddrPort(o.value())
	if err != nil {
		var a netip.Addr
		a, err = netip.ParseAddr(strings.Trim(o.value(), "[]"))
		to = netip.AddrPortFrom(a, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("target DNAT: %q %w", o.value(), errOption)
	}
	return func(w *walk) verdict {
		t := to
		if t.Port() == 0 {
			t = netip.AddrPortFrom(t.Addr(), w.to.Port())
		}
		w.to, w.translated = t, true
		return accept
	}, nil
}

func masqueradeTarget(c clause) (target, error) {
	return func(w *walk) verdict { w.done.Masqueraded = true; return accept },
		c.only("--random", "--random-fully", "--to-source", "--persistent")
}

func untrack(w *walk) verdict {
	w.untracked = true
	return next
}

func ctTarget(c clause) (target, error) {
	_, no := c.get("--notrack")
	if err := c.only("--notrack"); err != nil || !no {
		return nil, fmt.Errorf("target CT: only --notrack is understood: %w", cmpErr(err))
	}
	return untrack, nil
}
