package agent

import (
	"slices"
	"testing"

	"fairlead.dev/fairlead/model"
)

// A plane for SCTP alone hears of the node and of pools only while a frontend of SCTP needs them.
func TestShare(t *testing.T) {
	pool, other := &model.Pool{Name: "one"}, &model.Pool{Name: "other"}
	frontend := func(p model.Protocol, pool *model.Pool) *model.Frontend {
		return &model.Frontend{Entry: model.Entry{Protocol: p}, Inside: model.Target{Pool: pool}, Outside: model.Target{Pool: pool}}
	}
	node, node2 := &model.Node{Name: "a"}, &model.Node{Name: "b"}
	tcp, first, second := frontend(model.TCP, pool), frontend(model.SCTP, pool), frontend(model.SCTP, other)
	s := share{takes: func(f *model.Frontend) bool { return f.Entry.Protocol == model.SCTP }}
	for _, c := range []struct {
		what                 string
		put, del, puts, dels []model.Part
	}{
		{"nothing of its own", []model.Part{node, pool, tcp}, nil, nil, nil},
		{"the first", []model.Part{first}, nil, []model.Part{first, pool, node}, nil},
		{"a changed node", []model.Part{node2}, []model.Part{node}, []model.Part{node2}, []model.Part{node}},
		{"another pool", []model.Part{second, other}, []model.Part{first}, []model.Part{second, other}, []model.Part{first, pool}},
		{"others go", nil, []model.Part{tcp, pool}, nil, nil},
		{"the last", nil, []model.Part{second, other}, nil, []model.Part{second, other, node2}},
		{"again", []model.Part{first}, nil, []model.Part{first, pool, node2}, nil},
	} {
		puts, dels := s.of(c.put, c.del)
		if !slices.Equal(puts, c.puts) || !slices.Equal(dels, c.dels) {
			t.Errorf("%s: put %v and %v, want %v and %v", c.what, puts, dels, c.puts, c.dels)
		}
	}
}
