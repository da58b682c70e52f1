package services

import (
	"fmt"
	"runtime/debug"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// exactly returns how much of a profile an exact run measures: counts scatter little, and emulation takes its time.
func (p profile) exactly() profile {
	if p.Name == quick().Name {
		p.Services = []int{10, 1000}
	}
	p.Rounds, p.Cold, p.Batches = experiment.ExactRounds, 3, min(p.Batches, 5)
	return p
}

// withoutGC keeps Go's collector out of what an exact run counts, until restore: it doubled a cold sync, or did not.
func (r *trial) withoutGC() (restore func()) {
	if !r.exact {
		return func() {}
	}
	before := debug.SetGCPercent(-1)
	return func() { debug.SetGCPercent(before) }
}

// exactDesign leaves out of a design what an exact run has no steps for.
func exactDesign(d *result.Design) {
	d.LeaveOut("what passes between two processes is time, most of it idle, over which an exact machine's clock jumps",
		"file", "loss")
	d.LeaveOut("emulation says nothing of it", "idle", "memory")
	d.Missing = append(d.Missing, "What a mode's planes take of a change, for others than nftables: the whole is counted.",
		"What the agent allocates: its metrics don't have it. What the kernel's own threads do "+
			"afterwards, such as to free what was replaced.")
}

// exactMethod returns what the design of an exact run says of it.
func exactMethod() []string {
	return []string{
		fmt.Sprintf("Every arm has two network namespaces of its own, joined by a veth: a node, where the client runs, and "+
			"a far end, where one server answers at %d addresses. Direct means: to those addresses, through a node without "+
			"any rule and without conntrack. One DNAT rule means: to an address that the only rule of the node translates "+
			"to one of them. All arms stand at the same time. A round takes the operations in random order; for each, direct "+
			"comes first and last, and the other arms in random order between.", testbed.Servers),
		"The agents are this program's own `fairlead run`, one per number of Services in mode nftables and one of each " +
			"other mode at the most Services, each from a folder with one object to a file. They were started with nothing " +
			"in their kernels, and until they are ready the lab asks them every 50 ms. What is said to be in process was " +
			"counted with the same loop and data plane within the lab's process, in fresh network namespaces, while Go's " +
			"collector rests there: what there is to collect is counted as allocations. It includes the commands that a " +
			"mode runs, as iptables does. Of other modes than nftables that is counted once, at the most Services.",
	}
}
