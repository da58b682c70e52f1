package mode

import (
	"slices"
	"testing"

	"fairlead.dev/fairlead/model"
)

// A plane for SCTP alone hears of the node and of pools only while a frontend of SCTP needs them.
func TestShare(t *testing.T) {
	pool, other := &model.Pool{Name: "one"}, &model.Pool{Name: "other"}
	frontend := func(p model.Protocol, pool *model.Pool) *model.Frontend {
		return &model.Frontend{Entry: model.Entry{Protocol: p}, Internal: model.Target{Pool: pool},
			External: model.Target{Pool: pool}}
	}
	node, node2 := &model.ServiceNode{Node: &model.Node{Name: "a"}}, &model.ServiceNode{Node: &model.Node{Name: "b"}}
	tcp, first, second := frontend(model.TCP, pool), frontend(model.SCTP, pool), frontend(model.SCTP, other)
	s := Share{Serves: func(f *model.Frontend) bool { return f.Entry.Protocol == model.SCTP }}
	for _, c := range []struct {
		what                 string
		put, del, puts, dels []model.ServicePart
	}{
		{"nothing of its own", []model.ServicePart{node, pool, tcp}, nil, nil, nil},
		{"the first", []model.ServicePart{first}, nil, []model.ServicePart{first, pool, node}, nil},
		{"a changed node", []model.ServicePart{node2}, []model.ServicePart{node}, []model.ServicePart{node2},
			[]model.ServicePart{node}},
		{"another pool", []model.ServicePart{second, other}, []model.ServicePart{first}, []model.ServicePart{second, other},
			[]model.ServicePart{first, pool}},
		{"others go", nil, []model.ServicePart{tcp, pool}, nil, nil},
		{"the last", nil, []model.ServicePart{second, other}, nil, []model.ServicePart{second, other, node2}},
		{"again", []model.ServicePart{first}, nil, []model.ServicePart{first, pool, node2}, nil},
	} {
		puts, dels := s.Of(c.put, c.del)
		if !slices.Equal(puts, c.puts) || !slices.Equal(dels, c.dels) {
			t.Errorf("%s: put %v and %v, want %v and %v", c.what, puts, dels, c.puts, c.dels)
		}
	}
}
