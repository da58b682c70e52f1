package memory

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// What a start has used of the program's file is not resident at rest. The process has a file of its own: the kernel
// leaves alone what another one maps.
func TestRestPagesOutTheProgram(t *testing.T) {
	if os.Getenv(alone) == "" {
		cache, err := os.UserCacheDir() // a disk's: what is on one in memory can't be paged out
		if err != nil {
			t.Fatal(err)
		}
		dir, err := os.MkdirTemp(cache, "fairlead-test-")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		program := filepath.Join(dir, "program")
		copyProgram(t, program)
		c := exec.Command(program, "-test.run", "^"+t.Name()+"$", "-test.v")
		c.Env = append(os.Environ(), alone+"=1")
		if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	advise(unix.MADV_POPULATE_READ)
	before := fileResident(t)
	Rest()
	// The kernel leaves alone what of it shares a large folio with pages elsewhere.
	if after := fileResident(t); after > before*3/4 {
		t.Errorf("%d KiB of the program are resident at rest, of %d before", after, before)
	}
}

// copyProgram writes this program to a file, and that to the disk.
func copyProgram(t *testing.T, path string) {
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Write(program)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// fileResident returns how many KiB of the program's own file are resident, of what is never written.
func fileResident(t *testing.T) (kib int) {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	ours := false
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "-") && !strings.Contains(strings.Fields(line)[0], ":") {
			_, _, ours = unchanging(line, program)
		}
		if tail, is := strings.CutPrefix(line, "Rss:"); is && ours {
			n := 0
			if _, err := fmt.Sscan(tail, &n); err != nil {
				t.Fatal(err)
			}
			kib += n
		}
	}
	return kib
}

func TestUnchangingMappings(t *testing.T) {
	for line, want := range map[string]bool{
		"00400000-01980000 r-xp 00000000 fe:00 27  /bin/fairlead\n":       true,
		"01980000-02f85000 r--p 01580000 fe:00 27  /bin/fairlead\n":       true,
		"02f85000-030f6000 rw-p 02b85000 fe:00 27  /bin/fairlead\n":       false, // what is written there would be lost
		"7f4bde000000-7f4bde028000 r--p 00000000 fe:00 9  /lib/libc.so\n": false,
		"c000000000-c000400000 rw-p 00000000 00:00 0\n":                   false,
	} {
		if _, _, got := unchanging(line, "/bin/fairlead"); got != want {
			t.Errorf("%q: %t, want %t", line, got, want)
		}
	}
	if b, n, _ := unchanging("00400000-01980000 r-xp 00000000 fe:00 27 /a", "/a"); b != 0x400000 || n != 0x1580000 {
		t.Errorf("%#x, %#x bytes", b, n)
	}
}
