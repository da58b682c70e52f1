package vm

import (
	"slices"
	"strings"
	"testing"
)

const logged = `Trace 0: 0x7f5c2c000100 [0000000000000000/ffffffff81000000/00c0b3b1/ff010001] idle
Trace 0: 0x7f5c2c000100 [0000000000000000/000000000046f2a0/00c0b3b1/ff010001] 
Trace 0: 0x7f5c2c000200 [0000000000000000/ffffffff81000200/00c0b3b1/ff010001] kfree
Stopped execution of TB chain before 0x7f5c2c000100 [ffffffff81000000] idle
Trace 0: 0x7f5c2c000100 [0000000000000000/000000000046f2a0/00c0b3b1/ff010001] 
Trace 0: 0x7f5c2c000100 [0000000000000000/ffffffff81000000/00c0b3b1/ff010001] idle
`

func TestReadTrace(t *testing.T) {
	got, err := readTrace(strings.NewReader(logged+traceEnd+"\n"), 0x46f2a0)
	if want := []uint64{0x46f2a0, 0xffffffff81000200, 0x46f2a0}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%x, %v", got, err)
	}
	if _, err := readTrace(strings.NewReader(logged+traceEnd+"\n"), 0x46f2a1); err == nil {
		t.Error("a trace without marks is one")
	}
	if _, err := readTrace(strings.NewReader(logged), 0x46f2a0); err == nil {
		t.Error("a trace without an end is one")
	}
}

func FuzzReadTrace(f *testing.F) {
	f.Add(logged + traceEnd + "\n")
	f.Fuzz(func(t *testing.T, text string) {
		l, err := readTrace(strings.NewReader(text), 0x46f2a0)
		if err == nil && (l[0] != 0x46f2a0 || l[len(l)-1] != 0x46f2a0) {
			t.Fatalf("%x", l)
		}
	})
}
