package device

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Hook is one of netfilter's that forwarded packets of a family pass.
type Hook struct {
	Family   uint8  // unix.AF_INET or AF_INET6
	Point    uint32 // of the stack: enum nf_inet_hooks
	Function string // of the kernel, by its name
	Module   string // that the function is in, "" where it is built in
	Priority int32
	Acts     bool   // it would handle a plain packet on its way to a pod
	Table    string // of nf_tables, or of iptables' legacy form; or ""
	Chain    string // of nf_tables; or ""

	address uint64
}

// String returns what the hook is: a chain such as "table ip filter chain FORWARD", or a function of the kernel.
func (h Hook) String() string {
	switch {
	case h.Chain != "":
		return fmt.Sprintf("table %s %s chain %s", h.tableFamily(), h.Table, h.Chain)
	case h.Table != "":
		return "iptables' table " + h.Table
	case h.Module != "":
		return h.Function + " [" + h.Module + "]"
	}
	return h.Function
}

// chainFamilies are the families of tables by the functions of their base chains.
var chainFamilies = map[string]string{"nft_do_chain_inet": "inet", "nft_do_chain_ipv4": "ip",
	"nft_do_chain_ipv6": "ip6"}

// tableFamily returns the family of a chain's table, as nft names it.
func (h Hook) tableFamily() string {
	return chainFamilies[h.Function]
}

// iptablesTables are the tables that iptables has in nf_tables: of families ip and ip6.
var iptablesTables = []string{"raw", "mangle", "filter", "security", "nat"}

// Owner returns the program that made the hook, as far as that can be told, and the command that lists what it does.
func (h Hook) Owner() (owner, command string) {
	program := map[bool]string{false: "iptables", true: "ip6tables"}[h.Family == unix.AF_INET6]
	switch {
	case h.Chain != "" && h.tableFamily() != "inet" && slices.Contains(iptablesTables, h.Table):
		return "iptables-nft", fmt.Sprintf("%s-nft -t %s -S %s", program, h.Table, h.Chain)
	case h.Chain != "":
		return h.Table, fmt.Sprintf("nft list chain %s %s %s", h.tableFamily(), h.Table, h.Chain)
	case h.Table != "":
		return "iptables-legacy", fmt.Sprintf("%s-legacy -t %s -S", program, h.Table)
	case strings.HasPrefix(h.Function, "nf_nat_"):
		return "NAT", "nft list ruleset; " + program + "-legacy -t nat -S"
	case h.Module != "":
		return "module " + h.Module, "nft list hooks"
	}
	return "kernel", "nft list hooks"
}

// points are those of the stack that forwarded packets pass, in their order.
var points = []uint32{uint32(deviceNfInetHooksNF_INET_PRE_ROUTING), uint32(deviceNfInetHooksNF_INET_FORWARD),
	uint32(deviceNfInetHooksNF_INET_POST_ROUTING)}

// hookRoles are what functions of hooks are for: enum hook_role, and the module that each is in where it isn't built
// in.
var hookRoles = map[string]struct {
	role   deviceHookRole
	module string
}{
	"nft_do_chain_inet":     {deviceHookRoleHOOK_CHAIN, "nf_tables"},
	"nft_do_chain_ipv4":     {deviceHookRoleHOOK_CHAIN, "nf_tables"},
	"nft_do_chain_ipv6":     {deviceHookRoleHOOK_CHAIN, "nf_tables"},
	"ipt_do_table":          {deviceHookRoleHOOK_TABLE, "ip_tables"},
	"iptable_mangle_hook":   {deviceHookRoleHOOK_TABLE, "iptable_mangle"},
	"ip6t_do_table":         {deviceHookRoleHOOK_TABLE, "ip6_tables"},
	"ip6table_mangle_hook":  {deviceHookRoleHOOK_TABLE, "ip6table_mangle"},
	"ipv4_conntrack_defrag": {deviceHookRoleHOOK_IDLE, "nf_defrag_ipv4"},
	"ipv6_defrag":           {deviceHookRoleHOOK_IDLE, "nf_defrag_ipv6"},
	"ipv4_conntrack_in":     {deviceHookRoleHOOK_IDLE, "nf_conntrack"},
	"ipv6_conntrack_in":     {deviceHookRoleHOOK_IDLE, "nf_conntrack"},
	"nf_confirm":            {deviceHookRoleHOOK_IDLE, "nf_conntrack"},
	"ip_sabotage_in":        {deviceHookRoleHOOK_IDLE, "br_netfilter"},
}

// role returns what the hook's function is for.
func (h Hook) role() deviceHookRole {
	r, known := hookRoles[h.Function]
	if !known || h.Module != "" && h.Module != r.module {
		return deviceHookRoleHOOK_UNKNOWN
	}
	return r.role
}

// ReadHooks returns the hooks of netfilter that forwarded packets of both families pass in the calling thread's network
// namespace, in their order, as the programs at devices know them that work on the maps in a folder. network is
// Options.PodNetwork of the programs.
func ReadHooks(folder string, network bool) (l []Hook, err error) {
	p, err := reporterOf(folder, hookProgram)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	return readHooks(p, network)
}

