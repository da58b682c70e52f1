package conformance

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/verdict"
)

// packetLine is one line of a packets section: who sends what where, and what must become of it.
type packetLine struct {
	Line int
	Text string

	Open    string   // keep the flow open under this name: "hold NAME: CLIENT -> …"
	Flow    string   // ask again over the flow of this name: "held NAME = …". Then neither Clients nor To are set
	Clients []client // each sends the packet for itself
	To      netip.AddrPort
	Proto   model.Protocol

	Action      verdict.Action
	Candidates  []candidate // for Forward: one of them answers
	Apart       []string    // but not one remembered under these names, unless the scheduler is random
	Without     []string    // but not the places remembered under these names
	Masqueraded bool        // source=node, for every candidate
	Sticks      bool        // always the same candidate
	As          string      // and it is remembered under this name, or, if the name is known, is that very one
	Moves       bool        // not for ever the same candidate, if one waits longer than the affinity lasts
	Evenly      bool        // each candidate as often as its weight says
	Scheduled   bool        // as the pool's scheduler promises
	Closed      bool        // nothing listens at the candidates: the client is told so
	Lost        bool        // of Hold, passes and is lost on its way: it is not answered, and the connection is not open
	Size        int         // bytes of each question and of its answer; 0: few
	Quotes      string      // an ICMP error that quotes the first packet of the flow of this name, as its server got it
	// the node through which a packet from outside comes; default: the node that has the address, or a
	Via string

	Cut      bool   // of Flow: it is reset, or not answered any more
	By       string // part of why verdict says so
	Reported bool   // audited policies would drop it
	byName   bool   // the destination is a host of the cast, by its name alone: in cases of policies, of both families
}

// client is a sender: a name of the cast, the source address if it is not the first of its family, and the port if it
// matters.
type client struct {
	Name string
	Addr netip.Addr
	Port uint16
}

// candidate is a place that may answer: a name of the cast or an address, and its port if it matters.
type candidate struct {
	Name        string     // "$NAME" for a remembered place
	Addr        netip.Addr // of the line's family; invalid for a remembered place
	Port        uint16     // 0: any
	Masqueraded bool       // this one sees a node's address even where the line's others see the client's
	Dropped     bool       // policies drop what goes there
}

// parsePacket reads a line of a packets section.
func parsePacket(text string) (packetLine, error) {
	l := packetLine{Text: text}
	left, right, found := strings.Cut(text, " = ")
	if !found {
		return l, fmt.Errorf("%q has no \" = \" between the packet and what becomes of it", text)
	}
	left = strings.TrimSpace(left)
	if name, ok := strings.CutPrefix(left, "held "); ok {
		l.Flow = strings.TrimSpace(name)
		return l, l.parseOutcome(right)
	}
	if err := l.parseFrom(left); err != nil {
		return l, err
	}
	return l, l.parseOutcome(right)
}

// parseFrom reads what stands before the equals sign: who sends what where.
func (l *packetLine) parseFrom(text string) error {
	if name, ok := strings.CutPrefix(text, "hold "); ok {
		name, rest, found := strings.Cut(name, ":")
		if !found {
			return fmt.Errorf("%q: hold needs a name and a colon: hold NAME: CLIENT -> ADDRESS:PORT/PROTOCOL", text)
		}
		l.Open, text = strings.TrimSpace(name), rest
	}
	from, to, found := strings.Cut(text, "->")
	if !found {
		return fmt.Errorf("%q is not of the form: CLIENT -> ADDRESS:PORT/PROTOCOL", text)
	}
	if err := l.parseTarget(strings.TrimSpace(to)); err != nil {
		return err
	}
	for _, c := range strings.Split(from, ",") {
		c, err := parseClient(strings.TrimSpace(c), l.To.Addr().Is6())
		if err != nil {
			return err
		}
		l.Clients = append(l.Clients, c)
	}
	if l.Open != "" && len(l.Clients) != 1 {
		return errors.New("only one client can hold a flow")
	}
	if l.Open == "" && !l.isICMP() && slices.ContainsFunc(l.Clients, func(c client) bool { return c.Port != 0 }) {
		return errors.New("only a client that holds a flow can choose its port: one question after the other from it would " +
			"be one flow")
	}
	return nil
}

