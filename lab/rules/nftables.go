package rules

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	nft "fairlead.dev/fairlead/kernel/nftables"
)

// NFTables is all that nf_tables holds in a network namespace. Elements of sets are read when a packet first asks for
// them: a rule set may have ten thousand sets, and a packet meets two. Those that packets write are read at once.
type NFTables struct {
	conn   *nft.Conn
	hooks  map[[2]int][]*nft.FullChain // by bits of an address and hook, in the order of packets
	chains map[reference]*nft.FullChain
	sets   map[reference]*nftSet
}

// reference names a chain or set.
type reference struct {
	family      uint8
	table, name string
}

// nftSet is a set; exact is nil until its elements were read.
type nftSet struct {
	*nft.FullSet
	exact map[string]*nft.FullElement
	all   *nft.FullElement
	bound []*nft.FullElement // of ranges of one field, by key
}

// ReadNFTables reads the rules of nf_tables in the calling thread's network namespace. Those of iptables' nft variant
// hold instructions of ip_tables, which are an error where a packet meets them: ParseIPTables reads their text.
func ReadNFTables() (*NFTables, error) {
	c, err := nft.Open()
	if err != nil {
		return nil, err
	}
	chains, err := c.FullChains()
	var sets []*nft.FullSet
	if err == nil {
		sets, err = c.FullSets()
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	t := &NFTables{conn: c, hooks: map[[2]int][]*nft.FullChain{}, chains: map[reference]*nft.FullChain{},
		sets: map[reference]*nftSet{}}
	for _, f := range chains {
		t.chains[reference{f.Family, f.Table, f.Name}] = f
		if f.Hook == nil {
			continue
		}
		for _, bits := range map[uint8][]int{unix.NFPROTO_IPV4: {32}, unix.NFPROTO_IPV6: {128},
			unix.NFPROTO_INET: {32, 128}}[f.Family] {
			at := [2]int{bits, int(f.Hook.Number)}
			t.hooks[at] = append(t.hooks[at], f)
		}
	}
	for _, l := range t.hooks {
		slices.SortStableFunc(l, func(a, b *nft.FullChain) int { return order(a) - order(b) })
	}
	for _, s := range sets {
		at := reference{s.Family, s.Table, s.Name}
		t.sets[at] = &nftSet{FullSet: s}
		if !s.Dynamic() {
			continue
		}
		if _, err := t.set(at); err != nil { // as packets have left it by now
			return nil, errors.Join(err, c.Close())
		}
	}
	return t, nil
}

// The priorities of connection tracking, of IPVS, and of the hooks that all chains of type nat share at each hook.
const (
	tracking     = -200
	destinations = -100
	redirector   = -99 // IPVS, of what is sent here (net/netfilter/ipvs/ip_vs_core.c)
	sources      = 100
)

// order returns where a chain comes at its hook.
func order(f *nft.FullChain) int {
	const scale = 1 << 12 // chains of type nat come by their own priorities where their hook does
	p := int(f.Hook.Priority)
	if f.Hook.Type != "nat" {
		return p * scale
	}
	if n := f.Hook.Number; n == prerouting || n == output {
		return destinations*scale + p
	}
	return sources*scale + p
}

// Close closes the connection to the kernel.
func (t *NFTables) Close() error { return t.conn.Close() }

// set returns a set, ready for look-ups.
func (t *NFTables) set(at reference) (*nftSet, error) {
	s := t.sets[at]
	if s == nil {
		return nil, fmt.Errorf("no set %s in table %s", at.name, at.table)
	}
	if s.exact != nil {
		return s, nil
	}
	if err := t.conn.Fill(s.FullSet); err != nil {
		return nil, err
	}
	s.ready()
	return s, nil
}

// ready sorts the elements for look-ups.
func (s *nftSet) ready() {
	s.exact = map[string]*nft.FullElement{}
	for i := range s.Elements {
		e := &s.Elements[i]
		switch {
		case e.CatchAll:
			s.all = e
		case !s.Interval():
			s.exact[e.Key] = e
		case len(s.Fields) == 0:
			s.bound = append(s.bound, e)
		}
	}
	slices.SortFunc(s.bound, func(a, b *nft.FullElement) int {
		if a.Key == b.Key && a.Ends != b.Ends { // one range's end is the next one's beginning
			if a.Ends {
				return -1
			}
			return 1
		}
		return bytes.Compare([]byte(a.Key), []byte(b.Key))
	})
}

// find inspects a key up.
func (s *nftSet) find(key []byte) *nft.FullElement {
	found := s.all
	switch {
	case !s.Interval():
		if e := s.exact[string(key)]; e != nil {
			return e
		}
	case len(s.Fields) > 0:
		for i := range s.Elements {
			if e := &s.Elements[i]; !e.CatchAll && s.within(e, key) {
				return e
			}
		}
	default:
		var last *nft.FullElement
		for _, e := range s.bound {
			if bytes.Compare([]byte(e.Key), key) > 0 {
				break
			}
			last = e
		}
		if last != nil && !last.Ends {
			return last
		}
	}
	return found
}

// within reports whether each field of a key is in its range of an element.
func (s *nftSet) within(e *nft.FullElement, key []byte) bool {
	end := e.End
	if end == "" {
		end = e.Key
	}
	at := 0
	for _, n := range s.Fields {
		to := at + int(n)
		if to > len(key) || to > len(e.Key) || to > len(end) || string(key[at:to]) < e.Key[at:to] ||
			string(key[at:to]) > end[at:to] {
			return false
		}
		at += int(n+3) &^ 3
	}
	return true
}

// machine is a packet on its way through nf_tables, with the registers of the rule at hand.
type machine struct {
	*walk
	t    *NFTables
	base *nft.FullChain // the chain of the hook
	regs [80]byte
}

// walk implements Ruleset.
func (t *NFTables) walk(p *Packet, c *chance) (Outcome, error) {
	m := &machine{walk: newWalk(p, c), t: t}
	for i, hook := range p.Path.hooks() {
		m.hook = hook
		before, behind := p.Path == Redirected && i == 0, p.Path == Redirected && i == 1 // IPVS
		if behind {
			m.to = p.To
		} else if p.Path != Redirected {
			m.again(m.hook == prerouting || m.hook == output)
		}
		natted := behind
		for _, m.base = range t.hooks[[2]int{p.Dst.Addr().BitLen(), m.hook}] {
			if m.base.Hook.Type == "nat" && (p.Established || natted || m.untracked) ||
				before && m.base.Hook.Priority > redirector {
				continue
			}
			to := m.to
			if drops, err := m.baseChain(); err != nil {
				return Outcome{}, err
			} else if drops {
				return m.done, nil
			}
			natted = natted || m.to != to || m.hook == postrouting && m.done.Masqueraded
		}
	}
	m.done.Dst = m.to
	return m.done, nil
}

// baseChain runs the hook's chain, and reports whether it drops the packet.
func (m *machine) baseChain() (drops bool, err error) {
	m.depth = 0
	v, err := m.chain(m.base)
	if err != nil || v != drop && (v != back || m.base.Policy != 0) {
		return false, err
	}
	m.done.Dst = m.to
	if m.done.Verdict == "accept" {
		m.done.Verdict = "drop"
	}
	return true, nil
}

// chain runs rules until one decides.
func (m *machine) chain(f *nft.FullChain) (verdict, error) {
	if err := m.enter(f.Name); err != nil {
		return drop, err
	}
	defer func() { m.depth-- }()
	for i := range f.Rules {
		m.done.Rules++
		v, err := m.rule(&f.Rules[i])
		if err != nil {
			return drop, fmt.Errorf("nf_tables rules: table %s, chain %s, rule %d: %w", f.Table, f.Name, i+1, err)
		}
		if v == nil {
			continue
		}
		r, err := m.follow(f, *v)
		if err != nil || r != next {
			return r, err
		}
	}
	return back, nil
}

// Codes of verdicts (enum nft_verdicts, and netfilter's own).
const (
	codeDrop     = 0
	codeAccept   = 1
	codeContinue = -1
	codeBreak    = -2
	codeJump     = -3
	codeGoto     = -4
	codeReturn   = -5
)

// follow does what a verdict says.
func (m *machine) follow(f *nft.FullChain, v nft.Verdict) (verdict, error) {
	switch v.Code {
	case codeAccept:
		return accept, nil
	case codeDrop:
		return drop, nil
	case codeReturn:
		return back, nil
	case codeContinue:
		return next, nil
	case codeJump, codeGoto:
		to := m.t.chains[reference{f.Family, f.Table, v.Chain}]
		if to == nil {
			return drop, fmt.Errorf("nf_tables rules: no chain %s in table %s", v.Chain, f.Table)
		}
		m.done.Jumps++
		r, err := m.chain(to)
		if err == nil && r == back && v.Code == codeJump {
			m.done.Returns++
			r = next
		}
		return r, err
	}
	return drop, fmt.Errorf("nf_tables rules: verdict %d is not understood", v.Code)
}

// rule runs a rule's instructions. It returns nil where the rule does not match to its end, or ends without a verdict.
func (m *machine) rule(r *nft.FullRule) (*nft.Verdict, error) {
	for _, i := range r.Instructions {
		m.done.Instructions++
		do := instructions[i.Kind]
		if do == nil {
			return nil, fmt.Errorf("instruction %s is not understood", i.Kind)
		}
		v, err := do(m, i)
		if err != nil {
			return nil, fmt.Errorf("instruction %s: %w", i.Kind, err)
		}
		if v.Code == codeBreak {
			return nil, nil
		}
		if v.Code != codeContinue {
			return &v, nil
		}
	}
	return nil, nil
}

// reg returns n bytes of a register. REG_1 to REG_4 (1 to 4) have 16 bytes each and lie over the others, from 8 on, of
// 4 bytes.
func (m *machine) reg(number, n uint32) ([]byte, error) {
	at := number * 16
	if number >= 8 {
		at = (number - 4) * 4
	}
	if number == 0 || at+n > uint32(len(m.regs)) {
		return nil, fmt.Errorf("register %d has no %d bytes", number, n)
	}
	return m.regs[at : at+n], nil
}

// put loads a value, filled up with zeros to whole registers.
func (m *machine) put(number uint32, v []byte) error {
	r, err := m.reg(number, uint32(len(v)+3)&^3)
	if err == nil {
		clear(r)
		copy(r, v)
	}
	return err
}

// The verdicts of instructions that decide nothing.
var (
	goOn    = nft.Verdict{Code: codeContinue}
	noMatch = nft.Verdict{Code: codeBreak}
)

// matches returns the verdict of a comparison.
func matches(yes bool) nft.Verdict {
	if yes {
		return goOn
	}
	return noMatch
}

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
