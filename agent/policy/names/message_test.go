package names

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/policy/packet"
)

// built returns a message about the IPv4 addresses of a name, with answers: pairs of a name and an address, or the name
// that it is an alias of.
func built(t testing.TB, h dnsmessage.Header, name string, ttl uint32, answers ...string) []byte {
	t.Helper()
	m := dnsmessage.NewBuilder(nil, h)
	err := errors.Join(m.StartQuestions(), m.Question(dnsmessage.Question{Name: dnsmessage.MustNewName(name),
		Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}), m.StartAnswers())
	for i := 0; i < len(answers); i += 2 {
		head := dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(answers[i]), Class: dnsmessage.ClassINET, TTL: ttl}
		if a, bad := netip.ParseAddr(answers[i+1]); bad == nil {
			err = errors.Join(err, m.AResource(head, dnsmessage.AResource{A: a.As4()}))
		} else {
			err = errors.Join(err, m.CNAMEResource(head,
				dnsmessage.CNAMEResource{CNAME: dnsmessage.MustNewName(answers[i+1])}))
		}
	}
	b, err2 := m.Finish()
	if err = errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	return b
}

// What counts of an answer are the addresses at the end of its question's chain.
func TestAnswers(t *testing.T) {
	answer := dnsmessage.Header{ID: 7, Response: true}
	for _, c := range []struct {
		what    string
		b       []byte
		want    []string
		refused bool
	}{
		{"addresses", built(t, answer, "Example.COM.", 30, "example.com.", "192.0.2.1", "example.com.", "192.0.2.2"),
			[]string{"192.0.2.1", "192.0.2.2"}, false},
		{"a chain", built(t, answer, "example.com.", 30, "example.com.", "a.net.", "a.net.", "b.net.", "b.net.", "192.0.2.1"),
			[]string{"192.0.2.1"}, false},
		{"a chain in a circle", built(t, answer, "example.com.", 30, "example.com.", "a.net.", "a.net.", "example.com."),
			nil, false},
		{"another name's address", built(t, answer, "example.com.", 30, "other.org.", "192.0.2.1"), nil, false},
		{"an address beside the chain", built(t, answer, "example.com.", 30, "example.com.", "a.net.", "example.com.",
			"192.0.2.1", "a.net.", "192.0.2.2"), []string{"192.0.2.2"}, false},
		{"no other host's", built(t, answer, "example.com.", 30, "example.com.", "127.0.0.1", "example.com.",
			"169.254.169.254", "example.com.", "224.0.0.1", "example.com.", "0.0.0.0", "example.com.", "255.255.255.255"),
			nil, false},
		{"an error", built(t, dnsmessage.Header{Response: true, RCode: dnsmessage.RCodeNameError}, "example.com.", 30), nil,
			true},
		{"a truncated one", built(t, dnsmessage.Header{Response: true, Truncated: true}, "example.com.", 30), nil, true},
		{"odd characters", built(t, answer, "ex\nample.com.", 30), nil, true},
		{"nothing", nil, nil, true},
	} {
		m, ok := parse(c.b)
		var got []string
		for _, a := range m.addresses {
			got = append(got, a.String())
		}
		if ok == c.refused || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, %t", c.what, got, ok)
		}
		if ok && (m.name != "example.com" || m.id != 7 || len(got) > 0 && m.ttl != 30*time.Second) {
			t.Errorf("%s: %+v", c.what, m)
		}
	}
	if m, ok := parse(built(t, dnsmessage.Header{ID: 9}, "a.example.com.", 0)); !ok || m.response || m.id != 9 {
		t.Errorf("a query: %+v, %t", m, ok)
	}
}

// Over TCP, messages that are whole in a packet count.
func TestMessagesOverTCP(t *testing.T) {
	b := built(t, dnsmessage.Header{ID: 7}, "example.com.", 0)
	framed := append([]byte{0, byte(len(b))}, b...)
	header := make([]byte, 20)
	header[12] = 5 << 4
	for n, stream := range map[int][]byte{2: append(slices.Clone(framed), framed...), 1: framed[:len(framed):len(framed)],
		0: framed[:len(framed)-1]} {
		p := packet.Packet{Protocol: unix.IPPROTO_TCP, Transport: append(slices.Clone(header), stream...)}
		if l := messages(p); len(l) != n {
			t.Errorf("%d messages, want %d", len(l), n)
		}
	}
}

