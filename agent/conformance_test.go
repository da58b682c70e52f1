package agent

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/service"
	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/dataplane/service/iptables"
	"fairlead.dev/fairlead/dataplane/service/ipvs"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/dataplane/service/userspace"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// faultyRunner is the service side as a conformance.Runner.
type faultyRunner struct {
	*service.Planes
	mode    mode.Mode
	parts   map[model.ServicePart]bool
	repairs map[string]uint64 // that there must be, by plane, before the kernel is as told
}

// emulated is how many times longer than here things may take in the second kernel, whose processor is emulated and may
// have to share a real one.
const emulated = 10

// implementation is a mode to be judged.
func implementation(m mode.Mode) conformance.Implementation {
	slow := 1
	if *second {
		slow = emulated
	}
	start := func() (conformance.Runner[model.ServicePart], error) {
		log := slog.New(slog.DiscardHandler)
		if testing.Verbose() && os.Getenv("FAIRLEAD_TEST_LOG") != "" {
			log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
		}
		s, err := service.OpenPlanes(m, log)
		return &faultyRunner{Planes: s, mode: m, parts: map[model.ServicePart]bool{}}, err
	}
	return conformance.Implementation{Capabilities: m.Capabilities, Slow: slow, Start: start}
}

var (
	second       = flag.Bool("second-kernel", false, "judge the modes that are judged in the second kernel")
	clusters     = flag.Int("worlds", 200, "random worlds for each mode")
	replacements = flag.Int("replacements", 300, "endpoints that are replaced under traffic, for each mode")
)

// Where modes are judged. The host may lack IPVS: that one is judged in the second kernel alone, and those that stand
// on netfilter there too, for a second version of it. "iptables" is one of its variants.
var (
	onHost   = []string{"nftables", "iptables-legacy", "iptables-nft", "userspace", "ebpf"}
	onSecond = []string{"ipvs", "nftables", "iptables-legacy", "iptables-nft", "ebpf"}
)

// here judges the modes of the kernel at hand, side by side where the processors are real.
func here(t *testing.T, runCase func(t *testing.T, s conformance.Implementation)) {
	each(t, !*second, runCase)
}

// inTurn is here with one mode after the other: beside others' traffic a datagram may be lost.
func inTurn(t *testing.T, runCase func(t *testing.T, s conformance.Implementation)) {
	each(t, false, runCase)
}

func each(t *testing.T, parallel bool, runCase func(t *testing.T, s conformance.Implementation)) {
	names := onHost
	if *second {
		names = onSecond
	}
	for _, name := range names {
		m, err := mode.Of(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			if parallel {
				t.Parallel()
			}
			runCase(t, implementation(m))
		})
	}
}

// rawSCTP has SCTP spoken by raw sockets until t and its parallel subtests, which t.Setenv wouldn't let be, have ended.
func rawSCTP(t *testing.T) {
	if err := os.Setenv(echo.RawSCTP, "1"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Unsetenv(echo.RawSCTP) })
}

func TestEveryModeRunsConformance(t *testing.T) {
	for _, m := range mode.All() {
		if m.Name != "iptables" && !slices.Contains(append(onHost, onSecond...), m.Name) {
			t.Errorf("mode %s is judged nowhere", m.Name)
		}
	}
}

// Change also keeps what is wanted, to disturb some of it.
func (j *faultyRunner) Change(put, del []model.ServicePart) {
	for _, p := range del {
		delete(j.parts, p)
	}
	for _, p := range put {
		j.parts[p] = true
	}
	j.Planes.Change(put, del)
}

