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
	if len(l) != len(Experiments()) {
		t.Errorf("%d experiments", len(l))
	}
	for _, e := range l {
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
