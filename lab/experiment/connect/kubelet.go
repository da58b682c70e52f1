package connect

import (
	"context"
	"errors"

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// armDirectKubelet is direct on a node like that of armKubelet: what that is compared with.
const armDirectKubelet = testbed.ArmDirect + "-kubelet"

// besideKubelet is what both nodes have.
const besideKubelet = "on a node with kubelet's rules, which have connections tracked, and the empty chains that " +
	"iptables -L of both variants leaves"

var directKubelet = result.Arm{ID: armDirectKubelet, Title: "direct, kubelet", Text: "as direct, " + besideKubelet}

// findKubelet adds these arms where such rules can be written.
func (r *trial) findKubelet(ctx context.Context) (err error) {
	ns, err := testbed.NewNamespace(r.bed.Name + "-try-kubelet")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, testbed.RemoveNamespace(ns)) }()
	if err := ns.Do(func() error { return classic.Kubelet(ctx) }); err != nil {
		r.grid.Cannot = append(r.grid.Cannot, testbed.Unable{Name: directKubelet.Title, Why: testbed.Brief(err.Error())})
		return ctx.Err()
	}
	r.kubelet = true
	r.variants = append(r.variants, variant{arm: result.Arm{ID: armKubelet, Title: "ebpf, kubelet",
		Text: "as ebpf, " + besideKubelet}, metric: redirectedPackets, some: true, kubelet: true})
	return nil
}

// addNode makes an arm's pair, maybe with what kubelet leaves on its node.
func (r *trial) addNode(ctx context.Context, arm string, services int, kubelet bool) (*testbed.Pair, error) {
	p, err := r.bed.AddPair(ctx, arm, services)
	if err == nil && kubelet {
		err = p.Near.Do(func() error { return classic.Kubelet(ctx) })
	}
	return p, err
}
