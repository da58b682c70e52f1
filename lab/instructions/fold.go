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
	root := &call{function: nowhere}
	at := root
	for _, a := range addresses {
		f, first := s.at(a, at.function)
		if f != at.function || first {
			at = at.enter(root, f, first)
		}
		at.n++
	}
	counts := Stacks{}
	root.count(counts, s, "")
	return counts, nil
}

// nowhere is no function's number.
const nowhere = -2

// call is a function called by a stack of functions, and how many instructions it executed there.
type call struct {
	function int
	by       *call
	depth    int
	calls    map[int]*call
	n        int64
}

// deepest is how many functions a stack has at most: more than any kernel's.
const deepest = 200

// enter returns the call that executes an address in f.
func (c *call) enter(root *call, f int, first bool) *call {
	if f < 0 {
		return root.to(f)
	}
	if !first {
		for by := c; by != nil; by = by.by {
			if by.function == f {
				return by
			}
		}
	}
	if c.depth == deepest {
		return c
	}
	return c.to(f)
}

// to returns the call of f by this one.
func (c *call) to(f int) *call {
	if c.calls[f] == nil {
		if c.calls == nil {
			c.calls = map[int]*call{}
		}
		c.calls[f] = &call{function: f, by: c, depth: c.depth + 1}
	}
	return c.calls[f]
}

// count adds the instructions of all that this one calls, which has that stack.
func (c *call) count(counts Stacks, s *Symbols, stack string) {
	for f, to := range c.calls {
		name := s.name(f)
		if stack != "" {
			name = stack + ";" + name
		}
		if to.n > 0 {
			counts[name] += to.n
		}
		to.count(counts, s, name)
	}
}

// String returns the folded format, a line for each stack, sorted.
func (c Stacks) String() string {
	var b strings.Builder
	for _, stack := range slices.Sorted(maps.Keys(c)) {
		fmt.Fprintf(&b, "%s %d\n", stack, c[stack])
	}
	return b.String()
}
