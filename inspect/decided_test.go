package inspect

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// decided decides objects for a node, everything there is.
func decided(t testing.TB, node string, objects []source.Object) *Decided {
	t.Helper()
	changes := source.Put(objects...)
	s := service.New(service.Config{Node: node})
	s.Apply(changes)
	d := OfServices(s)
	p := policy.New(policy.Config{Node: node, Devices: []policy.Device{{Name: "veth0"}}})
	p.Apply(changes)
	d.Services.Policies = p.Policies()
	n := network.New(network.Config{Node: node})
	n.Apply(changes)
	d.Network, d.Lost, d.Undecided = n.Network(), 3, "not read yet: Pod"
	d.Problems = append(d.Problems, source.Problem{Object: source.Key{Kind: source.Service, Namespace: "a", Name: "b"},
		Reason: "Odd", Message: "<odd> & \"so\"", Public: "odd", Entry: "10.0.0.1:80/tcp", Since: time.Unix(5, 0).UTC()})
	d.NetworkProblems = d.Problems[len(d.Problems)-1:]
	return d
}

// worlds are what is sent in tests: each with Services, policies of both kinds, and shared rulesets, tables, identities
// and pools.
func worlds(t testing.TB) map[string]*Decided {
	t.Helper()
	shop, _, err := manifest.Load("../examples/shop")
	if err != nil {
		t.Fatal(err)
	}
	policies := generate.NewPolicyCluster(generate.PolicySize{Pods: 300, Namespaces: 5, Here: 60, Cluster: 8}).Objects
	return map[string]*Decided{"shop": decided(t, "a", shop), "services": decided(t, "a", generate.Cluster(20, 3)),
		"policies": decided(t, generate.PolicyNode, policies), "nothing": decided(t, "a", nil)}
}

func TestWhatIsSentIsWhatWasDecided(t *testing.T) {
	for name, d := range worlds(t) {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			if err := d.Encode(&b); err != nil {
				t.Fatal(err)
			}
			text := b.String()
			got, err := Decode(&b)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, d) {
				t.Errorf("%+v\nis not what was sent: %+v", got, d)
			}
			if len(got.Services.Pools()) != len(d.Services.Pools()) {
				t.Error("frontends that share a pool have one each")
			}
			for _, v := range got.Services.Policies.Verdicts {
				if got.Services.Policies.Tables[v.PeerTable.ID] != v.PeerTable {
					t.Fatal("a verdict has a peer table of its own")
				}
			}
			for i := strings.Count(text, "\n") - 1; i >= 0; i -= 1 + i/20 { // whatever it ends before
				text = strings.Join(strings.SplitAfterN(text, "\n", i+2)[:i], "")
				if _, err := Decode(strings.NewReader(text)); !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Fatalf("%d lines alone: %v", i, err)
				}
			}
		})
	}
}

// What the model can tell apart is sent apart: nothing at all, and no condition.
func TestEmptyIsSentAsEmpty(t *testing.T) {
	d := decided(t, "a", nil)
	table := &model.PeerTable{ID: 1, Rules: []model.Rule{{Peers: []*model.Peers{}}, {}}}
	pool := &model.Pool{ID: 2}
	f := &model.Frontend{Entry: model.Entry{Addr: netip.MustParseAddr("10.0.0.1"), Port: 1, Protocol: model.TCP},
		Internal: model.Target{Pool: pool}, External: model.Target{Pool: pool}, Sources: []netip.Prefix{}}
	d.Services.Policies.Tables[1], d.Services.Frontends[f.Entry] = table, f
	var b bytes.Buffer
	if err := d.Encode(&b); err != nil {
		t.Fatal(err)
	}
	got, err := Decode(&b)
	if err != nil {
		t.Fatal(err)
	}
	if r := got.Services.Policies.Tables[1].Rules; r[0].Peers == nil || r[1].Peers != nil {
		t.Errorf("a rule for no peer became one for all: %+v", r)
	}
	if got.Services.Frontends[f.Entry].Sources == nil {
		t.Error("a frontend for no source became one for all")
	}
}

func FuzzDecode(f *testing.F) {
	for _, d := range worlds(f) {
		var b bytes.Buffer
		if err := d.Encode(&b); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes()[:min(b.Len(), 4096)])
	}
	f.Add([]byte(`{"Node":{"Name":"a"}}{"PolicyNode":{}}{"Subject":{"Out":[1,null]}}{"End":{}}`))
	f.Add([]byte(`{"Frontend":{"Internal":{"Pool":1}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := Decode(bytes.NewReader(b))
		if err != nil {
			return
		}
		var again bytes.Buffer
		if err := d.Encode(&again); err != nil {
			t.Fatal(err)
		}
		if _, err := Decode(&again); err != nil {
			t.Fatal(err)
		}
	})
}
