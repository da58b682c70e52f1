package labtest

import (
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/result"
)

// Counts fails where the design of an exact run has other measures than these, judges by one that it doesn't have or
// by a time, or names none of those that it leaves out of the other run's.
func Counts(t *testing.T, timed, exact result.Design, want ...string) {
	t.Helper()
	var got []string
	for _, m := range exact.Measures {
		got = append(got, m.ID)
	}
	if !slices.Equal(got, want) {
		t.Errorf("an exact run has measures %q, want %q", got, want)
	}
	for _, m := range exact.Counted().Measures {
		if m.Unit != "" && m.Unit != result.Instructions {
			t.Errorf("%s is in %s", m.ID, m.Unit)
		}
	}
	named := strings.Join(exact.Missing, "\n")
	for _, m := range timed.Measures {
		if _, has := exact.Measure(m.ID); !has && !strings.Contains(named, m.Title) {
			t.Errorf("what is not measured does not name %s (%s)", m.ID, m.Title)
		}
	}
	AimsAreOfCells(t, exact)
	for _, a := range exact.Counted().Aims {
		if a.Cannot == "" && a.Bound > 1000 {
			t.Errorf("aim %s has a bound in time: %v", a.ID, a.Bound)
		}
	}
	for _, f := range exact.Answer.Findings {
		for _, c := range f.Cells {
			if _, has := exact.Measure(c.Measure); !has {
				t.Errorf("a finding is of %s", c.Measure)
			}
		}
	}
	for _, p := range exact.Pictures {
		for _, id := range p.Measures {
			if _, has := exact.Measure(id); !has {
				t.Errorf("picture %s is of %s", p.ID, id)
			}
		}
	}
}
