package instructions

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Stacks are numbers of instructions by stack of functions, the outermost first, with semicolons between: the folded
// format that flame graphs are drawn of.
type Stacks map[string]int64

// Addresses decodes a trace: 8 bytes each, little-endian.
func Addresses(b []byte) ([]uint64, error) {
	if len(b)%8 != 0 {
		return nil, fmt.Errorf("a trace of %d bytes ends within an address", len(b))
	}
	l := make([]uint64, 0, len(b)/8)
	for ; len(b) > 0; b = b[8:] {
		l = append(l, binary.LittleEndian.Uint64(b))
	}
	return l, nil
}

// Shortest returns the operation of a trace that executed the fewest instructions: interrupts, and work that the kernel
// puts off until then, only add some. The trace's first address is the mark, which is executed at the beginning of all,
// at the start and the end of each operation, and at the end of all.
func Shortest(addresses []uint64) ([]uint64, error) {
	var marks []int
	for i, a := range addresses {
		if a == addresses[0] {
			marks = append(marks, i)
		}
	}
	if len(marks) < 4 || len(marks)%2 != 0 {
		return nil, fmt.Errorf("a trace with %d marks has no whole operation", len(marks))
	}
	shortest := addresses
	for i := 1; i+2 < len(marks); i += 2 {
		if o := addresses[marks[i]:marks[i+1]]; len(o) < len(shortest) {
			shortest = o
		}
	}
	return shortest, nil
}

// Fold follows calls and returns through the addresses that were executed in order. A function's first address is a
// call of it, or a jump to it as the last thing that its caller does; an address amid a function that called is the
// return to it. An interrupt is called by what it interrupts.
func Fold(addresses []uint64, s *Symbols) (Stacks, error) {
	if len(addresses) == 0 {
		return nil, errors.New("a trace without addresses")
	}
	var stack []int
	counts, name := Stacks{}, ""
	var n int64
	for _, a := range addresses {
		f, first := s.at(a)
		if len(stack) > 0 && f == stack[len(stack)-1] && !first {
			n++
			continue
		}
		if n > 0 {
			counts[name] += n
		}
		stack, n = enter(stack, f, first), 1
		name = s.stack(stack)
	}
	counts[name] += n
	return counts, nil
}

// deepest is how many functions a stack has at most: more than any kernel's.
const deepest = 200

// enter returns the stack once an address in f is executed.
func enter(stack []int, f int, first bool) []int {
	if f < 0 {
		return append(stack[:0], f)
	}
	if !first {
		for i := range slices.Backward(stack) {
			if stack[i] == f {
				return stack[:i+1]
			}
		}
	}
	if len(stack) == deepest {
		return stack
	}
	return append(stack, f)
}

func (s *Symbols) stack(functions []int) string {
	l := make([]string, len(functions))
	for i, f := range functions {
		l[i] = s.name(f)
	}
	return strings.Join(l, ";")
}

// String returns the folded format, a line for each stack, sorted.
func (c Stacks) String() string {
	var b strings.Builder
	for _, stack := range slices.Sorted(maps.Keys(c)) {
		fmt.Fprintf(&b, "%s %d\n", stack, c[stack])
	}
	return b.String()
}
