package lab

import (
	"bytes"
	"cmp"
	"context"
	"encoding/csv"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/model"
)

// finish runs an experiment in some modes and gives its summary.
func finish(t *testing.T, modes []string, begin func(context.Context, *run) (work, error)) (dir string, s result.Summary) {
	t.Helper()
	o := options(t, io.Discard)
	o.Modes = modes
	dir, err := perform(t.Context(), o, begin)
	if err != nil {
		t.Fatal(err)
	}
	nothingLeft(t)
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if s, err = result.Summarize(r); err != nil {
		t.Fatal(err)
	}
	for _, c := range s.Cells {
		if c.Failed() > 0 {
			t.Errorf("%s of %s, %v: failed %v", c.Measure, c.Arm, c.Params, c.Errors)
		}
	}
	reportsFromRawFilesAlone(t, dir)
	return dir, s
}

// number is a cell's, which must be there.
func number(t *testing.T, s result.Summary, measure, arm string, params map[string]string) float64 {
	t.Helper()
	c, ok := s.Cell(measure, arm, params)
	if !ok || c.Value == nil {
		t.Errorf("no number for %s of %s, %v", measure, arm, params)
		return math.NaN()
	}
	return c.Value.Value
}

func TestTigera(t *testing.T) {
	p := tigeraProfile{Name: "tiny", Services: []int{1, 20}, Rounds: 2, Closed: 3 * time.Millisecond, Open: 20 * time.Millisecond, Warm: time.Millisecond,
		Rate: 500, Each: 5, Work: 50 * time.Microsecond, Resyncs: 2}
	dir, s := finish(t, nil, func(ctx context.Context, r *run) (work, error) { return newTigera(ctx, r, p) })
	arms := map[string]bool{}
	for _, a := range s.Design.Arms {
		arms[a.ID] = true
	}
	for _, m := range []string{armNFT, "iptables", "userspace", old, present, proxy} {
		if !arms[m] {
			t.Errorf("no arm %s: %v", m, s.Design.Missing)
		}
	}
	for _, m := range agent.Modes() { // each is an arm, or is named with its reason
		if !arms[m.Name] && !strings.Contains(m.Name, "-") && !slices.ContainsFunc(s.Design.Missing, func(w string) bool { return strings.HasPrefix(w, "Mode "+m.Name+":") }) {
			t.Errorf("mode %s is neither an arm nor named as missing", m.Name)
		}
	}
	few, many := params(1), params(20)
	for _, arm := range []string{armNFT, old, present, proxy} {
		for _, m := range []string{"connect", "crr", "http", "cpu", "rules", "rules-none", "rules-established", "load"} {
			number(t, s, m, arm, few)
			number(t, s, m, arm, many)
		}
		for _, m := range []string{"crr-first", "crr-last", "crr-none", "http-last", "http-kept", "cpu-last", "rules-first", "rules-last"} {
			number(t, s, m, arm, many)
		}
		if a, b := number(t, s, "rules-established", arm, few), number(t, s, "rules-established", arm, many); a != b {
			t.Errorf("%s: an established packet meets %v rules at 1 Service, %v at 20", arm, a, b)
		}
	}
	for arm, each := range map[string]float64{old: 2, present: 1, armNFT: 0, proxy: 0} {
		if got := number(t, s, "rules-last", arm, many) - number(t, s, "rules-first", arm, many); math.Abs(got-19*each) > 1e-9 {
			t.Errorf("%s: the last of 20 Services meets %v rules more than the first, want %v", arm, got, 19*each)
		}
	}
	for _, a := range s.Aims {
		if want := map[string]result.Outcome{"C3": result.Confirmed, "C7": result.NotTestable, "C9, comes": result.Confirmed, "C9, leaves": result.Confirmed, "C9, stays": result.Refuted}[a.ID]; want != "" && a.Outcome != want {
			t.Errorf("%s is %s, want %s", a.ID, a.Outcome, want)
		}
	}
	for _, name := range []string{"claims", "cpu-parts", "crr", "crr-value", "rules"} {
		if _, err := os.Stat(filepath.Join(dir, report.ChartsDir, name+".svg")); err != nil {
			t.Error(err)
		}
	}
}

// Every aim must be of cells that a whole run has, whatever modes there are.
func TestTigeraDesign(t *testing.T) {
	for i, modes := range [][]string{{armNFT}, {armNFT, "iptables", "userspace", "ebpf", "ipvs"}, {"userspace"}} {
		r := &tigera{stage: &stage{run: &run{}, counts: fullTigera.Services, modes: modes, layouts: classic.Layouts}, Profile: fullTigera}
		if i > 0 {
			r.kubeProxy = "/kube-proxy"
		}
		d := r.design()
		if given := slices.ContainsFunc(d.Arms, func(a result.Arm) bool { return a.ID == armProxyNFT }); given != (i > 0) || given == slices.Contains(d.Missing, noSubject) {
			t.Errorf("%v: kube-proxy is an arm: %v; missing: %v", modes, given, d.Missing)
		}
		aimsAreOfCells(t, d)
	}
}