// SurveyHooks returns the hooks as ReadHooks does, where no programs need be at devices.
func SurveyHooks() ([]Hook, error) {
	c, err := forDevices()
	if err != nil {
		return nil, err
	}
	m, err := ebpf.NewMap(c.Maps[deviceMapFlHooks].Copy())
	if err != nil {
		return nil, fmt.Errorf("bpf: make map %s: %w", deviceMapFlHooks, bpf.Explain(err))
	}
	defer m.Close()
	programs, err := loadReporters(m)
	if err != nil {
		return nil, err
	}
	defer closeAll(programs)
	l, err := readHooks(programs[hookProgram], false)
	if err != nil {
		return nil, err
	}
	if err := m.Put(uint32(0), slotted(rolesOf(l))); err != nil {
		return nil, fmt.Errorf("bpf: write map %s: %w", deviceMapFlHooks, err)
	}
	return readHooks(programs[hookProgram], false)
}

// readHooks has a program report the hooks.
func readHooks(p *ebpf.Program, network bool) (l []Hook, err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		for _, point := range points {
			in := reportContext{Ifindex: 1, CB: [5]uint32{bpf.Flag(family == unix.AF_INET6), point, 0, bpf.Flag(network)}}
			for n := uint32(1); in.CB[2] < n; in.CB[2]++ {
				var h Hook
				if h, n, err = readHook(p, in); err == nil && h.role() != deviceHookRoleHOOK_UNKNOWN {
					named := in
					named.CB[4] = uint32(h.role())
					h, n, err = readHook(p, named)
				}
				if err != nil {
					return nil, err
				}
				if in.CB[2] < n {
					h.Family, h.Point = family, point
					l = append(l, h)
				}
			}
		}
	}
	return l, nil
}

// readHook returns one hook at a point of the stack, and how many there are.
func readHook(p *ebpf.Program, in reportContext) (h Hook, n uint32, err error) {
	out := make([]byte, 320)
	o := &ebpf.RunOptions{Data: make([]byte, 256), DataOut: out, Context: in}
	if n, err = p.Run(o); err != nil {
		return h, 0, fmt.Errorf("bpf: run the program that reports hooks of netfilter: %w", bpf.Explain(err))
	}
	var r deviceHookReport
	const linkHeader = 14
	if err := binary.Read(bytes.NewReader(o.DataOut[linkHeader:]), binary.NativeEndian, &r); err != nil {
		return h, 0, fmt.Errorf("bpf: read a hook of netfilter: %w", err)
	}
	h.Function, h.Module, _ = strings.Cut(hookName(r.Symbol), " ")
	h.Module = strings.Trim(h.Module, "[]")
	h.Priority, h.Acts, h.address = r.Priority, r.Acting != 0, r.Function
	h.Table, h.Chain = hookName(r.Table), hookName(r.Chain)
	return h, n, nil
}

// hookName returns a name that the kernel holds. It accepts any bytes for a table's and a chain's, and long ones are
// cut: what isn't UTF-8, which no metric's label may be, is replaced.
func hookName(b [64]byte) string {
	return strings.ToValidUTF8(unix.ByteSliceToString(b[:]), "\uFFFD")
}

// Acting returns those of the hooks that would handle packets of a family, but for programs of network policies.
func Acting(hooks []Hook, family uint8) []Hook {
	return slices.DeleteFunc(slices.Clone(hooks), func(h Hook) bool {
		return h.Family != family || !h.Acts || h.Function == "nf_hook_run_bpf"
	})
}

// WriteHooks has the programs at devices, which work on the maps in a folder, know the functions of the hooks that are
// in the calling thread's network namespace now, and no others: the address of one that is gone may be another's. What
// they don't know counts as handling packets.
func WriteHooks(folder string) error {
	l, err := ReadHooks(folder, false)
	if bpf.Absent(err) {
		return nil
	}
	if err != nil {
		return err
	}
	m, err := openHooks(folder)
	if err != nil {
		return err
	}
	defer m.Close()
	var held deviceHookFunctions
	if err := m.Lookup(uint32(0), &held); err != nil {
		return fmt.Errorf("bpf: read map %s: %w", deviceMapFlHooks, err)
	}
	roles := rolesOf(l)
	if holds(held, roles) {
		return nil
	}
	if err := m.Put(uint32(0), slotted(roles)); err != nil {
		return fmt.Errorf("bpf: write map %s: %w", deviceMapFlHooks, err)
	}
	return nil
}

// rolesOf returns what the hooks' functions are for, as far as that is known, by their addresses.
func rolesOf(l []Hook) map[uint64]deviceHookRole {
	roles := map[uint64]deviceHookRole{}
	for _, h := range l {
		if r := h.role(); r != deviceHookRoleHOOK_UNKNOWN {
			roles[h.address] = r
		}
	}
	return roles
}

// slot returns where a function is in such a table, and what is there: see struct hook_functions.
func slot(multiplier, function uint64, role deviceHookRole) (at, value uint64) {
	return function * multiplier >> functionShift, function<<8 | uint64(role)
}

// functionShift is FUNCTION_SHIFT.
const functionShift = 58

// holds reports whether a table has these functions in their roles, and no others.
func holds(f deviceHookFunctions, roles map[uint64]deviceHookRole) bool {
	used := 0
	for _, value := range f.Slots {
		if value != 0 {
			used++
		}
	}
	for function, role := range roles {
		if at, value := slot(f.Multiplier, function, role); f.Slots[at] != value {
			return false
		}
	}
	return used == len(roles)
}

// slotted returns the table of functions, each in a slot of its own, which some odd multiplier leads it to.
func slotted(roles map[uint64]deviceHookRole) (f deviceHookFunctions) {
	for f.Multiplier = 1; ; f.Multiplier += 0x9e3779b97f4a7c16 { // any even number that leads far away
		f.Slots = [len(f.Slots)]uint64{}
		for function, role := range roles {
			at, value := slot(f.Multiplier, function, role)
			f.Slots[at] = value
		}
		if holds(f, roles) {
			return f
		}
	}
}