// InjectFault implements conformance.Disturber: as another program would, it removes what the parts need past the
// loop's knowledge, and a chain's rules with the nft command.
func (j *faultyRunner) InjectFault(ctx context.Context) error {
	j.repairs = map[string]uint64{}
	others, err := j.mode.Open(slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer func() {
		for _, p := range others {
			p.Close()
		}
	}()
	for _, p := range others {
		parts, _ := (&mode.Share{Serves: p.Serves}).Of(slices.Collect(maps.Keys(j.parts)), nil)
		if len(parts) == 0 {
			continue // nothing to harm
		}
		j.repairs[p.Name] = j.Status()[p.Name].Repairs + 1
		if err := harmAny(ctx, p.Impl, parts); err != nil {
			return err
		}
		if p.Name == "nftables" {
			out, err := exec.Command("nft", "flush", "chain", "inet", nftables.Table, "enter4").CombinedOutput()
			if err != nil {
				return fmt.Errorf("nft flush chain: %w: %s", err, out)
			}
		}
	}
	return nil
}

// harmAny harms what a plane wrote for parts.
func harmAny(ctx context.Context, plane any, parts []model.ServicePart) error {
	switch p := plane.(type) {
	case dataplane.Plane[model.ServicePart, nftables.Key, string]:
		return harm(ctx, p, parts)
	case dataplane.Plane[model.ServicePart, iptables.Key, string]:
		return harm(ctx, p, parts)
	case dataplane.Plane[model.ServicePart, ipvs.Key, string]:
		return harm(ctx, p, parts)
	case dataplane.Plane[model.ServicePart, userspace.Key, string]:
		return harm(ctx, p, parts)
	case dataplane.Plane[model.ServicePart, ebpf.Key, string]:
		return harm(ctx, p, parts)
	}
	return fmt.Errorf("no harm is known for a %T", plane)
}

// harm removes what only some parts need; what all stand on stays.
func harm[T any, K dataplane.Key](ctx context.Context, s dataplane.Plane[T, K, string], parts []T) error {
	read, err := s.Read(ctx)
	if err != nil {
		return err
	}
	held, gone := map[K]bool{}, map[K]string{}
	for _, f := range read {
		held[f.Key] = true
	}
	for _, p := range parts {
		switch any(p).(type) {
		case *model.ServiceNode, *model.PolicyNode:
			continue
		}
		for _, f := range s.Render(p) {
			if held[f.Key] { // what changes beside the harm may not be written yet
				gone[f.Key] = f.Value
			}
		}
	}
	if len(gone) == 0 {
		return errors.New("nothing to harm")
	}
	lowest := slices.MinFunc(slices.Collect(maps.Keys(gone)), func(a, b K) int { return a.Rank() - b.Rank() }).Rank()
	highest := slices.MaxFunc(slices.Collect(maps.Keys(gone)), func(a, b K) int { return a.Rank() - b.Rank() }).Rank()
	var del []dataplane.Fact[K, string]
	for k, v := range gone {
		if k.Rank() == highest || k.Rank() > lowest {
			del = append(del, dataplane.Fact[K, string]{Key: k, Value: v})
		}
	}
	return s.Write(ctx, nil, del)
}

// Sync also waits for what Disturb did to be seen and repaired.
func (j *faultyRunner) Sync(ctx context.Context) error {
	for name, repairs := range j.repairs {
		for j.Status()[name].Repairs < repairs {
			select {
			case <-ctx.Done():
				return fmt.Errorf("drift was not repaired: %w", ctx.Err())
			case <-time.After(time.Millisecond):
			}
		}
	}
	return j.Planes.Sync(ctx)
}

// Dump implements conformance.Dumper.
func (j *faultyRunner) Dump() string {
	text := ""
	for _, c := range [][]string{{"nft", "list", "ruleset"}, {"ip", "route", "show", "table", "local"}} {
		out, err := exec.Command(c[0], c[1:]...).CombinedOutput()
		text += fmt.Sprintf("%v: %v\n%s", c, err, out)
	}
	return text
}

func TestConformance(t *testing.T) { here(t, conformance.Run) }

// Cases that some mode is not asked name one that there is.
func TestCasesNameModes(t *testing.T) {
	services, err := conformance.Cases("service")
	if err != nil {
		t.Fatal(err)
	}
	policies, err := conformance.Cases("policy")
	if err != nil {
		t.Fatal(err)
	}
	cases, named := slices.Concat(services, policies), 0
	for _, c := range cases {
		for _, s := range c.Steps {
			for _, u := range s.Unless {
				if e, ok := strings.CutPrefix(u.Mode, "engine="); ok {
					if !slices.ContainsFunc(engines, func(o *conformance.Engine) bool { return o.Name == e }) {
						t.Errorf("%s: no policy engine %s", c.File, e)
					}
				} else if _, err := mode.Of(u.Mode); err != nil && u.Mode != "network=own" {
					t.Errorf("%s: %v", c.File, err)
				}
				named++
			}
		}
	}
	if named == 0 {
		t.Error("no case names a mode")
	}
}
