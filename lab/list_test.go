package lab

import (
	"context"
	"errors"
	"testing"

	"fairlead.dev/fairlead/lab/labtest"
)

func TestMain(m *testing.M) { labtest.Main(m) }

func TestList(t *testing.T) {
	l, err := List(t.Context(), []string{"/proc/self/exe"})
	if err != nil {
		t.Fatal(err)
	}
	own := len(Experiments())
	if len(l) != own+1 || l[own].Name != "cluster" || l[own].Needs == "" || l[own].Full <= 0 {
		t.Fatalf("%d experiments, the last %+v", len(l), l[len(l)-1])
	}
	for _, e := range l[:own] {
		if e.Name == "" || e.Question == "" || e.Quick <= 0 || e.Full <= e.Quick || e.Unknown != "" {
			t.Errorf("%+v", e)
		}
	}
	labtest.NothingLeft(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := List(ctx, []string{"/proc/self/exe"}); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	labtest.NothingLeft(t)
}
