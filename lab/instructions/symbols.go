package instructions

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// Symbols are where functions begin.
type Symbols struct {
	starts []uint64
	names  []string
}

// userspace is below any address of the kernel: the half of addresses that processes have.
const userspace = uint64(1) << 63

// ReadSymbols reads functions from /proc/kallsyms: lines of an address, a type and a name, and perhaps a module in
// brackets. Types t and w are functions, in either case. Of several at one address the first counts.
func ReadSymbols(r io.Reader) (*Symbols, error) {
	type symbol struct {
		at   uint64
		name string
	}
	var l []symbol
	in := bufio.NewScanner(r)
	for n := 1; in.Scan(); n++ {
		f := strings.Fields(in.Text())
		if len(f) < 3 {
			return nil, fmt.Errorf("line %d of the kernel's symbols: %q", n, in.Text())
		}
		at, err := strconv.ParseUint(f[0], 16, 64)
		if err != nil {
			return nil, fmt.Errorf("line %d of the kernel's symbols: %w", n, err)
		}
		if at >= userspace && strings.Contains("tTwW", f[1]) {
			l = append(l, symbol{at, f[2]})
		}
	}
	if err := in.Err(); err != nil {
		return nil, err
	}
	if len(l) == 0 {
		return nil, fmt.Errorf("the kernel's symbols have no addresses: read them as root, with kptr_restrict below 2")
	}
	slices.SortStableFunc(l, func(a, b symbol) int { return cmp.Compare(a.at, b.at) })
	l = slices.CompactFunc(l, func(a, b symbol) bool { return a.at == b.at })
	s := &Symbols{}
	for _, v := range l {
		s.starts, s.names = append(s.starts, v.at), append(s.names, v.name)
	}
	return s, nil
}

// application is the function that all instructions of processes are counted for.
const application = "application"

// at returns the function that an address is in: its number, and whether the address is its first. A process's is -1.
// last is the function of the address before, which it is likely in.
func (s *Symbols) at(address uint64, last int) (function int, first bool) {
	if address < userspace {
		return -1, false
	}
	if last >= 0 && last+1 < len(s.starts) && address > s.starts[last] && address < s.starts[last+1] {
		return last, false
	}
	i, found := slices.BinarySearch(s.starts, address)
	if found {
		return i, true
	}
	return i - 1, false
}

// name returns a function's.
func (s *Symbols) name(function int) string {
	if function < 0 {
		return application
	}
	return s.names[function]
}
