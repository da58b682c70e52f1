package policy

import (
	"context"
	"log/slog"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/policy/denial"
	"fairlead.dev/fairlead/agent/policy/revoke"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// established is what the agent does about open connections beside the engine: it cuts those that policies no longer
// allow, and reports those that they deny. Without an engine that has it done so, neither.
type established struct {
	revoker *revoke.Revoker
	denials *denial.Reader // nil without an engine that reports or logs
	packets packetCounter  // nil where the engine counts none
}

// packetCounter is an engine that counts the packets that policies deny, and those that audited ones would.
type packetCounter interface {
	Packets() (denied, audited uint64, err error)
}

// openEstablished puts itself before an engine's loop.
func openEstablished(e mode.Engine, plane *mode.PolicyPlane, log *slog.Logger) (x established, err error) {
	x.packets, _ = plane.Impl.(packetCounter)
	closed := func(s *model.Subject) bool {
		_, is := slices.BinarySearch(plane.Status().Closed, model.PolicyLabelOf(s))
		return is
	}
	if engine, is := plane.Impl.(denial.Engine); is {
		f := &followed{Runner: plane.Runner, now: model.NewPolicies()}
		plane.Runner = f
		x.denials, err = denial.Open(denial.Options{Engine: engine, Policies: f.policies, Closed: closed,
			Log: log.With("plane", plane.Name)})
		return x, err
	}
	if !e.Marked {
		return x, nil
	}
	if x.revoker, err = revoke.Open(plane.Runner, log.With("plane", plane.Name)); err != nil {
		return x, err
	}
	plane.Runner = x.revoker
	x.denials, err = denial.Open(denial.Options{Group: e.Log.Group, Deny: e.Log.Deny, Audit: e.Log.Audit,
		Forged:   e.Log.Forged,
		Policies: x.revoker.Policies, Closed: closed, Log: log.With("plane", plane.Name)})
	return x, err
}

// followed is a loop that holds the policies that it was given.
type followed struct {
	reconcile.Runner[model.PolicyPart]
	mu  sync.Mutex
	now *model.Policies
}

// Change implements reconcile.Runner.
func (f *followed) Change(put, del []model.PolicyPart) {
	f.mu.Lock()
	f.now.Apply(model.Change[model.PolicyPart]{Put: put, Del: del})
	f.mu.Unlock()
	f.Runner.Change(put, del)
}

// policies calls a function with the policies of now, which that may not change.
func (f *followed) policies(with func(*model.Policies)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	with(f.now)
}

// readDenials reports denials until ctx ends.
func (x established) readDenials(ctx context.Context, log *slog.Logger) {
	if x.denials == nil {
		return
	}
	if err := x.denials.Run(ctx); err != nil {
		log.Warn("denials are no longer reported: restart the agent", "error", err)
	}
}

// closeDenials ends the reading of denials.
func (x established) closeDenials() error {
	if x.denials == nil {
		return nil
	}
	return x.denials.Close()
}

// cuts returns what was cut, nil where nothing is.
func (x established) cuts() *subsystem.Cuts {
	if x.revoker == nil {
		return nil
	}
	s := x.revoker.Cuts()
	return &s
}

// cutProblems returns the problem that connections are not cut, if there is one.
func (p *Policies) cutProblems() []source.Problem {
	if p.revoker == nil || p.revoker.Cuts().Problem == "" {
		return nil
	}
	return []source.Problem{{Object: source.Key{Kind: source.Node, Name: p.Resolve.Node}, Reason: "ConnectionsNotCut",
		Message: "connections that policies no longer allow go on: " + p.revoker.Cuts().Problem}}
}

var (
	cutDesc = prometheus.NewDesc("fairlead_policy_connections_cut_total", "Open connections that were cut because "+
		"policies no longer allow them.", nil, nil)
	cuttingDesc = prometheus.NewDesc("fairlead_policy_connections_cut", "Connections that the kernel still tracks of "+
		"those that were cut.", nil, nil)
	policyPacketsDesc = prometheus.NewDesc("fairlead_policy_packets_total", "Packets that policies dropped (denied), "+
		"and that audited policies would drop (audited), logged or not, since the rules were written.",
		[]string{"decision"}, nil)
	deniedDesc = prometheus.NewDesc("fairlead_policy_denied_total", "Packets that policies dropped, as far as they were "+
		"logged (100 a second), by policy; other: none could be named, or it is beyond the first 1,000.",
		[]string{"policy"}, nil)
	auditedDesc = prometheus.NewDesc("fairlead_policy_audited_total", "Packets that audited policies would drop, as far "+
		"as they were logged, by policy.", []string{"policy"}, nil)
)

// collect makes metrics of what was cut and denied.
func (x established) collect(ch chan<- prometheus.Metric) {
	if x.packets != nil {
		if denied, audited, err := x.packets.Packets(); err == nil {
			ch <- prometheus.MustNewConstMetric(policyPacketsDesc, prometheus.CounterValue, float64(denied), "denied")
			ch <- prometheus.MustNewConstMetric(policyPacketsDesc, prometheus.CounterValue, float64(audited), "audited")
		}
	}
	if s := x.cuts(); s != nil {
		ch <- prometheus.MustNewConstMetric(cutDesc, prometheus.CounterValue, float64(s.Cut))
		ch <- prometheus.MustNewConstMetric(cuttingDesc, prometheus.GaugeValue, float64(s.Marked))
	}
	if x.denials == nil {
		return
	}
	c := x.denials.Counts()
	count := func(desc *prometheus.Desc, counts map[model.PolicyRef]uint64) {
		for p, n := range counts {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), p.String())
		}
	}
	count(deniedDesc, c.Denied)
	count(auditedDesc, c.Audited)
	ch <- prometheus.MustNewConstMetric(deniedDesc, prometheus.CounterValue, float64(c.Unnamed), "other")
}
