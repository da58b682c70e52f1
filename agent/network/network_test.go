package network

import (
	"errors"
	"log/slog"
	"testing"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	resolve "fairlead.dev/fairlead/resolve/network"
)

// TestConfigurationIsAProblem has the Node say why the CNI configuration isn't as it should be, in both modes.
func TestConfigurationIsAProblem(t *testing.T) {
	for _, chained := range []bool{false, true} {
		n := &Network{Options: Options{Chained: chained, Resolve: resolve.Config{Node: "a"}},
			log: slog.New(slog.DiscardHandler), resolver: resolve.New(resolve.Config{Node: "a"})}
		for _, err := range []error{errors.New("05-x comes first"), nil, errors.New("06-x comes first")} {
			n.setFailed(err)
			if l := n.Problems().Node; (len(l) == 1) != (err != nil) || err != nil && l[0].Message != err.Error() {
				t.Errorf("chained %t, %v: %v", chained, err, l)
			}
		}
	}
}

// rejected is a loop that can't write what all parts need: the kernel rejects it.
type rejected struct {
	reconcile.Runner[model.NetworkPart]
}

func (rejected) Serving() (bool, string) { return false, "refused" }

// Pods that run may be cut off while the pod network isn't in the kernel.
func TestPodsAreLimitedWithoutTheNetwork(t *testing.T) {
	n := &Network{planes: []mode.NetworkPlane{{Runner: rejected{}}}}
	if r := n.Readiness(); r != (subsystem.Readiness{Why: "pods are not connected: refused", Limited: true}) {
		t.Errorf("%+v", r)
	}
}