// parseTarget reads "10.96.0.1:80/tcp", "[fd00:96::1]:80/tcp", or a name of the cast in place of the address.
func (l *packetLine) parseTarget(text string) error {
	bad := fmt.Errorf("%q is not of the form: ADDRESS:PORT/PROTOCOL", text)
	hostport, proto, _ := strings.Cut(text, "/")
	if proto == "icmp" {
		hostport += ":0"
	}
	i := strings.LastIndex(hostport, ":")
	if i < 0 {
		return bad
	}
	port, err := strconv.ParseUint(hostport[i+1:], 10, 16)
	if err != nil {
		return bad
	}
	host := strings.Trim(hostport[:i], "[]")
	l.byName = memberNamed(host) != nil
	addr, err := netip.ParseAddr(host)
	if err != nil {
		if addr = topologyAddr(host); !addr.IsValid() {
			return fmt.Errorf("%q is neither an address nor a name of the cast", host)
		}
	} else if addr.Is6() != strings.HasPrefix(hostport, "[") {
		return bad
	}
	l.To = netip.AddrPortFrom(addr, uint16(port))
	if proto == "icmp" {
		l.Proto = icmpOf(addr.Is6())
		return nil
	}
	l.Proto, err = parseProtocol(proto)
	return err
}

// icmpOf returns the protocol of echo requests of a family.
func icmpOf(six bool) model.Protocol {
	if six {
		return unix.IPPROTO_ICMPV6
	}
	return unix.IPPROTO_ICMP
}

func (l *packetLine) isICMP() bool { return l.Proto == icmpOf(l.To.Addr().Is6()) }

// twin returns the line for IPv6 where it is about hosts of the cast by their names, or false.
func (l packetLine) twin() (packetLine, bool) {
	if !l.byName || l.Open+l.Quotes != "" || slices.ContainsFunc(l.Clients, func(c client) bool {
		return c.Addr != memberNamed(c.Name).addr(false)
	}) {
		return l, false
	}
	l.To = netip.AddrPortFrom(memberNamed(nameOf(l.To.Addr())).addr(true), l.To.Port())
	if l.Proto == unix.IPPROTO_ICMP {
		l.Proto = icmpOf(true)
	}
	l.Clients = slices.Clone(l.Clients)
	for i, c := range l.Clients {
		l.Clients[i].Addr = memberNamed(c.Name).addr(true)
	}
	l.Candidates = slices.Clone(l.Candidates)
	for i, c := range l.Candidates {
		if m := memberNamed(c.Name); m != nil {
			l.Candidates[i].Addr = m.addr(true)
		}
	}
	return l, true
}

func parseProtocol(text string) (model.Protocol, error) {
	for _, p := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		if p.String() == text {
			return p, nil
		}
	}
	return 0, fmt.Errorf("%q is no protocol: tcp, udp or sctp", text)
}

// parseClient reads "NAME", "NAME(ADDRESS)", "NAME(:PORT)" or "NAME(ADDRESS:PORT)".
func parseClient(text string, six bool) (client, error) {
	name, addr, explicit := strings.Cut(strings.TrimSuffix(text, ")"), "(")
	c := client{Name: name}
	p := memberNamed(name)
	if p == nil {
		return c, fmt.Errorf("%q is no name of the cast: %s", name, strings.Join(topologyNames(), " "))
	}
	addr, port, err := cutPort(addr)
	if err != nil {
		return c, fmt.Errorf("%q is not of the form: NAME(ADDRESS), NAME(:PORT) or NAME(ADDRESS:PORT)", text)
	}
	if c.Port = port; !explicit || addr == "" {
		c.Addr = p.addr(six)
		return c, nil
	}
	if c.Addr, err = netip.ParseAddr(addr); err != nil {
		return c, fmt.Errorf("%q is not of the form: NAME(ADDRESS), NAME(:PORT) or NAME(ADDRESS:PORT)", text)
	}
	if c.Addr.Is6() != six {
		return c, fmt.Errorf("%s can't send from %s to an address of the other family", name, addr)
	}
	return c, nil
}

