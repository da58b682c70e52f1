package balance

import (
	"context"
	"io"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/labtest"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

func TestUnknownMode(t *testing.T) {
	o := labtest.Options(t, io.Discard)
	o.Modes = []string{"teleport"}
	if _, err := labtest.Perform(t.Context(), o, Experiment.Prepare); err == nil ||
		!strings.Contains(err.Error(), "teleport") {
		t.Errorf("error %v", err)
	}
	labtest.NothingLeft(t)
}

func TestBalance(t *testing.T) {
	p := profile{"tiny", 200, 2}
	_, s := labtest.Run(t, []string{experiment.ArmNFTables, "userspace"},
		func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
			return newTrial(ctx, b, o, p)
		})
	for _, mode := range []string{experiment.ArmNFTables, "userspace"} {
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
	labtest.Number(t, s, "moved", "userspace", scheduled(model.Maglev))
	if v := labtest.Number(t, s, "table-imbalance", armTable, scheduled(model.Maglev)); v > 0.01 {
		t.Errorf("Maglev's table: the fullest backend has %v above the mean", v)
	}
}

func TestMain(m *testing.M) { labtest.Main(m) }
