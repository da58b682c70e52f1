// Package denial reports what network policies drop, and what audited ones would. The engine logs the first bytes of
// such packets to a group of nflog, or reports their ends itself, as many as its limit lets through; verdict names the
// policies and rules.
package denial

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/nflog"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// Options are what a Reader reads, and how.
type Options struct {
	Engine Engine // nil: it logs to nflog
	Group  uint16 // of nflog
	// prefixes of the engine's logs
	Deny, Audit, Forged string
	// calls a function with the policies of now, which that may not change
	Policies func(func(*model.Policies))
	Closed   func(*model.Subject) bool // whether a pod drops what its policies allow; nil: none does
	Retry    time.Duration             // between two attempts to read a group that another program has; 0: 10 s
	Log      *slog.Logger
}

// Engine is a policy engine that reports packets itself.
type Engine interface {
	// Denials calls yield with both ends of each packet that was dropped, also for its source, or would be by audited
	// policies, until ctx ends. forged is the device by which one came in that was dropped for its source, else "".
	Denials(ctx context.Context, yield func(src, dst netip.AddrPort, protocol model.Protocol,
		audited bool, forged string)) error
}

// Counts are packets that were reported, by policy. A packet that several policies deny together counts for each.
type Counts struct {
	Denied, Audited map[model.PolicyRef]uint64
	Unnamed         uint64 // of which no policy could be named: the pod is unknown, or policies changed since
	Lost            uint64 // how often the socket was full
}

// Bounds of what is remembered.
const (
	policies = 1000        // counted apart; what others deny counts as Unnamed
	pause    = time.Minute // between two lines for packets that differ in the source's port alone
)

// Reader reports denials.
type Reader struct {
	options Options
	ns      *netns.Namespace // nil: the engine reports
	log     *nflog.Log       // nil: the engine reports, or another program has the group
	since   time.Time        // when seen was made
	seen    map[line]bool    // what was reported since

	mu     sync.Mutex
	counts Counts
}

// line is what a line of the log is about.
type line struct {
	kind   kind
	packet verdict.Packet // without the source's port
}

// kind is what became of a packet.
type kind uint8

const (
	denied  kind = iota // dropped by a policy
	audited             // accepted, and audited policies would drop it
	forged              // dropped: its source isn't one of the device that it came in by
)

// messages are the log's.
var messages = [...]string{denied: "policy denied a connection",
	audited: "policy would deny a connection: it is audited",
	forged:  "packet with a forged source dropped"}

func kindOf(isAudited, isForged bool) kind {
	switch {
	case isForged:
		return forged
	case isAudited:
		return audited
	}
	return denied
}

// Open begins to read in the calling thread's network namespace. Where another program has the group, Run tries again.
func Open(o Options) (*Reader, error) {
	o.Retry = cmp.Or(o.Retry, 10*time.Second)
	r := &Reader{options: o, seen: map[line]bool{}, counts: Counts{
		Denied: map[model.PolicyRef]uint64{}, Audited: map[model.PolicyRef]uint64{}}}
	if o.Engine != nil {
		return r, nil
	}
	var err error
	if r.ns, err = netns.Current(); err != nil {
		return nil, fmt.Errorf("read denials: %w", err)
	}
	if r.log, err = nflog.Listen(o.Group, nflog.Headers); err != nil {
		o.Log.Warn("denials are not reported: stop the program that reads the group, retrying", "group", o.Group,
			"error", err, "retry_in", o.Retry)
	}
	return r, nil
}

// listen tries to read the group until it can. It returns false if ctx ends first.
func (r *Reader) listen(ctx context.Context) bool {
	for r.log == nil {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(r.options.Retry):
		}
		err := r.ns.Do(func() (err error) {
			r.log, err = nflog.Listen(r.options.Group, nflog.Headers)
			return err
		})
		if err == nil {
			r.options.Log.Info("denials are reported again", "group", r.options.Group)
		}
	}
	return true
}

// Close ends reading. It comes after Run.
func (r *Reader) Close() (err error) {
	if r.log != nil {
		err = r.log.Close()
	}
	if r.ns != nil {
		err = errors.Join(err, r.ns.Close())
	}
	return err
}

// Counts returns what was reported so far.
func (r *Reader) Counts() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.counts
	c.Denied, c.Audited = maps.Clone(c.Denied), maps.Clone(c.Audited)
	return c
}

