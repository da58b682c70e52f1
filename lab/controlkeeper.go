package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"fairlead.dev/fairlead/lab/kubeproxy"
)

// keeper is a program that keeps a node's kernel as an API server says. It is started, stopped, and perhaps started again.
type keeper interface {
	start(context.Context) (began, error)   // until all is in the kernel
	stop() error                            // what it wrote stays
	used() (time.Duration, error)           // of processors since it was started, with the programs that it ran
	memory() (now, most int64, err error)   // bytes
	delays(context.Context) (delays, error) // from a change's arrival to the kernel, counted since it was started; nil: it doesn't tell
	end() error                             // whatever its state
}

// began is what a start took.
type began struct {
	wall time.Duration // from the program's start until all was in the kernel
	sync time.Duration // of that, from when all was known; as it says itself
	cpu  time.Duration // until then
}

// ourKeeper is an agent of ours.
type ourKeeper struct {
	run  *run
	node *node
}

func (k *ourKeeper) start(ctx context.Context) (b began, err error) {
	if err := k.run.hire(k.node); err != nil {
		return b, err
	}
	if b.wall, err = k.node.wait(ctx); err != nil {
		return b, err
	}
	if b.cpu, err = k.node.used(); err != nil {
		return b, err
	}
	if s, err := k.node.loop(); err != nil || s.Error != "" || len(s.Failing) > 0 {
		return b, errors.Join(err, fmt.Errorf("the agent could not make everything true: %s %v", s.Error, s.Failing))
	}
	m, err := k.metrics()
	if err != nil {
		return b, err
	}
	told, err := kubeproxy.ParseMetrics(m)
	b.sync = told.Full.Sum
	return b, err
}

func (k *ourKeeper) metrics() ([]byte, error) {
	text, _, err := k.node.get("/metrics")
	if err != nil {
		err = fmt.Errorf("ask the agent of %s for its metrics: %w", k.node.name, err)
	}
	return text, err
}

// stop kills it, as nothing kinder would show more.
func (k *ourKeeper) stop() error {
	k.node.kill()
	k.node.process = nil
	return nil
}

func (k *ourKeeper) end() error {
	if k.node.process != nil {
		k.node.process.end()
		k.node.process = nil
	}
	return nil
}

func (k *ourKeeper) used() (time.Duration, error)         { return k.node.used() }
func (k *ourKeeper) memory() (now, most int64, err error) { return k.node.memory() }

func (k *ourKeeper) delays(context.Context) (delays, error) {
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

// since gives the times after an earlier look, each as its upper bound in ns: none is told shorter than it was.
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

// proxyKeeper is a kube-proxy.
type proxyKeeper struct {
	options kubeproxy.Options
	proxy   *kubeproxy.Proxy // nil: it does not run
}

// proxyOptions are those of a kube-proxy that an API server of ours tells.
func (r *run) proxyOptions(binary string, a proxyArm, p *pair, kubeconfig string) kubeproxy.Options {
	return kubeproxy.Options{Binary: binary, Mode: a.mode, Variant: a.variant, Namespace: p.node, Node: nodeName, Dir: filepath.Join(r.tmp, p.node.Name), Kubeconfig: kubeconfig}
}

func (k *proxyKeeper) start(ctx context.Context) (began, error) {
	p, cold, err := kubeproxy.ColdSync(ctx, k.options)
	if err != nil {
		return began{}, err
	}
	k.proxy = p
	return began{cold.Wall, cold.Sync, cold.CPU()}, nil
}

func (k *proxyKeeper) stop() error { return k.end() }

func (k *proxyKeeper) end() (err error) {
	if k.proxy != nil {
		err = k.proxy.Stop()
		k.proxy = nil
	}
	return err
}

func (k *proxyKeeper) used() (time.Duration, error) { return k.proxy.CPU() }

func (k *proxyKeeper) memory() (now, most int64, err error) {
	u, err := k.proxy.Usage()
	return u.Resident, u.Peak, err
}

func (k *proxyKeeper) delays(context.Context) (delays, error) { return nil, nil }
