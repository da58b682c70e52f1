package load

// ticks returns the processor's time stamp counter: in an exact machine, the instructions executed so far.
func ticks() int64

// ticksAt returns the address of the first instruction of ticks.
func ticksAt() uintptr