// Run reports until ctx ends.
func (r *Reader) Run(ctx context.Context) error {
	if r.ns == nil {
		return r.options.Engine.Denials(ctx, func(src, dst netip.AddrPort, protocol model.Protocol, audited bool,
			forged string) {
			r.report(verdict.Packet{Src: src, Dst: dst, Protocol: protocol, In: forged}, kindOf(audited, forged != ""))
		})
	}
	if !r.listen(ctx) {
		return nil
	}
	return r.log.Run(ctx, r.logged, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.counts.Lost++
	})
}

// logged takes in a packet of nflog.
func (r *Reader) logged(e nflog.Entry) {
	p, ok := parse(e.Payload)
	switch audited, forged := e.Prefix == r.options.Audit, e.Prefix == r.options.Forged; {
	case ok && (audited || forged || e.Prefix == r.options.Deny):
		if forged {
			p.In = r.nameOf(e.In)
		}
		r.report(p, kindOf(audited, forged))
	}
}

// nameOf returns the name of an interface, "" where it is gone.
func (r *Reader) nameOf(index int) (name string) {
	_ = r.ns.Do(func() error {
		i, err := net.InterfaceByIndex(index)
		if err == nil {
			name = i.Name
		}
		return err
	})
	return name
}

// report counts and logs a packet.
func (r *Reader) report(p verdict.Packet, k kind) {
	var o verdict.PolicyOutcome
	var from, to string
	closed := ""
	r.options.Policies(func(s *model.Policies) {
		o, from, to = verdict.Policy(s, p), end(s, p.Src), end(s, p.Dst)
		closed = r.closed(s, p)
	})
	rules, reason := rulesOf(o, k)
	if closed != "" && k == denied && o.Verdict != model.VerdictDrop {
		reason = closed
	}
	r.count(rules, k)
	now := time.Now()
	if now.Sub(r.since) > pause {
		r.since = now
		clear(r.seen)
	}
	l := line{k, p}
	l.packet.Src = netip.AddrPortFrom(p.Src.Addr(), 0)
	if r.seen[l] {
		return
	}
	r.seen[l] = true
	r.options.Log.Info(messages[k], "from", from, "to", to, "protocol", p.Protocol.String(), "rules", texts(rules),
		"reason", reason)
}

// closed returns that an end of a packet drops what its policies allow, "" if none does.
func (r *Reader) closed(s *model.Policies, p verdict.Packet) string {
	for _, a := range []netip.AddrPort{p.Src, p.Dst} {
		if pod := s.Subjects[a.Addr()]; pod != nil && r.options.Closed != nil && r.options.Closed(pod) {
			return fmt.Sprintf("pod %s drops everything that depends on what the kernel refuses: "+
				"fairlead_failing_owners and the log name it", pod.Pod)
		}
	}
	return ""
}

// rulesOf returns the rules that deny, or would, and why; none where the policies of now don't.
func rulesOf(o verdict.PolicyOutcome, k kind) (rules []model.RuleRef, reason string) {
	switch {
	case k == forged && o.Verdict == model.VerdictDrop && len(o.Steps) == 0:
		return nil, o.Reason
	case k == forged:
		return nil, "its source isn't one of the device that it came in by"
	case k == audited:
		if rules = o.Reported(); len(rules) > 0 {
			return rules, "the audited rules would drop it"
		}
	case o.Verdict == model.VerdictDrop:
		return o.By, o.Reason
	}
	return nil, "changed since: " + o.Reason
}

// count counts a packet for the policies of rules.
func (r *Reader) count(rules []model.RuleRef, k kind) {
	r.mu.Lock()
	defer r.mu.Unlock()
	counts := r.counts.Denied
	if k == audited {
		counts = r.counts.Audited
	}
	named := map[model.PolicyRef]bool{}
	for _, rule := range rules {
		p := rule.PolicyRef
		_, known := counts[p]
		if !named[p] && (known || len(counts) < policies) {
			named[p] = true
			counts[p]++
		}
	}
	if len(named) == 0 {
		r.counts.Unnamed++
	}
}

// end returns an end of a packet, with the name of what has the address as far as policies know it.
func end(s *model.Policies, a netip.AddrPort) string {
	if pod := s.Subjects[a.Addr()]; pod != nil {
		return fmt.Sprintf("pod %s (%s)", pod.Pod, a)
	}
	if p := s.Singles[a.Addr()]; p != nil {
		return fmt.Sprintf("%s (%s)", p.Name, a)
	}
	return a.String()
}

// texts returns at most a few rules in words.
func texts(rules []model.RuleRef) string {
	const most = 5
	var l []string
	for _, r := range rules[:min(most, len(rules))] {
		l = append(l, r.String())
	}
	if more := len(rules) - len(l); more > 0 {
		l = append(l, fmt.Sprintf("%d more", more))
	}
	return strings.Join(slices.Compact(l), ", ")
}
