package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/testbed"
)

// instance is a program that keeps a node's kernel as an API server says. It is started, stopped, and perhaps started
// again.
type instance interface {
	start(context.Context) (began, error) // until all is in the kernel
	stop() error                          // what it wrote stays
	used() (time.Duration, error)         // of processors since it was started, with the programs that it ran
	memory() (now, most int64, err error) // bytes
	// from a change's arrival to the kernel, counted since it was started; nil: it doesn't measure that
	delays(context.Context) (delays, error)
	end() error // whatever its state
}

// began is what a start took.
type began struct {
	wall time.Duration // from the program's start until all was in the kernel
	sync time.Duration // of that, from when all was known; as it says itself
	cpu  time.Duration // until then
}

// agentInstance is an agent of ours.
type agentInstance struct {
	bed  *testbed.Testbed
	node *testbed.Node
}

func (k *agentInstance) start(ctx context.Context) (b began, err error) {
	if err := k.bed.StartAgent(k.node); err != nil {
		return b, err
	}
	if b.wall, err = k.node.WaitReady(ctx); err != nil {
		return b, err
	}
	if b.cpu, err = k.node.Agent.UsedByAll(); err != nil {
		return b, err
	}
	if s, err := k.node.Status(); err != nil || s.Error != "" || len(s.Failing) > 0 {
		return b, errors.Join(err, fmt.Errorf("the agent could not make everything true: %s %v", s.Error, s.Failing))
	}
	m, err := k.metrics()
	if err != nil {
		return b, err
	}
	published, err := kubeproxy.ParseMetrics(m)
	b.sync = published.Full.Sum
	return b, err
}

func (k *agentInstance) metrics() ([]byte, error) {
	text, _, err := k.node.Get("/metrics")
	if err != nil {
		err = fmt.Errorf("ask the agent of %s for its metrics: %w", k.node.Pair.Near.Name, err)
	}
	return text, err
}

// stop kills it, as nothing kinder would show more.
func (k *agentInstance) stop() error {
	k.node.Agent.Kill()
	k.node.Agent = nil
	return nil
}

func (k *agentInstance) end() error {
	if k.node.Agent != nil {
		k.node.Agent.End()
		k.node.Agent = nil
	}
	return nil
}

func (k *agentInstance) used() (time.Duration, error) { return k.node.Agent.UsedByAll() }

func (k *agentInstance) memory() (now, most int64, err error) { return k.node.Agent.Memory() }

func (k *agentInstance) delays(context.Context) (delays, error) {
	text, err := k.metrics()
	if err != nil {
		return nil, err
	}
	return parseDelays(text)
}

// delays counts times by the upper bound that they keep, rising; cumulated.
type delays []struct {
	bound time.Duration
	count int64
}

// delayMetric is the agent's histogram of times from a change's arrival until the kernel had it.
const delayMetric = "fairlead_programming_seconds"

func parseDelays(text []byte) (l delays, err error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	all, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("read an agent's metrics: %w", err)
	}
	if len(all[delayMetric].GetMetric()) != 1 {
		return nil, fmt.Errorf("read an agent's metrics: %d of %s", len(all[delayMetric].GetMetric()), delayMetric)
	}
	h := all[delayMetric].GetMetric()[0].GetHistogram()
	for _, b := range h.GetBucket() {
		bound := time.Duration(min(b.GetUpperBound(), 60) * float64(time.Second)) // the last is +Inf, the one before 10 s
		l = append(l, delays{{bound, int64(b.GetCumulativeCount())}}...)
	}
	return l, nil
}

// since returns the times after an earlier look, each as its upper bound in ns: none is shorter than it was.
func (d delays) since(before delays) (ns []int64) {
	below := int64(0)
	for i, b := range d {
		n := b.count - before[i].count
		for ; below < n; below++ {
			ns = append(ns, int64(b.bound))
		}
	}
	return ns
}

// kubeProxyInstance is a kube-proxy.
type kubeProxyInstance struct {
	options kubeproxy.Options
	proxy   *kubeproxy.Proxy // nil: it does not run
}

// proxyOptions returns the options of a kube-proxy with an API server of ours.
func proxyOptions(b *testbed.Testbed, binary string, a experiment.KubeProxyArm, p *testbed.Pair,
	kubeconfig string) kubeproxy.Options {
	return kubeproxy.Options{Binary: binary, Mode: a.Mode, Variant: a.Variant, Namespace: p.Near, Node: testbed.NodeName,
		Dir: filepath.Join(b.Dir, p.Near.Name), Kubeconfig: kubeconfig}
}

func (k *kubeProxyInstance) start(ctx context.Context) (began, error) {
	p, cold, err := kubeproxy.ColdSync(ctx, k.options)
	if err != nil {
		return began{}, err
	}
	k.proxy = p
	return began{cold.Wall, cold.Sync, cold.CPU()}, nil
}

func (k *kubeProxyInstance) stop() error { return k.end() }

func (k *kubeProxyInstance) end() (err error) {
	if k.proxy != nil {
		err = k.proxy.Stop()
		k.proxy = nil
	}
	return err
}

func (k *kubeProxyInstance) used() (time.Duration, error) { return k.proxy.CPU() }

func (k *kubeProxyInstance) memory() (now, most int64, err error) {
	u, err := k.proxy.Usage()
	return u.Resident, u.Peak, err
}

func (k *kubeProxyInstance) delays(context.Context) (delays, error) { return nil, nil }
