package agent

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// Report implements subsystem.Host.
func (a *Agent) Report() {
	if a.options.Report != nil {
		a.options.Report(a.activeProblems())
	}
}

// activeProblems returns every problem that is active: those of the status page, and what the kernel rejects.
func (a *Agent) activeProblems() []source.Problem {
	all := a.shownProblems()
	for _, s := range a.subsystems {
		all = append(all, s.Problems().Events...)
	}
	for plane, l := range a.loops() {
		all = append(all, a.loopProblems(plane, l)...)
	}
	return all
}

// shownProblems returns the problems of the status page, which commands print too.
func (a *Agent) shownProblems() []source.Problem {
	a.mu.Lock()
	all := a.inputProblems()
	a.mu.Unlock()
	return append(all, a.nodeProblems()...)
}

// nodeProblems returns those problems of the status page that come of no object.
func (a *Agent) nodeProblems() []source.Problem {
	return append(a.options.Rejected.problems(a.options.Resolve.Node), a.forwardProblems()...)
}

// inputProblems returns the problems of the source and the subsystems, and those of limits. a.mu is held.
func (a *Agent) inputProblems() (all []source.Problem) {
	all = append(all, a.problems...)
	for _, s := range a.subsystems {
		p := s.Problems()
		all = slices.Concat(all, p.Input, p.Node, p.Status)
	}
	return all
}

// loopProblems returns what the kernel rejects of a data plane.
func (a *Agent) loopProblems(plane string, l subsystem.Loop) (all []source.Problem) {
	if l.NotServing != "" {
		all = append(all, source.Problem{Object: source.Key{Kind: source.Node, Name: a.options.Resolve.Node},
			Reason:  "NotServing",
			Message: fmt.Sprintf("data plane %s %s on this node: %s", plane, l.Without, l.NotServing)})
	}
	few, others := fewPerService(l.Failing)
	for _, owner := range sortedKeys(few) {
		p := source.Problem{Object: keyOf(few[owner].Owner), Reason: "Refused",
			Message: fmt.Sprintf("data plane %s can't serve %s: %s", plane, owner, few[owner].Error)}
		if l.Rejected != nil {
			p.Reason, p.Message = l.Rejected(few[owner])
		}
		all = append(all, p)
	}
	for _, service := range sortedOwners(others) { // their number changes: that is no news
		all = append(all, source.Problem{Object: keyOf(service), Reason: "Refused",
			Message: fmt.Sprintf("data plane %s can't serve more ports of %s: /status counts them", plane, service)})
	}
	return all
}

// keyOf returns the key of a Service, a pod or a policy; the zero key for other owners.
func keyOf(o model.Owner) (k source.Key) {
	switch o.Kind {
	case model.KindService, model.KindPod, model.KindNetworkPolicy, model.KindClusterNetworkPolicy:
		k = source.Key{Kind: source.Kind(o.Kind), Namespace: o.Namespace, Name: o.Name}
	}
	return k
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func sortedOwners[V any](m map[model.Owner]V) []model.Owner {
	return slices.SortedFunc(maps.Keys(m), model.Owner.Compare)
}

// forwardProblems returns the problem that the node drops forwarded packets by default, if the mode doesn't accept
// them itself.
func (a *Agent) forwardProblems() []source.Problem {
	if a.options.Firewall == nil || a.options.Mode.Accepts {
		return nil
	}
	commands, err := a.options.Firewall.Dropping()
	if err != nil || len(commands) == 0 {
		return nil // what can't be read is no problem of the node's
	}
	return []source.Problem{{Object: source.Key{Kind: source.Node, Name: a.options.Resolve.Node},
		Reason: "ForwardPolicyDrop",
		Message: fmt.Sprintf("this node drops forwarded packets by default (%s): connections to Services time out unless a "+
			"rule there accepts their packets; add such rules, set the policy to ACCEPT, or use mode iptables where the chain "+
			"is iptables' FORWARD",
			strings.Join(commands, ", "))}}
}

// LogProblems implements subsystem.Host.
func (a *Agent) LogProblems() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.batches.count > 0 {
		a.logProblems()
	}
}

// logProblems logs active problems, but for what the kernel rejects. It costs next to nothing while they are what they
// were. a.mu is held.
func (a *Agent) logProblems() {
	lists := [][]source.Problem{a.problems}
	for _, s := range a.subsystems {
		p := s.Problems()
		lists = append(lists, p.Input, p.Node)
	}
	same := len(lists) == len(a.logged.lists) && slices.Equal(a.problems, a.logged.lists[0])
	for i := 1; same && i < len(lists); i++ {
		now, was := lists[i], a.logged.lists[i]
		same = len(now) == len(was) && (len(now) == 0 || &now[0] == &was[0])
	}
	if same {
		return
	}
	a.logged.lists = lists
	a.notify(lists...)
}

// notify logs each problem once while it lasts, and the end of those that can pass by themselves.
func (a *Agent) notify(problems ...[]source.Problem) {
	now := map[source.Problem]struct{}{}
	for _, list := range problems {
		for _, p := range list {
			now[p] = struct{}{}
			if _, known := a.logged.known[p]; known {
				continue
			}
			level := slog.LevelWarn
			if p.Reason == source.KindNotRead || p.Reason == source.PolicyNotEvaluated {
				level = slog.LevelDebug // they are counted below
			}
			a.options.Log.Log(context.Background(), level, "problem", "problem", p.String())
		}
		if unread, _ := source.Unread(list); unread != "" && unread != a.logged.unread {
			a.logged.unread = unread
			a.options.Log.Info(unread + "; -v 4 lists them")
		}
		if others, _ := source.Unevaluated(list); others != "" && others != a.logged.unevaluated {
			a.logged.unevaluated = others
			a.options.Log.Warn(others + "; -v 4 lists them")
		}
	}
	for p := range a.logged.known {
		if _, stands := now[p]; !stands && !p.Since.IsZero() {
			a.options.Log.Info("problem resolved", "problem", p.String(), "lasted",
				time.Since(p.Since).Round(time.Millisecond))
		}
	}
	a.logged.known = now
}

// mostPerService is how many refused owners of one Service are named.
const mostPerService = 10

// fewPerService returns of the labels that fail the first of each owner, and how many others each owner has.
func fewPerService(all map[string]reconcile.Failing) (few map[string]reconcile.Failing, others map[model.Owner]int) {
	few, others = map[string]reconcile.Failing{}, map[model.Owner]int{}
	seen := map[model.Owner]int{}
	for _, label := range sortedKeys(all) {
		service := all[label].Owner
		if seen[service]++; seen[service] <= mostPerService {
			few[label] = all[label]
		} else {
			others[service]++
		}
	}
	return few, others
}
