package advise

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
)

// Changed is something that would be otherwise with another mode.
type Changed struct {
	Text string `json:"text"`
	Goes bool   `json:"no_longer,omitempty"` // it holds of the current mode alone
}

// Lacks returns what objects use and each of the modes doesn't support, by mode: the problems of a resolver for it that
// a resolver for another mode doesn't have. What no mode supports is the objects' own fault.
func Lacks(objects []source.Object, config resolve.Config, options mode.Options, modes []string) (map[string][]string,
	error) {
	changes := source.Put(objects...)
	type problem struct {
		object               source.Key
		field, reason, entry string
	}
	found, count := map[string][]source.Problem{}, map[problem]int{}
	key := func(p source.Problem) problem { return problem{p.Object, p.Field, p.Reason, p.Entry} }
	for _, name := range modes {
		m, err := mode.Of(name)
		if err != nil {
			return nil, err
		}
		c := m.With(options).Resolve(config)
		if err := c.Validate(); err != nil { // such as a scheduler of all Services that the mode doesn't have
			found[name] = append(found[name], source.Problem{Reason: "Configuration", Message: err.Error()})
			continue
		}
		r := resolve.New(c)
		r.Apply(changes)
		seen := map[problem]bool{}
		for _, p := range r.Problems() {
			if !seen[key(p)] {
				seen[key(p)] = true
				count[key(p)]++
				found[name] = append(found[name], p)
			}
		}
	}
	out := map[string][]string{}
	for name, l := range found {
		for _, p := range l {
			if count[key(p)] < len(modes) {
				out[name] = append(out[name], p.String())
			}
		}
		out[name] = few(out[name])
	}
	return out, nil
}

// ForeignHooks returns the hooks of other programs that would handle what the calling thread's network namespace
// forwards to pods: they keep mode ebpf from redirecting packets. None are known where programs can't be loaded.
func ForeignHooks() []string {
	hooks, err := device.SurveyHooks()
	if err != nil {
		return nil
	}
	return foreign(device.Acting(hooks, unix.AF_INET))
}

// foreign returns the names of the hooks that aren't Fairlead's own.
func foreign(hooks []device.Hook) (names []string) {
	for _, h := range hooks {
		if !strings.HasPrefix(h.Table, "fairlead") {
			names = append(names, h.String())
		}
	}
	return names
}

// most is how many sentences of a kind are shown.
const most = 5

// few returns the first of sentences, and how many more there are.
func few(l []string) []string {
	if len(l) <= most {
		return l
	}
	return append(l[:most:most], fmt.Sprintf("and %d more", len(l)-most))
}

// Differences returns what would be otherwise with candidate b in place of a, as the modes' capabilities say.
func Differences(a, b Candidate) (l []Changed) {
	x, err := mode.Of(a.Mode)
	y, failed := mode.Of(b.Mode)
	if cmp.Or(err, failed) != nil || a.Mode == b.Mode {
		return nil
	}
	for _, s := range []struct {
		now, then bool
		text      string
	}{
		{x.Ends, y.Ends, "Connections run through the agent and end with it."},
		{x.MasqueradesAll, y.MasqueradesAll, "Endpoints never see clients' addresses."},
		{x.Tracks(), y.Tracks(), "The kernel's connection tracking has the Services' TCP connections."},
	} {
		if s.now != s.then {
			l = append(l, Changed{Text: s.text, Goes: s.now})
		}
	}
	missing := func(of, in []model.Remark, goes bool) {
		for _, r := range of {
			known := false
			for _, o := range in {
				known = known || o.ID == r.ID
			}
			known = known || slices.Contains(l, Changed{Text: r.Text, Goes: goes})
			if !known {
				l = append(l, Changed{Text: r.Text, Goes: goes})
			}
		}
	}
	now, then := remarks(x.Capabilities), remarks(y.Capabilities)
	missing(then, now, false)
	missing(now, then, true)
	return l
}

// remarks returns all that a mode's capabilities say of packets.
func remarks(c model.Capabilities) (l []model.Remark) {
	for _, of := range [][]model.Remark{c.Unserved, c.Long, c.Unmatched, c.Remarks} {
		l = append(l, of...)
	}
	return l
}