// aimsAreOfCells fails where an aim is of a measure or an arm that the design doesn't have.
func aimsAreOfCells(t *testing.T, d result.Design) {
	t.Helper()
	known := func(measure, arm string) bool {
		_, ok := d.Measure(measure)
		return ok && slices.ContainsFunc(d.Arms, func(a result.Arm) bool { return a.ID == arm || arm == "nobody" })
	}
	for _, a := range d.Aims {
		if a.Cannot != "" {
			continue
		}
		if !known(a.Measure, a.Arm) {
			t.Errorf("aim %s is of %s of %s", a.ID, a.Measure, a.Arm)
		}
		for _, ref := range []*result.CellRef{a.Over, a.Less, a.Plus} {
			if ref != nil && !known(cmp.Or(ref.Measure, a.Measure), cmp.Or(ref.Arm, a.Arm)) {
				t.Errorf("aim %s refers to %s of %s", a.ID, ref.Measure, ref.Arm)
			}
		}
	}
}

func TestConnect(t *testing.T) {
	p := connectProfile{"tiny", []int{10, 20}, 2, 3 * time.Millisecond, time.Millisecond, 1, 2, 20}
	_, s := finish(t, nil, func(ctx context.Context, r *run) (work, error) { return newConnect(ctx, r, p) })
	for _, n := range p.Services {
		for _, arm := range []string{armEBPF, armNFT, "iptables", old, present} {
			for _, m := range []string{"connect", "crr", "connect-cold", "crr-cold", "connect-pod", "crr-pod", "connect-pod-cold", "crr-pod-cold", "load"} {
				number(t, s, m, arm, params(n))
			}
		}
		for _, m := range []string{"run", "runs"} { // each program of a socket by an exchange that it has a part in
			for _, program := range []string{"connect4, TCP", "getpeername4, TCP", "release, TCP", "arrive-14, TCP", "leave-14, TCP", "connect6, TCP by IPv6 socket", "getpeername6, TCP by IPv6 socket",
				"sendmsg4, UDP", "recvmsg4, UDP", "connect4, UDP, connected", "recvmsg6, UDP by IPv6 socket, connected"} {
				if v := number(t, s, m, armEBPF, with(n, also("program", program))); v <= 0 {
					t.Errorf("%s of %s is %v", m, program, v)
				}
			}
		}
		if v := number(t, s, "runs", armEBPF, with(n, also("program", "connect4, TCP"))); v != 1 {
			t.Errorf("connect4 runs %v times for a connection", v)
		}
	}
	for _, m := range []string{"connect-pod", "crr-pod", "connect-pod-cold", "crr-pod-cold"} {
		number(t, s, m, armStack, params(20))
		if c, ok := s.Cell(strings.Replace(m, byPod, "", 1), armStack, params(20)); ok {
			t.Errorf("a process of the node is measured by %s: %+v", armStack, c)
		}
	}
	for _, program := range []string{"release", "connect4", "connect6", "sendmsg4", "sendmsg6", "recvmsg4", "recvmsg6", "getpeername4", "getpeername6", "arrive-14", "leave-14"} {
		if i, v := number(t, s, "instructions", armEBPF, also("program", program)), number(t, s, "verified", armEBPF, also("program", program)); i < 2 || v < 2 {
			t.Errorf("%s has %v instructions, of which the verifier walked %v", program, i, v)
		}
	}
	if shown, cost := number(t, s, "shown", armEBPF, nil), number(t, s, "cost", armEBPF, nil); shown <= 0 || cost <= 0 {
		t.Errorf("to count a run shows as %v ns and costs %v ns", shown, cost)
	}
}

