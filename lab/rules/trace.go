package rules

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/nflog"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Interface is how rules are told to a kernel, which is also how it tells what it does with them.
type Interface string

// The interfaces.
const (
	Legacy Interface = "legacy" // ip_tables, as iptables-legacy writes
	NFT    Interface = "nft"    // nf_tables, as nft and iptables-nft write
)

// Trace has the kernel trace one packet of p's path, addresses and kind in a network namespace while send sends it, and
// counts the rules that it was tested against: in each chain that it came through those up to the last that matched, or
// all where the chain was walked to its end. p.Src need only have the client's address. An established connection's
// packet is the first that carries data (send must send exactly one), a new one's its SYN. IPv4 and TCP only.
//
// While Trace is at work the namespace holds one more rule, before all others, which is not counted. It may not be
// there while times are measured: trace in blocks of their own.
func Trace(ctx context.Context, ns *netns.Namespace, via Interface, p Packet, send func() error) (n int, err error) {
	if !p.Dst.Addr().Is4() || p.Protocol != model.TCP {
		return 0, fmt.Errorf("trace a packet to %s/%s: only TCP over IPv4 is traced", p.Dst, p.Protocol)
	}
	var t tracer
	err = ns.Do(func() (err error) {
		if via == Legacy {
			t, err = newLegacyTracer(ctx, p)
		} else {
			t, err = newNFTTracer(p)
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("trace in %s: %w", ns.Name, err)
	}
	defer func() { err = errors.Join(err, ns.Do(func() error { return t.close(ctx) })) }()
	if err := send(); err != nil {
		return 0, fmt.Errorf("trace in %s: send: %w", ns.Name, err)
	}
	steps, err := t.steps()
	if errors.Is(err, errUntraced) {
		err = fmt.Errorf("%w of %s to %s (%s)", err, p.Src.Addr(), p.Dst, p.Path)
	}
	if err == nil {
		n, err = tested(steps)
	}
	if err != nil {
		return 0, fmt.Errorf("trace in %s: %w", ns.Name, err)
	}
	return n, nil
}

var errUntraced = errors.New("the kernel traced nothing")

// tracer has a kernel trace a packet.
type tracer interface {
	// steps are those of the first packet that was traced, none if it met no rule. Without one it is errUntraced.
	steps() ([]step, error)
	close(context.Context) error
}

// step is a rule that matched, or a chain's end.
type step struct {
	chain    string // with its table
	position int    // of the rule, from 1; 0: the chain's end
	length   int    // of the chain
	does     action
	to       string // the chain of a jump or goto
	base     bool   // the chain is a hook's
}

// action is how a packet goes on behind a step.
type action uint8

const (
	goesOn action = iota
	jumps
	goes    // goto
	returns // also at the end of a chain
	ends    // for this hook's chain: accepted, dropped, or its policy
)

// frame is a chain that the packet is in.
type frame struct {
	chain string
	last  int  // rule that it has come to
	left  bool // by goto, or by a return to the policy: nothing more of it is tested
}

// tested counts the rules that a traced packet was tested against.
func tested(steps []step) (n int, err error) {
	var stack []frame
	for _, s := range steps {
		if len(stack) == 0 || stack[len(stack)-1].chain != s.chain {
			if !s.base {
				return 0, fmt.Errorf("after %v the trace goes on in chain %s: steps are missing", stack, s.chain)
			}
			stack = []frame{{chain: s.chain}} // another table or hook: the last one was left by a verdict
		}
		top := &stack[len(stack)-1]
		to := s.position
		switch {
		case top.left:
			to = top.last
		case to == 0:
			to = s.length
		}
		if to < top.last || to > s.length {
			return 0, fmt.Errorf("chain %s of %d rules: the trace goes from rule %d to %d", s.chain, s.length, top.last, to)
		}
		n += to - top.last
		top.last = to
		switch s.does {
		case jumps:
			stack = append(stack, frame{chain: s.to})
		case goes:
			top.left = true
			stack = append(stack, frame{chain: s.to})
		case returns:
			stack = leave(stack)
		case ends:
			stack = nil
		}
	}
	return n, nil
}

// leave goes back to the chain that called, or stays in the hook's for its policy.
func leave(stack []frame) []frame {
	top := len(stack) - 1
	stack[top].left = true
	for top > 0 && stack[top].left {
		top--
	}
	return stack[:top+1]
}

// legacyTracer traces with iptables' TRACE, whose lines tell table, chain and position.
type legacyTracer struct {
	log   *nflog.Log
	rule  []string
	rules map[string][]string // by table:chain, before the tracing rule came
}

func newLegacyTracer(ctx context.Context, p Packet) (*legacyTracer, error) {
	save, err := exec.CommandContext(ctx, "iptables-legacy-save").Output()
	if err != nil {
		return nil, fmt.Errorf("iptables-legacy-save: %w", err)
	}
	log, err := nflog.Open()
	if err != nil {
		return nil, err
	}
	hook, flags := "PREROUTING", "SYN,ACK SYN"
	if p.Path == Sent || p.Path == Redirected {
		hook = "OUTPUT"
	}
	if p.Established {
		flags = "PSH PSH"
	}
	mask, set, _ := strings.Cut(flags, " ")
	t := &legacyTracer{log: log, rules: rulesOf(save),
		rule: []string{hook, "-p", "tcp", "-s", p.Src.Addr().String(), "-d", p.Dst.Addr().String(),
			"--dport", strconv.Itoa(int(p.Dst.Port())), "--tcp-flags", mask, set, "-j", "TRACE"}}
	if err := t.iptables(ctx, "-I"); err != nil {
		return nil, errors.Join(err, log.Close())
	}
	return t, nil
}

// iptables adds (-I) or removes (-D) the tracing rule.
func (t *legacyTracer) iptables(ctx context.Context, what string) error {
	args := append([]string{"-w", "300", "-t", "raw", what}, t.rule...)
	if out, err := exec.CommandContext(ctx, "iptables-legacy", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("iptables-legacy %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

func (t *legacyTracer) close(ctx context.Context) error {
	return errors.Join(t.iptables(context.WithoutCancel(ctx), "-D"), t.log.Close())
}

// rulesOf returns the rules of each table:chain, as lines of iptables-save. It is not ParseIPTables, so that one
// mistake can't be made twice.
func rulesOf(save []byte) map[string][]string {
	rules, table := map[string][]string{}, ""
	for line := range strings.Lines(string(save)) {
		switch f := strings.Fields(line); {
		case line[0] == '*':
			table = f[0][1:]
		case line[0] == ':':
			rules[table+line[:strings.IndexByte(line, ' ')]] = nil
		case len(f) > 1 && f[0] == "-A":
			rules[table+":"+f[1]] = append(rules[table+":"+f[1]], line)
		}
	}
	return rules
}

func (t *legacyTracer) steps() (l []step, err error) {
	entries, err := t.log.Receive()
	if err != nil {
		return nil, err
	}
	const word = "TRACE: "
	var first []byte
	for _, e := range entries {
		text, ok := strings.CutPrefix(e.Prefix, word)
		if !ok {
			continue
		}
		id := identity(e.Payload)
		if first == nil {
			first = id
		}
		if !bytes.Equal(first, id) {
			continue
		}
		s, err := t.step(text)
		if err != nil {
			return nil, err
		}
		l = append(l, s)
	}
	if first == nil {
		return nil, errUntraced
	}
	return l, nil
}

// identity is what NAT leaves of a TCP packet: its IP identification and its sequence number.
func identity(packet []byte) []byte {
	if len(packet) < 40 {
		return []byte{}
	}
	header := int(packet[0]&15) * 4
	if len(packet) < header+8 {
		return []byte{}
	}
	return append(bytes.Clone(packet[4:6]), packet[header+4:header+8]...)
}

// step reads "nat:OUTPUT:rule:1 ". The end of a chain has the number behind its last rule's.
func (t *legacyTracer) step(text string) (s step, err error) {
	f := strings.Split(strings.TrimSpace(text), ":")
	if len(f) != 4 {
		return s, fmt.Errorf("the kernel says %q", text)
	}
	s.chain = f[0] + ":" + f[1]
	n, err := strconv.Atoi(f[3])
	if err != nil {
		return s, fmt.Errorf("the kernel says %q: %w", text, err)
	}
	if f[0] == "raw" && f[1] == t.rule[0] {
		n-- // our own rule is the first
	}
	rules, there := t.rules[s.chain]
	if !there && f[0] != "raw" {
		return s, fmt.Errorf("the kernel says %q, of a chain that iptables-legacy-save does not", text)
	}
	s.length = len(rules)
	switch f[1] {
	case "PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING":
		s.base = true
	}
	if n > len(rules) {
		s.does = returns
		return s, nil
	}
	s.position = n
	s.does, s.to = t.leads(f[0], rules[n-1])
	return s, nil
}

// leads reports where a rule of a table leads.
func (t *legacyTracer) leads(table, rule string) (action, string) {
	f := strings.Fields(rule)
	for i := len(f) - 2; i > 0; i-- {
		to := table + ":" + f[i+1]
		_, chain := t.rules[to]
		switch {
		case f[i] == "-j" && chain:
			return jumps, to
		case f[i] == "-g":
			return goes, to
		case f[i] == "-j" && f[i+1] == "RETURN":
			return returns, ""
		case f[i] == "-j":
			return goesOn, "" // or ends, which the next step shows
		}
	}
	return goesOn, ""
}

// nftTracer traces with a rule of its own that sets nftrace, and hears the kernel's trace events.
type nftTracer struct {
	conn   *nft.Conn
	tracer *nft.Tracer
	chains map[reference]*nft.FullChain
	at     map[ruleID]int // a rule's position, from 1
}

// ruleID names a rule; handles are a table's.
type ruleID struct {
	reference
	handle uint64
}

// traceTable is the table with the tracing rule.
const traceTable = "fairlead-trace"

func newNFTTracer(p Packet) (t *nftTracer, err error) {
	t = &nftTracer{chains: map[reference]*nft.FullChain{}, at: map[ruleID]int{}}
	if t.conn, err = nft.Open(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close(context.Background()))
		}
	}()
	chains, err := t.conn.FullChains()
	if err != nil {
		return nil, err
	}
	for _, f := range chains {
		at := reference{f.Family, f.Table, f.Name}
		t.chains[at] = f
		for i, r := range f.Rules {
			t.at[ruleID{at, r.Handle}] = i + 1
		}
	}
	if t.tracer, err = nft.OpenTracer(); err != nil {
		return nil, err
	}
	tx := tracing(p)
	return t, t.conn.Commit(&tx)
}

// tracing writes the tracing rule, before conntrack and everybody else.
func tracing(p Packet) (tx nft.Tx) {
	hook := uint32(prerouting)
	if p.Path == Sent || p.Path == Redirected {
		hook = output
	}
	const synAck, syn, psh = 1<<1 | 1<<4, 1 << 1, 1 << 3
	mask, set := byte(synAck), byte(syn)
	if p.Established {
		mask, set = psh, psh
	}
	is := func(load nft.Expr, v ...byte) []nft.Expr { return []nft.Expr{load, nft.Cmp(nft.Eq, nft.R(0), v)} }
	var rule []nft.Expr
	for _, part := range [][]nft.Expr{
		is(nft.Meta(nft.MetaNFProto, nft.R(0)), unix.NFPROTO_IPV4),
		is(nft.Payload(nft.NetworkHeader, 12, 4, nft.R(0)), p.Src.Addr().AsSlice()...),
		is(nft.Payload(nft.NetworkHeader, 16, 4, nft.R(0)), p.Dst.Addr().AsSlice()...),
		is(nft.Meta(nft.MetaL4Proto, nft.R(0)), byte(p.Protocol)),
		is(nft.Payload(nft.TransportHeader, 2, 2, nft.R(0)), binary.BigEndian.AppendUint16(nil, p.Dst.Port())...),
		{nft.Payload(nft.TransportHeader, 13, 1, nft.R(0)), nft.And(nft.R(0), nft.R(0), []byte{mask}),
			nft.Cmp(nft.Eq, nft.R(0), []byte{set})},
		nft.SetTrace(),
	} {
		rule = append(rule, part...)
	}
	tx.AddTable(traceTable)
	tx.AddChain(traceTable, nft.Chain{Name: "trace", Hook: &nft.Hook{Type: "filter", Number: hook, Priority: -1000}})
	tx.AddRule(traceTable, "trace", nft.Rule{Comment: "trace one packet", Exprs: rule})
	return tx
}

func (t *nftTracer) close(context.Context) error {
	var errs []error
	if t.tracer != nil {
		errs = append(errs, t.tracer.Close())
	}
	tables, err := t.conn.Tables()
	if errs = append(errs, err); strings.Contains(strings.Join(tables, " "), traceTable) {
		var tx nft.Tx
		tx.DelTable(traceTable)
		errs = append(errs, t.conn.Commit(&tx))
	}
	return errors.Join(append(errs, t.conn.Close())...)
}

func (t *nftTracer) steps() (l []step, err error) {
	events, err := t.tracer.Receive()
	if err == nil && len(events) == 0 {
		err = errUntraced
	}
	if err != nil {
		return nil, err
	}
	for _, e := range events {
		if e.Table == traceTable || e.Packet != events[0].Packet {
			continue
		}
		s, err := t.step(e)
		if err != nil {
			return nil, err
		}
		l = append(l, s)
	}
	return l, nil
}

func (t *nftTracer) step(e nft.TraceEvent) (s step, err error) {
	at := reference{e.Family, e.Table, e.Chain}
	f := t.chains[at]
	if f == nil {
		return s, fmt.Errorf("the kernel tells of chain %s in table %s, which it did not list", e.Chain, e.Table)
	}
	name := func(chain string) string { return fmt.Sprintf("%d %s %s", e.Family, e.Table, chain) }
	s = step{chain: name(e.Chain), length: len(f.Rules), base: f.Hook != nil}
	if e.Handle != 0 {
		if s.position = t.at[ruleID{at, e.Handle}]; s.position == 0 {
			return s, fmt.Errorf("the kernel tells of rule %d in chain %s, which it did not list", e.Handle, e.Chain)
		}
	}
	switch {
	case e.Kind == nft.TracePolicy:
		s.does = ends
	case e.Kind == nft.TraceReturn, e.Handle == 0, e.Verdict.Code == codeReturn:
		s.does = returns
	case e.Verdict.Code == codeJump:
		s.does, s.to = jumps, name(e.Verdict.Chain)
	case e.Verdict.Code == codeGoto:
		s.does, s.to = goes, name(e.Verdict.Chain)
	case e.Verdict.Code == codeContinue:
	default:
		s.does = ends
	}
	return s, nil
}
