package bpf

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Now is the programs' clock: the time since boot, but for suspension.
func Now() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err) // every kernel has it
	}
	return time.Duration(t.Nano())
}

// Seconds reads the coarse clock of the programs at devices.
func Seconds() (uint32, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now); err != nil {
		return 0, fmt.Errorf("bpf: read the clock: %w", err)
	}
	return uint32(now.Sec), nil
}
