package names

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/policy/packet"
)

// question is what a query is about.
type question struct {
	name string // in lower case, without a dot at its end
	kind dnsmessage.Type
}

// message is a query for addresses, or an answer to one.
type message struct {
	id       uint16
	response bool
	question
	addresses []netip.Addr
	ttl       time.Duration // of the shortest-lived record on the path to the addresses
}

// parse reads a DNS message (RFC 1035). It reports false where that is no query for addresses nor an answer without an
// error to one.
func parse(b []byte) (m message, ok bool) {
	var p dnsmessage.Parser
	h, err := p.Start(b)
	if err != nil || h.OpCode != 0 || h.Response && (h.RCode != dnsmessage.RCodeSuccess || h.Truncated) {
		return m, false
	}
	q, err := p.AllQuestions()
	if err != nil || len(q) != 1 || q[0].Class != dnsmessage.ClassINET ||
		q[0].Type != dnsmessage.TypeA && q[0].Type != dnsmessage.TypeAAAA {
		return m, false
	}
	m.id, m.response, m.kind = h.ID, h.Response, q[0].Type
	if m.name, ok = nameOf(q[0].Name); !ok || !m.response {
		return m, ok
	}
	return m, m.answers(&p)
}

// nameOf returns a name as question has it. It reports false of one with other characters than letters, digits, '-' and
// '_' in its labels.
func nameOf(n dnsmessage.Name) (string, bool) {
	name := strings.ToLower(strings.TrimSuffix(n.String(), "."))
	other := strings.IndexFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '_' && r != '.'
	})
	return name, name != "" && len(name) <= 253 && other < 0
}

// maxTTL is how long a record lives at most.
const maxTTL = 24 * time.Hour

// records are those of an answer that count: names that stand for others, and addresses.
type records struct {
	alias     map[string]alias
	addresses []address
}

type alias struct {
	to  string
	ttl time.Duration
}

type address struct {
	of   string
	addr netip.Addr
	ttl  time.Duration
}

// read reads the next record. The error is dnsmessage.ErrSectionDone where there is none.
func (r *records) read(p *dnsmessage.Parser, kind dnsmessage.Type) error {
	h, err := p.AnswerHeader()
	if err != nil {
		return err
	}
	of, valid := nameOf(h.Name)
	ttl := min(time.Duration(h.TTL)*time.Second, maxTTL)
	switch {
	case !valid || h.Class != dnsmessage.ClassINET:
	case h.Type == dnsmessage.TypeCNAME:
		c, err := p.CNAMEResource()
		if to, valid := nameOf(c.CNAME); err == nil && valid {
			r.alias[of] = alias{to, ttl}
		}
		return err
	case h.Type == dnsmessage.TypeA && kind == dnsmessage.TypeA:
		a, err := p.AResource()
		r.addresses = append(r.addresses, address{of, netip.AddrFrom4(a.A), ttl})
		return err
	case h.Type == dnsmessage.TypeAAAA && kind == dnsmessage.TypeAAAA:
		a, err := p.AAAAResource()
		r.addresses = append(r.addresses, address{of, netip.AddrFrom16(a.AAAA), ttl})
		return err
	}
	return p.SkipAnswer()
}

// answers reads the addresses of the message's question: those at the end of its chain of CNAMEs.
func (m *message) answers(p *dnsmessage.Parser) bool {
	r := records{alias: map[string]alias{}}
	for {
		if err := r.read(p, m.kind); errors.Is(err, dnsmessage.ErrSectionDone) {
			break
		} else if err != nil {
			return false
		}
	}
	at := m.name
	m.ttl = maxTTL
	for range len(r.alias) { // also where they lead round in a circle
		next, there := r.alias[at]
		if !there {
			break
		}
		at, m.ttl = next.to, min(m.ttl, next.ttl)
	}
	for _, a := range r.addresses {
		if a.of == at && usable(a.addr) {
			m.addresses, m.ttl = append(m.addresses, a.addr), min(m.ttl, a.ttl)
		}
	}
	return true
}

// usable reports whether an address may be that of a domain name: one that leads to another host, and not only on a
// link.
func usable(a netip.Addr) bool {
	return a.IsGlobalUnicast() && !a.Is4In6() && !a.IsLinkLocalUnicast()
}

// messages returns the DNS messages in a packet of UDP or TCP.
func messages(p packet.Packet) (l []message) {
	b := p.Payload()
	if p.Protocol == unix.IPPROTO_UDP {
		if m, ok := parse(b); ok {
			l = append(l, m)
		}
		return l
	}
	for len(b) >= 2 {
		n := int(binary.BigEndian.Uint16(b))
		if n > len(b)-2 {
			break
		}
		if m, ok := parse(b[2 : 2+n]); ok {
			l = append(l, m)
		}
		b = b[2+n:]
	}
	return l
}
