package memory

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// pageOut returns the program's pages to the system: most of those in memory are of code and data that only a start
// uses. The kernel reads from the file what is used again. Before Linux 5.4 they stay.
func pageOut() { advise(unix.MADV_PAGEOUT) }

// advise has the kernel treat as advised the program's pages that are never written (madvise(2)).
func advise(advice uintptr) {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return
	}
	for line := range strings.Lines(string(maps)) {
		if begin, size, ok := unchanging(line, program); ok {
			unix.Syscall(unix.SYS_MADVISE, begin, size, advice)
		}
	}
}

// unchanging returns where a mapping is that a line of /proc/self/maps describes, if it is of the file and can't be
// written.
func unchanging(line, file string) (begin, size uintptr, ok bool) {
	f := strings.Fields(line)
	if len(f) < 6 || !strings.HasSuffix(strings.TrimSuffix(line, "\n"), " "+file) || strings.Contains(f[1], "w") {
		return 0, 0, false
	}
	first, last, _ := strings.Cut(f[0], "-")
	b, err := strconv.ParseUint(first, 16, 64)
	e, bad := strconv.ParseUint(last, 16, 64)
	return uintptr(b), uintptr(e - b), err == nil && bad == nil
}
