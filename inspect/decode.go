package inspect

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// decoder puts lines together again.
type decoder struct {
	*Decided
	pools      map[uint64]*model.Pool
	tables     map[uint64]*model.PeerTable
	rulesets   map[uint64]*model.Ruleset
	identities map[uint64]*model.Identity
	peers      map[model.Peers]*model.Peers
	parts      []model.PolicyPart
	complete   bool
}

// Decode reads what Encode wrote. What ends before its end, or names what wasn't sent, is an error.
func Decode(r io.Reader) (*Decided, error) {
	d := &decoder{Decided: &Decided{Services: &model.Snapshot{Frontends: map[model.Entry]*model.Frontend{},
		ClusterIPs: map[netip.Addr]*model.ClusterIP{}}, Reasons: map[model.Entry]Reasons{}},
		pools: map[uint64]*model.Pool{}, tables: map[uint64]*model.PeerTable{}, rulesets: map[uint64]*model.Ruleset{},
		identities: map[uint64]*model.Identity{}, peers: map[model.Peers]*model.Peers{}}
	for in := json.NewDecoder(r); !d.complete; {
		var l line
		err := in.Decode(&l)
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err == nil {
			d.other(&l)
			err = errors.Join(d.service(&l), d.policy(&l))
		}
		if err != nil {
			return nil, fmt.Errorf("read what the agent decided: %w", err)
		}
	}
	if d.Services.Node == nil {
		return nil, errors.New("read what the agent decided: it named no node")
	}
	if d.parts != nil {
		d.Services.Policies = model.NewPolicies()
		d.Services.Policies.Apply(model.Change[model.PolicyPart]{Put: d.parts})
	}
	return d.Decided, nil
}

// of returns what has an ID, or an error.
func of[T any](m map[uint64]*T, id uint64, what string) (*T, error) {
	if x := m[id]; x != nil {
		return x, nil
	}
	return nil, fmt.Errorf("%s %d was not sent before it was named", what, id)
}

// service takes a line of Services.
func (d *decoder) service(l *line) (err error) {
	s := d.Services
	switch {
	case l.Node != nil && l.Node.Node == nil:
		return errors.New("a node without a name")
	case l.Node != nil:
		s.Node, s.ServiceNode = l.Node.Node, l.Node
	case l.Pool != nil:
		d.pools[l.Pool.ID] = l.Pool
	case l.Frontend != nil && l.Frontend.Frontend == nil:
		return errors.New("a frontend without an entry")
	case l.Frontend != nil:
		f := l.Frontend.Frontend
		f.Internal.Empty, f.External.Empty = l.Frontend.Internal.Empty, l.Frontend.External.Empty
		if f.Internal.Pool, err = of(d.pools, l.Frontend.Internal.Pool, "pool"); err != nil {
			return err
		}
		if f.External.Pool, err = of(d.pools, l.Frontend.External.Pool, "pool"); err != nil {
			return err
		}
		s.Frontends[f.Entry], d.Reasons[f.Entry] = f, l.Frontend.Reasons
	case l.ClusterIP != nil:
		s.ClusterIPs[l.ClusterIP.Addr] = l.ClusterIP
	case l.HealthCheck != nil:
		s.HealthChecks = append(s.HealthChecks, l.HealthCheck)
	}
	return nil
}

// other takes a line of what is neither Services' nor policies'.
func (d *decoder) other(l *line) {
	switch {
	case l.Network != nil:
		d.Network = l.Network
	case l.Problem != nil:
		d.Problems = append(d.Problems, l.Problem.whole())
	case l.NetworkProblem != nil:
		d.NetworkProblems = append(d.NetworkProblems, l.NetworkProblem.whole())
	case l.End != nil:
		d.Lost, d.Undecided, d.complete = l.End.Lost, l.End.Undecided, true
	}
}

// whole returns the problem with what people's JSON hides.
func (p *problem) whole() source.Problem {
	out := p.Problem
	out.Public, out.Entry = p.Public, p.Entry
	return out
}

// policy takes a line of policies.
func (d *decoder) policy(l *line) (err error) {
	var part model.PolicyPart
	switch {
	case l.PolicyNode != nil:
		part = l.PolicyNode
	case l.Device != nil:
		part = l.Device
	case l.Identity != nil:
		d.identities[l.Identity.ID] = l.Identity
		d.share(l.Identity.Match)
		return nil
	case l.PeerTable != nil:
		for i := range l.PeerTable.Rules {
			d.share(l.PeerTable.Rules[i].Peers)
		}
		d.tables[l.PeerTable.ID], part = l.PeerTable, l.PeerTable
	case l.Ruleset != nil:
		part, err = d.ruleset(l.Ruleset)
	case l.Peer != nil:
		part, err = d.peer(l.Peer)
	case l.PeerVerdict != nil:
		part, err = d.peerVerdict(l.PeerVerdict)
	case l.Subject != nil:
		part, err = d.subject(l.Subject)
	default:
		return nil
	}
	d.parts = append(d.parts, part)
	return err
}

// share puts those that are the same already in place of peers.
func (d *decoder) share(peers []*model.Peers) {
	for i, p := range peers {
		if p == nil {
			p = &model.Peers{}
		}
		if d.peers[*p] == nil {
			d.peers[*p] = p
		}
		peers[i] = d.peers[*p]
	}
}

func (d *decoder) ruleset(r *ruleset) (_ *model.Ruleset, err error) {
	if r.Ruleset == nil {
		return nil, errors.New("a ruleset without an ID")
	}
	out := r.Ruleset
	if out.Default, err = d.port(r.Default); err != nil {
		return nil, err
	}
	for _, e := range r.Ports {
		p, err := d.port(e)
		if err != nil {
			return nil, err
		}
		out.Ports = append(out.Ports, p)
	}
	d.rulesets[out.ID] = out
	return out, nil
}

func (d *decoder) port(e portEntry) (p model.PortEntry, err error) {
	p = e.PortEntry
	p.PeerTable, err = of(d.tables, e.PeerTable, "peer table")
	return p, err
}

func (d *decoder) peer(p *peer) (_ *model.Peer, err error) {
	if p.Peer == nil {
		return nil, errors.New("a peer without a range")
	}
	if p.Identity != nil {
		p.Peer.Identity, err = of(d.identities, *p.Identity, "identity")
	}
	return p.Peer, err
}

func (d *decoder) peerVerdict(p *peerVerdict) (*model.PeerVerdict, error) {
	t, err := of(d.tables, p.PeerTable, "peer table")
	if err != nil {
		return nil, err
	}
	i, err := of(d.identities, p.Identity, "identity")
	return &model.PeerVerdict{PeerTable: t, Identity: i, Decision: p.Decision}, err
}

func (d *decoder) subject(s *subject) (*model.Subject, error) {
	if s.Subject == nil {
		return nil, errors.New("a subject without an address")
	}
	for i := range model.PolicyStages {
		var errs [2]error
		s.Subject.Out[i], errs[0] = d.stage(s.Out[i])
		s.Subject.In[i], errs[1] = d.stage(s.In[i])
		if err := errors.Join(errs[:]...); err != nil {
			return nil, err
		}
	}
	return s.Subject, nil
}

func (d *decoder) stage(id *uint64) (*model.Ruleset, error) {
	if id == nil {
		return nil, nil
	}
	return of(d.rulesets, *id, "ruleset")
}
