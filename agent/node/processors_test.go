package node

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestCountList(t *testing.T) {
	for text, want := range map[string]int{"0\n": 1, "0-3\n": 4, "0-3,8": 5, "1,3,5-7": 5, "": 0, "3-1": 0, "0-": 0,
		"-1":  0,
		"0,0": 0, "0-2,1": 0, "x": 0, "0-99999999999999999999": 0, "0-2147483647": 0} {
		if n, err := countList(text); n != want || (err == nil) != (want > 0) {
			t.Errorf("%q: %d, %v, want %d", text, n, err, want)
		}
	}
}

func FuzzCountList(f *testing.F) {
	for _, s := range []string{"0", "0-3,8\n", "3-1", ","} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if n, err := countList(text); err == nil && n < 1 || n > mostProcessors+1 {
			t.Errorf("%q: %d, %v", text, n, err)
		}
	})
}

// The node's processors count, not those that a process may use: a child that may use one counts as many as its parent.
func TestProcessorsOfTheNode(t *testing.T) {
	const child = "FAIRLEAD_TEST_PROCESSORS"
	if os.Getenv(child) != "" {
		fmt.Printf("counted %d, may use %d\n", processors(), runtime.NumCPU())
		return
	}
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	for cpu := range 1024 {
		if all.IsSet(cpu) {
			one.Set(cpu)
			break
		}
	}
	runtime.LockOSThread() // thrown away with its affinity
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), child+"=1")
	out, err := cmd.CombinedOutput()
	if want := fmt.Sprintf("counted %d, may use 1\n", processors()); err != nil || !strings.Contains(string(out), want) {
		t.Errorf("%v: %s, want %s", err, out, want)
	}
}
