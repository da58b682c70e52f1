package node

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
)

// online is where the kernel lists the processors that are online.
const online = "/sys/devices/system/cpu/online"

// processors returns how many processors of the node are online, as kube-proxy counts them: those that this process may
// use would be fewer under a CPU policy. Where sysfs can't be read it is those.
func processors() int {
	if b, err := os.ReadFile(online); err == nil {
		if n, err := countList(string(b)); err == nil {
			return n
		}
	}
	return runtime.NumCPU()
}

// mostProcessors is more than any kernel has.
const mostProcessors = 1 << 20

// countList returns how many numbers a list such as "0-3,8" of the kernel has
// (Documentation/admin-guide/cputopology.rst).
func countList(text string) (n int, err error) {
	next := 0 // the lowest number that may follow
	for part := range strings.SplitSeq(strings.TrimSpace(text), ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, err := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		if err = errors.Join(err, err2); err != nil {
			return 0, fmt.Errorf("parse list of processors %q: %w", text, err)
		}
		if first < next || last < first || last > mostProcessors {
			return 0, fmt.Errorf("parse list of processors %q: %q is out of order", text, part)
		}
		n += last - first + 1
		next = last + 1
	}
	return n, nil
}
