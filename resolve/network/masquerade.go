package network

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/model"
)

// Masquerade is which destinations see pods' own addresses beside pods, Services and nodes on a link of this one. The
// zero value stands for link-local and multicast addresses.
type Masquerade struct {
	Off        bool // all destinations do
	Except     []netip.Prefix
	LinkLocal4 bool   // IPv4 link-local addresses see the node's
	LinkLocal6 bool   // IPv6 ones do
	Fault      string // why the file with the ranges is not in force as it is; "": it is
}

// mostExcept is how many ranges a file may have.
const mostExcept = 4096

// ParseMasquerade reads ip-masq-agent's configuration file, YAML or JSON. An empty one has no ranges.
func ParseMasquerade(b []byte) (m Masquerade, err error) {
	var file struct {
		Except4    []string `json:"nonMasqueradeCIDRs"`
		Except6    []string `json:"nonMasqueradeCIDRsIPv6"`
		LinkLocal4 bool     `json:"masqLinkLocal"`
		LinkLocal6 bool     `json:"masqLinkLocalIPv6"`
		Resync     any      `json:"resyncInterval"` // no use: changes are followed
	}
	if err := yaml.UnmarshalStrict(b, &file); err != nil {
		return m, fmt.Errorf("read the masquerade file: %w", err)
	}
	if n := len(file.Except4) + len(file.Except6); n > mostExcept {
		return m, fmt.Errorf("read the masquerade file: %d ranges, at most %d may be listed: join some", n, mostExcept)
	}
	m.LinkLocal4, m.LinkLocal6 = file.LinkLocal4, file.LinkLocal6
	for i, texts := range [][]string{file.Except4, file.Except6} {
		for _, text := range texts {
			p, err := netip.ParsePrefix(text)
			if err != nil || p.Addr().Is4() != (i == 0) || p.Addr().Is4In6() {
				return m, fmt.Errorf("read the masquerade file: %q is no %s range: use one such as %s", text,
					[]string{"IPv4", "IPv6"}[i], []string{"10.0.0.0/8", "fd00::/8"}[i])
			}
			m.Except = append(m.Except, p.Masked())
		}
	}
	return m, nil
}

// SetMasquerade replaces Config.Masquerade. The next change has what follows from it.
func (r *Resolver) SetMasquerade(m Masquerade) {
	if o := r.config.Masquerade; o.Off == m.Off && o.LinkLocal4 == m.LinkLocal4 && o.LinkLocal6 == m.LinkLocal6 &&
		o.Fault == m.Fault && slices.Equal(o.Except, m.Except) {
		return
	}
	r.config.Masquerade, r.stale = m, true
}

// decideMasquerade returns which destinations see pods' own addresses, nil where all do.
func (s *survey) decideMasquerade(own *node) *model.Masquerade {
	c := s.known.config.Masquerade
	if c.Fault != "" {
		s.add(own.key(), "", "MasqueradeFile", "%s; what was read last stays in force", c.Fault)
	}
	if c.Off {
		return nil
	}
	l := append(slices.Clone(c.Except), netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("ff00::/8"))
	if !c.LinkLocal4 {
		l = append(l, netip.MustParsePrefix("169.254.0.0/16"))
	}
	if !c.LinkLocal6 {
		l = append(l, netip.MustParsePrefix("fe80::/10"))
	}
	for _, p := range s.serviceRanges() {
		if p.IsValid() {
			l = append(l, p)
		}
	}
	slices.SortFunc(l, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	out := l[:0]
	for _, p := range l {
		if n := len(out); n == 0 || !out[n-1].Overlaps(p) { // prefixes that overlap are nested
			out = append(out, p)
		}
	}
	return &model.Masquerade{Except: out}
}