// Aims of new connections are of cells that a whole run has.
func TestConnectDesign(t *testing.T) {
	m, err := load.NewMemory(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, modes := range [][]string{{armEBPF, armNFT, "iptables"}, {armNFT}, {armEBPF}} {
		r := &connect{stage: &stage{run: &run{}, counts: fullConnect.Services, modes: modes, layouts: classic.Layouts[:2]}, Profile: fullConnect, memory: m}
		d := r.design()
		want := 0
		if slices.Contains(modes, armEBPF) {
			want = 16 // 4, of clients on the node and in a pod, with warm and with cold caches
			if !slices.Contains(modes, "iptables") {
				want = 12
			}
		}
		if len(d.Aims) != want {
			t.Errorf("%v: %d aims, want %d", modes, len(d.Aims), want)
		}
		for _, a := range d.Aims {
			if _, ok := d.Measure(a.Measure); !ok || !slices.Contains([]string{"10", "10000"}, a.Params["services"]) {
				t.Errorf("%v: aim %s is of %s at %v", modes, a.ID, a.Measure, a.Params)
			}
		}
	}
}

func TestUnknownMode(t *testing.T) {
	o := options(t, io.Discard)
	o.Modes = []string{"teleport"}
	if _, err := perform(t.Context(), o, balanceExperiment.begin); err == nil || !strings.Contains(err.Error(), "teleport") {
		t.Errorf("error %v", err)
	}
	nothingLeft(t)
}

func TestCenturylink(t *testing.T) {
	p := centurylinkProfile{"tiny", 3, 2, 20, time.Millisecond, 5 * time.Millisecond}
	modes := []string{"userspace", "iptables"}
	dir, s := finish(t, modes, func(ctx context.Context, r *run) (work, error) { return newCenturylink(ctx, r, p) })
	at := params(3)
	for _, m := range []string{"rr", "rr-mean", "crr", "crr-mean", "stream", "stream-spent"} {
		for _, arm := range modes {
			number(t, s, m, arm, at)
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, result.SamplesFile))
	if err != nil {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(bytes.NewReader(b)).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	if want := 1 + 2*p.Rounds*p.Each*(3+len(modes)); len(rows) != want { // direct stands twice in each round
		t.Errorf("%d lines of samples, want %d", len(rows), want)
	}
	svg, err := os.ReadFile(filepath.Join(dir, report.ChartsDir, "rr-overlay.svg"))
	if err != nil || bytes.Count(svg, []byte(`fill-opacity=".3"`)) != 2 {
		t.Errorf("the histogram fills %d sets, want userspace and iptables: %v", bytes.Count(svg, []byte(`fill-opacity=".3"`)), err)
	}
}

// bereaved kills the agents before the first round.
type bereaved struct {
	work
	r *run
}

func (b bereaved) steps() []step {
	l := b.work.steps()
	i := slices.IndexFunc(l, func(s step) bool { return strings.HasPrefix(s.what, "traffic") })
	return slices.Insert(l, i, step{what: "killing", do: func(context.Context) error {
		for _, p := range b.r.pairs {
			if p.agent != nil {
				p.agent.child.Kill()
			}
		}
		return nil
	}})
}

// The rules of nftables go on without an agent: blocks alone would not show that it is gone.
func TestAgentEnds(t *testing.T) {
	o := options(t, io.Discard)
	o.Modes = []string{"nftables"}
	_, err := perform(t.Context(), o, func(ctx context.Context, r *run) (work, error) {
		w, err := newCenturylink(ctx, r, centurylinkProfile{"tiny", 3, 2, 20, time.Millisecond, 5 * time.Millisecond})
		return bereaved{w, r}, err
	})
	if err == nil || !strings.Contains(err.Error(), "ended by itself: signal: killed") {
		t.Errorf("error %v", err)
	}
	nothingLeft(t)
}

func TestBalance(t *testing.T) {
	p := balanceProfile{"tiny", 200, 2}
	_, s := finish(t, []string{armNFT, "userspace"}, func(ctx context.Context, r *run) (work, error) { return newBalance(ctx, r, p) })
	for _, mode := range []string{armNFT, "userspace"} {
		for _, x := range schedulers(mode) {
			c, ok := s.Cell("spread", mode, scheduled(x))
			if !ok || c.Fit == nil || c.Ops != int64(p.Each*p.Parts) {
				t.Fatalf("%s, %s: %+v", mode, x, c)
			}
			if x == model.RoundRobin && c.Fit.ChiSquare > 1 {
				t.Errorf("%s takes turns unevenly: %v", mode, c.Answers)
			}
		}
	}
	number(t, s, "moved", "userspace", scheduled(model.Maglev))
	if v := number(t, s, "table-imbalance", armTable, scheduled(model.Maglev)); v > 0.01 {
		t.Errorf("Maglev's table: the fullest backend has %v above the mean", v)
	}
}

func TestLayoutsAreChosen(t *testing.T) {
	for _, c := range []struct {
		asked, want []string
	}{
		{nil, []string{"ipt-classic19", "ipt-classic", "nft-classic"}},
		{[]string{"nft-classic", "ipt-classic19"}, []string{"nft-classic", "ipt-classic19"}},
		{[]string{NoLayouts}, nil},
	} {
		r := &run{Options: Options{Layouts: c.asked}}
		if l, err := r.chosen(classic.Layouts); err != nil || !slices.Equal(names(l), c.want) {
			t.Errorf("of %v: %v, %v", c.asked, names(l), err)
		}
	}
	for _, asked := range [][]string{{"classic"}, {NoLayouts, "ipt-classic"}, {"nft-classic"}, {"ipt-classic", "ipt-classic"}, {}} {
		r := &run{Options: Options{Layouts: asked}}
		if _, err := r.chosen(connectLayouts); err == nil {
			t.Errorf("%v is no error", asked)
		}
	}
}
