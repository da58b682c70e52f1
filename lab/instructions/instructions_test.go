package instructions

import (
	"encoding/binary"
	"maps"
	"strings"
	"testing"
)

// symbols of a small kernel: six functions, of 0x100 bytes each, a variable between.
const symbols = `ffffffff81000000 T entry_SYSCALL_64
ffffffff81000100 t tcp_sendmsg
ffffffff81000100 t alias
ffffffff81000180 d variable
ffffffff81000200 T kfree
ffffffffc0000300 t nf_conntrack_in	[nf_conntrack]
ffffffffc0000400 t bpf_prog_6deef7357e7b4530_fl_connect4	[bpf]
ffffffff81000500 t asm_sysvec_apic_timer_interrupt
0000000000000000 A fixed_percpu_data
`

func small(t *testing.T) *Symbols {
	t.Helper()
	s, err := ReadSymbols(strings.NewReader(symbols))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const (
	entry     = 0xffffffff81000000
	sendmsg   = 0xffffffff81000100
	free      = 0xffffffff81000200
	conntrack = 0xffffffffc0000300
	connect4  = 0xffffffffc0000400
	interrupt = 0xffffffff81000500
)

func TestFold(t *testing.T) {
	trace := []uint64{
		0x401000, 0x401004, // the application
		entry, entry + 4, // calls
		sendmsg, sendmsg + 4, // which calls
		conntrack, conntrack + 3, // which calls
		free, free + 2, conntrack + 8, // and gets back, then ends by a jump to
		free, // which returns to the caller of its caller
		sendmsg + 8,
		interrupt, interrupt + 4, // between two instructions
		sendmsg + 12,
		connect4, connect4 + 4, free, // nested anew
		entry + 8,
		0x401008,
	}
	got, err := Fold(trace, small(t))
	if err != nil {
		t.Fatal(err)
	}
	want := Stacks{
		"application":                                                              3,
		"entry_SYSCALL_64":                                                         3,
		"entry_SYSCALL_64;tcp_sendmsg":                                             4,
		"entry_SYSCALL_64;tcp_sendmsg;nf_conntrack_in":                             3,
		"entry_SYSCALL_64;tcp_sendmsg;nf_conntrack_in;kfree":                       3,
		"entry_SYSCALL_64;tcp_sendmsg;asm_sysvec_apic_timer_interrupt":             2,
		"entry_SYSCALL_64;tcp_sendmsg;bpf_prog_6deef7357e7b4530_fl_connect4":       2,
		"entry_SYSCALL_64;tcp_sendmsg;bpf_prog_6deef7357e7b4530_fl_connect4;kfree": 1,
	}
	for stack := range maps.All(want) {
		want[strings.Replace(stack, "entry", "application;entry", 1)] = want[stack]
		if stack != application {
			delete(want, stack)
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if total(got) != int64(len(trace)) {
		t.Errorf("%d instructions of %d", total(got), len(trace))
	}
	parts := map[string]int64{application: 3, "syscall": 3, "tcp": 4, "conntrack": 6, "interrupts": 2, "sockets": 3}
	if p := got.Parts(); !maps.Equal(p, parts) {
		t.Errorf("parts %v, want %v", p, parts)
	}
}

// total returns the number of all instructions.
func total(c Stacks) (n int64) {
	for _, v := range c {
		n += v
	}
	return n
}

func TestShortest(t *testing.T) {
	const mark = 0x400000
	trace := []uint64{mark, 1, mark, 2, 2, 2, mark, 9, mark, 3, mark, 9, mark, 4, 4, mark, 9, mark}
	got, err := Shortest(trace)
	if err != nil || len(got) != 2 || got[1] != 3 {
		t.Errorf("%v, %v", got, err)
	}
	for _, short := range [][]uint64{{mark}, {mark, 1, mark}, {mark, 1, mark, 1, mark}} {
		if _, err := Shortest(short); err == nil {
			t.Errorf("%v has an operation", short)
		}
	}
}

func TestSymbolsThatSayNothing(t *testing.T) {
	for _, text := range []string{"", "0000000000000000 T hidden\n", "x T y\n", "ffffffff81000000 T\n"} {
		if _, err := ReadSymbols(strings.NewReader(text)); err == nil {
			t.Errorf("%q gives symbols", text)
		}
	}
}

func TestPartOf(t *testing.T) {
	for stack, want := range map[string]string{
		"entry_SYSCALL_64;ip_output":                       "ip",
		"ip_output;ip_route_input_noref;memcpy":            "routing",
		"tcp_sendmsg;__inet_lookup_established":            "tcp",
		"inet_gro_receive":                                 "ip",
		"tcx_run;bpf_prog_6deef7357e7b4530_arrive_14":      "devices",
		"bpf_prog_0011223344556677_apply_policy;array_map": "policy",
		"nf_hook_slow;bpf_prog_0011223344556677_policy;bpf_prog_8899aabbccddeeff_parse;array_map": "policy",
		"bpf_prog_0011223344556677_policy;bpf_prog_8899aabbccddeeff_evaluate_connection":          "policy",
		"nf_hook_slow;ipt_do_table;tcp_mt":                                                        "iptables",
		"bpf_prog_0011223344556677_arrive;bpf_prog_8899aabbccddeeff_parse":                        "devices",
		"bpf_prog_0011223344556677_connect4;htab_map_hash":                                        "sockets",
		"idle": Rest,
		"":     Rest,
	} {
		if got := PartOf(stack); got != want {
			t.Errorf("%q is of %s, want %s", stack, got, want)
		}
	}
}

// Whatever was executed, each instruction is counted once, and in one part.
func FuzzFold(f *testing.F) {
	f.Add([]byte{0, 1, 2, 0x11, 3, 0x23, 4, 5, 0x85})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, addresses := small(t), []byte(nil)
		for _, c := range b { // a function, and where in it
			at := uint64(0x401000)
			if i := int(c & 7); i < len(s.starts) {
				at = s.starts[i] + uint64(c>>3)
			}
			addresses = binary.LittleEndian.AppendUint64(addresses, at)
		}
		l, err := Addresses(addresses)
		if err != nil || len(l) == 0 {
			return
		}
		stacks, err := Fold(l, s)
		if err != nil || total(stacks) != int64(len(l)) {
			t.Fatalf("%d of %d instructions: %v", total(stacks), len(l), err)
		}
		n := int64(0)
		for _, v := range stacks.Parts() {
			n += v
		}
		if n != int64(len(l)) {
			t.Fatalf("%d of %d instructions have a part", n, len(l))
		}
	})
}