// FuzzPacket has no packet do harm, and no name come out of one that isn't one.
func FuzzPacket(f *testing.F) {
	answer := built(f, dnsmessage.Header{ID: 7, Response: true}, "example.com.", 30, "example.com.", "a.net.", "a.net.",
		"192.0.2.1")
	f.Add(append(append([]byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2},
		0, 53, 156, 64, 0, 0, 0, 0), answer...))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, ok := packet.Parse(b)
		if !ok {
			return
		}
		for _, m := range messages(p) {
			if n, valid := nameOf(dnsmessage.MustNewName(m.name + ".")); !valid || n != m.name {
				t.Errorf("name %q", m.name)
			}
			for _, a := range m.addresses {
				if !usable(a) || !m.response {
					t.Errorf("address %s of %+v", a, m)
				}
			}
			if m.ttl < 0 || m.ttl > maxTTL {
				t.Errorf("TTL %s", m.ttl)
			}
		}
	})
}

// FuzzMessage has a message open no address that it doesn't have for its question: by another reading of the whole
// message, each is in a record whose owner a chain of CNAMEs leads to from the question, and lives no longer than that.
func FuzzMessage(f *testing.F) {
	answer := dnsmessage.Header{ID: 7, Response: true}
	f.Add(built(f, dnsmessage.Header{ID: 7}, "example.com.", 0))
	f.Add(built(f, answer, "Example.COM.", 30, "example.com.", "192.0.2.1", "example.com.", "192.0.2.2"))
	f.Add(built(f, answer, "example.com.", 30, "example.com.", "a.net.", "a.net.", "b.net.", "b.net.", "192.0.2.1"))
	f.Add(built(f, answer, "example.com.", 30, "example.com.", "a.net.", "a.net.", "example.com."))
	f.Add(built(f, answer, "example.com.", 30, "other.org.", "192.0.2.1"))
	f.Add(built(f, answer, "example.com.", 30, "example.com.", "a.net.", "example.com.", "192.0.2.1", "a.net.",
		"192.0.2.2"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, ok := parse(b)
		const smallest = 15 // bytes of a record of an address
		if !ok || len(m.addresses) > len(b)/smallest {
			if m.addresses != nil {
				t.Errorf("%t, %d addresses of %d bytes", ok, len(m.addresses), len(b))
			}
			return
		}
		for _, a := range m.addresses {
			if !bytes.Contains(b, a.AsSlice()) {
				t.Errorf("%s is not in the message", a)
			}
		}
		var whole dnsmessage.Message
		if err := whole.Unpack(b); err != nil {
			return // what follows the answers is of no account
		}
		if !m.response && len(m.addresses) > 0 || len(whole.Questions) != 1 {
			t.Errorf("%+v of %+v", m, whole)
		}
		for _, a := range m.addresses {
			if ttl, there := opens(&whole, m.name, a); !there || m.ttl > ttl {
				t.Errorf("%s for %s, of %s: in a record %t, for %s", a, m.ttl, m.name, there, ttl)
			}
		}
	})
}

// opens reports whether a message's answers have an address for a name or one that it is an alias of, and for how long
// at most.
func opens(m *dnsmessage.Message, name string, a netip.Addr) (longest time.Duration, there bool) {
	leads := map[string]bool{name: true}
	for range m.Answers {
		for _, r := range m.Answers {
			if c, ok := r.Body.(*dnsmessage.CNAMEResource); ok && leads[lower(r.Header.Name)] {
				leads[lower(c.CNAME)] = true
			}
		}
	}
	for _, r := range m.Answers {
		var of netip.Addr
		switch x := r.Body.(type) {
		case *dnsmessage.AResource:
			of = netip.AddrFrom4(x.A)
		case *dnsmessage.AAAAResource:
			of = netip.AddrFrom16(x.AAAA)
		}
		if of == a && leads[lower(r.Header.Name)] && r.Header.Class == dnsmessage.ClassINET {
			longest, there = max(longest, time.Duration(r.Header.TTL)*time.Second), true
		}
	}
	return longest, there
}

func lower(n dnsmessage.Name) string { return strings.ToLower(strings.TrimSuffix(n.String(), ".")) }