// cutPort takes the port off "ADDRESS:PORT", "[ADDRESS]:PORT" or ":PORT"; 0 where there is none.
func cutPort(text string) (addr string, port uint16, err error) {
	i := strings.LastIndex(text, ":")
	if _, err := netip.ParseAddr(text); err == nil || i < 0 {
		return text, 0, nil
	}
	n, err := strconv.ParseUint(text[i+1:], 10, 16)
	return strings.Trim(text[:i], "[]"), uint16(n), err
}

// parseOutcome reads what stands after the equals sign.
func (l *packetLine) parseOutcome(text string) error {
	text, l.By, _ = strings.Cut(text, " by ")
	words := strings.Fields(text)
	if len(words) == 0 {
		return errors.New("nothing says what becomes of the packet")
	}
	switch words[0] {
	case "cut":
		if l.Action, l.Cut = verdict.Drop, l.Flow != ""; !l.Cut {
			return errors.New("only a held flow can be cut")
		}
		words = words[1:]
	case "pass", "reject", "drop":
		l.Action = map[string]verdict.Action{"pass": verdict.Pass, "reject": verdict.Reject, "drop": verdict.Drop}[words[0]]
		words = words[1:]
	default:
		l.Action = verdict.Forward
	}
	for _, w := range words {
		if err := l.parseWord(w); err != nil {
			return err
		}
	}
	if l.Action == verdict.Forward {
		if len(l.Candidates) == 0 {
			return errors.New("no endpoint is named")
		}
		for i := range l.Candidates {
			l.Candidates[i].Masqueraded = l.Candidates[i].Masqueraded || l.Masqueraded
		}
	}
	return nil
}

// parseWord reads an option or a candidate.
func (l *packetLine) parseWord(w string) error {
	key, value, _ := strings.Cut(w, "=")
	switch {
	case key == "via" && slices.Contains([]string{"a", "b"}, value):
		l.Via = value
	case key == "quotes" && l.isICMP() && memberNamed(nameOf(l.To.Addr())) != nil && l.Action != verdict.Forward:
		l.Quotes = value
	case key == "size":
		return l.parseSize(value)
	case w == "reported" && (l.Action == verdict.Pass || l.Action == verdict.Forward):
		l.Reported = true
	case w == "lost" && l.Open != "" && l.Action == verdict.Pass:
		l.Lost = true
	case l.Action != verdict.Forward:
		return fmt.Errorf("%q does not go with %s", w, l.Action)
	case l.flag(w):
	case key == "sticks":
		l.Sticks, l.As = true, value
	case key == "apart" && l.Open != "":
		l.Apart = append(l.Apart, value)
	case strings.HasPrefix(w, "-$"):
		l.Without = append(l.Without, w[2:])
	default:
		return l.parseCandidate(w)
	}
	return nil
}

// flag sets what an option without a value of lines about endpoints says, and reports whether w is one.
func (l *packetLine) flag(w string) bool {
	switch w {
	case "source=kept":
	case "source=node":
		l.Masqueraded = true
	case "moves":
		l.Moves = true
	case "scheduled":
		l.Scheduled = true
	case "evenly":
		l.Evenly = true
	case "closed":
		l.Closed = l.Open == "" && l.Flow == ""
		return l.Closed
	default:
		return false
	}
	return true
}

