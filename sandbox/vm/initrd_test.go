package vm

import (
	"slices"
	"strings"
	"testing"
)

func TestLoadOrder(t *testing.T) {
	index := "a/one.ko: b/two.ko c/three.ko\nb/two.ko: c/three.ko\nc/three.ko:\nd/four.ko: c/three.ko\ne/someone.ko:\n"
	got, err := loadOrder(index, "kernel/x/five.ko\n", "one", "five", "four")
	if want := []string{"c/three.ko", "b/two.ko", "a/one.ko", "d/four.ko"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := loadOrder(index, "kernel/x/five.ko\n", "five", "six"); err == nil ||
		!strings.Contains(err.Error(), "six") {
		t.Errorf("of a module that isn't there: %v", err)
	}
}
