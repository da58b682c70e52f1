package ebpf

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/model"
)

// small are sizes for tests.
var small = Options{Sizes: policy.Sizes{Flows: 1 << 12}}

// open opens the plane of a network's node, and cleans it at the end of the test: pins outlive namespaces.
func open(n *policytest.Network) (p *Plane) {
	n.Must(n.Node.Do(func() (err error) {
		p, err = Open(small)
		return err
	}))
	n.Cleanup(func() { n.Must(errors.Join(p.Clean(context.Background()), p.Close())) })
	return p
}

// logged returns a function that returns which events there were since.
func logged(n *policytest.Network, e policytest.Engine[Key]) func() []string {
	return func() (got []string) {
		over, end := context.WithCancel(n.Context())
		end()
		n.Must(e.(*Plane).Denials(over, func(_, _ netip.AddrPort, _ model.Protocol, audited bool, forged string) {
			event := policy.Denied
			if forged != "" {
				event = policy.Forged
			} else if audited {
				event = policy.Audited
			}
			got = append(got, event.String())
		}))
		return got
	}
}

// suite opens planes beside programs at devices where inFastPath says so.
var suite = policytest.Suite[Key]{
	Open: func(n *policytest.Network) policytest.Engine[Key] {
		p := open(n)
		if inFastPath {
			newDevicePath(n)
		}
		return p
	},
	PrefixDeny: policy.Denied.String(), PrefixAudit: policy.Audited.String(),
	PrefixForged: policy.Forged.String(), Logged: logged,
}

func TestSuite(t *testing.T) { suite.Run(t) }

func TestKernelReturnsWhatIsWritten(t *testing.T) {
	n := policytest.Bare(t)
	p := open(n)
	all, none := policytest.Facts(t, p, policytest.Everything()), map[Key]Fact{}
	frame := map[Key]Fact{}
	for k, f := range all {
		if k.Kind == KindMaps || k.Kind == KindHooks {
			frame[k] = f
		}
	}
	policytest.Move(t, p, none, all)
	policytest.Move(t, p, all, frame)
	policytest.Move(t, p, frame, all)
	again := slices.Collect(maps.Values(all))
	n.Must(p.Write(t.Context(), again, again))
	if missing, extra := policytest.Read(t, p, all); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
	n.Must(p.Clean(t.Context()))
	n.Must(p.Clean(t.Context()))
	if missing, extra := policytest.Read(t, p, none); len(missing)+len(extra) > 0 {
		t.Errorf("after clean: %v", extra)
	}
}
