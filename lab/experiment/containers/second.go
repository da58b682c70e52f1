package containers

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// panelPrefix begins the names of measures that a run under the second kernel has.
const panelPrefix = "second-"

// panel is a run of this experiment under the second kernel, of which counts and ratios mean something.
type panel struct{ run result.Run }

// readPanel reads a folder; "" is none, and no error.
func readPanel(dir string) (p *panel, err error) {
	if dir == "" {
		return nil, nil
	}
	p = &panel{}
	if p.run, err = result.Read(dir); err != nil {
		return nil, fmt.Errorf("--second-kernel %s: %w", dir, err)
	}
	if m := p.run.Manifest; m.Design.ID != "containers" || !m.Machine.Emulated() {
		return nil, fmt.Errorf("--second-kernel %s: it is a run of %s on %s, want one of containers on an emulated processor",
			dir, cmp.Or(m.Design.ID, "nothing"), m.Machine.Kernel)
	}
	return p, nil
}

// panelMeasures are what is taken over, by the measure of the run there.
var panelMeasures = []struct {
	from string
	stat string // of blocks, compared by round with host's; "": packets for each operation
	result.Measure
}{
	{"rr", "", result.Measure{ID: panelPrefix + "packets", Title: "second kernel: packets for each round trip",
		Stat: result.Value}},
	{"crr", "", result.Measure{ID: panelPrefix + "packets-connection", Detail: true, Stat: result.Value,
		Title: "second kernel: packets for each connection with one request"}},
	{"rr", "p50", result.Measure{ID: panelPrefix + "rr", Unit: "×", Stat: result.Value,
		Title: "second kernel: round trip, against its host"}},
	{"crr", "p50", result.Measure{ID: panelPrefix + "crr", Unit: "×", Stat: result.Value, Detail: true,
		Title: "second kernel: connection with one request, against its host"}},
}

// measures returns the measures of the panel.
func (p *panel) measures() (l []result.Measure) {
	if p == nil {
		return nil
	}
	for _, m := range panelMeasures {
		m.Text = "under " + p.run.Manifest.Machine.Kernel + ", on an emulated processor: " +
			map[bool]string{true: "counted as above", false: "the ratio of medians of a round"}[m.stat == ""]
		l = append(l, m.Measure)
	}
	return l
}

// has reports whether an arm was measured there.
func (p *panel) has(arm string) bool {
	return p != nil && slices.ContainsFunc(p.run.Blocks, func(b result.Block) bool { return b.Arm == arm })
}

// copy writes the panel's numbers as blocks.
func (p *panel) copy(out *result.Writer) error {
	for _, m := range panelMeasures {
		base := map[int][]float64{}
		for _, b := range p.run.Blocks {
			if b.Measure == m.from && b.Arm == testbed.ArmDirect {
				base[b.Round] = append(base[b.Round], b.Figures[m.stat])
			}
		}
		for _, b := range p.run.Blocks {
			if b.Measure != m.from || b.Ops == 0 || b.Arm == testbed.ArmAgain {
				continue
			}
			v := b.Counters["softnet_pinned"] / float64(b.Ops)
			if m.stat != "" {
				host := base[b.Round]
				if b.Arm == testbed.ArmDirect || len(host) == 0 {
					continue
				}
				sum := 0.0
				for _, x := range host {
					sum += x
				}
				if sum == 0 {
					return errors.New("the second kernel's panel has a host that takes no time")
				}
				v = b.Figures[m.stat] * float64(len(host)) / sum
			}
			if err := out.AddValue(result.Block{Arm: b.Arm, Round: b.Round}, m.ID, v); err != nil {
				return err
			}
		}
	}
	return nil
}