// parseSize reads how long questions and answers are.
func (l *packetLine) parseSize(text string) (err error) {
	if l.Size, err = strconv.Atoi(text); err != nil || l.Size < 1 || l.Size > echo.MaxSize {
		return fmt.Errorf("size=%s: a size is a number of bytes up to %d", text, echo.MaxSize)
	}
	if l.Proto == model.SCTP {
		return errors.New("size= goes with tcp and udp alone: of SCTP, one small packet each way is sent")
	}
	return nil
}

// parseCandidate reads "web-1", "web-1:8080", "web-1:9000-9009" or "10.244.9.9:80", each with "(source=node)" or not.
func (l *packetLine) parseCandidate(w string) error {
	var c candidate
	w, c.Dropped = strings.CutSuffix(w, "(dropped)")
	if w, c.Masqueraded = strings.CutSuffix(w, "(source=node)"); strings.HasPrefix(w, "$") {
		c.Name = w
		l.Candidates = append(l.Candidates, c)
		return nil
	}
	first, last := uint64(0), uint64(0)
	c.Name = w
	if i := strings.LastIndex(w, ":"); i >= 0 {
		from, to, ranged := strings.Cut(w[i+1:], "-")
		var err, err2 error
		first, err = strconv.ParseUint(from, 10, 16)
		if last = first; ranged {
			last, err2 = strconv.ParseUint(to, 10, 16)
		}
		if err != nil || err2 != nil || last < first || last-first >= 1000 {
			return fmt.Errorf("%q is neither an option nor an endpoint", w)
		}
		c.Name = strings.Trim(w[:i], "[]")
	}
	if p := memberNamed(c.Name); p != nil {
		c.Addr = p.addr(l.To.Addr().Is6())
	} else if a, err := netip.ParseAddr(c.Name); err == nil {
		c.Addr = a
	} else {
		return fmt.Errorf("%q is neither an option nor an endpoint", w)
	}
	for port := first; port <= last; port++ {
		c.Port = uint16(port)
		l.Candidates = append(l.Candidates, c)
	}
	return nil
}

// checkFlows faults names that are used before they are known, and gives each held line the packet of its flow.
func (c *Case) checkFlows(fail func(int, error)) {
	flows, declared := map[string]*packetLine{}, map[string]bool{}
	check := func(line int, names []string) {
		for _, n := range names {
			if !declared[n] {
				fail(line, fmt.Errorf("no place is remembered as $%s", n))
			}
		}
	}
	for _, s := range c.Steps {
		for _, l := range s.Slices {
			check(l.Line, l.references())
		}
		for i := range s.Packets {
			l := &s.Packets[i]
			if l.Flow != "" {
				if flows[l.Flow] == nil {
					fail(l.Line, fmt.Errorf("no flow is held under the name %q", l.Flow))
					continue
				}
				l.follow(flows[l.Flow])
			}
			if of := flows[l.Quotes]; l.Quotes != "" && (of == nil || of.To.Addr().Is6() != l.To.Addr().Is6()) {
				fail(l.Line, fmt.Errorf("no flow of this family is held under the name %q", l.Quotes))
			}
			check(l.Line, l.references())
			if l.Open != "" {
				flows[l.Open], declared[l.Open] = l, true
			}
			if l.As != "" {
				declared[l.As] = true
			}
		}
	}
}

// references returns the names of remembered places that the line needs.
func (l *packetLine) references() []string {
	names := slices.Concat(l.Without, l.Apart)
	for _, c := range l.Candidates {
		if n, ok := strings.CutPrefix(c.Name, "$"); ok {
			names = append(names, n)
		}
	}
	return names
}

// follow makes a held line one of the flow that was opened by first.
func (l *packetLine) follow(first *packetLine) {
	l.To, l.Proto, l.Clients, l.Via, l.Size = first.To, first.Proto, first.Clients, first.Via, first.Size
	for i, c := range l.Candidates {
		if p := memberNamed(c.Name); p != nil {
			l.Candidates[i].Addr = p.addr(l.To.Addr().Is6())
		}
	}
}
