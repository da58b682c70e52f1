//go:build !amd64

package load

// An exact machine is an amd64: its programs are.
func ticks() int64 { panic("exact counts need amd64") }

func ticksAt() uintptr { panic("exact counts need amd64") }
