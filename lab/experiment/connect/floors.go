package connect

import (
	"context"
	"fmt"

	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/floor"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// floorArm is an arm of exact runs: direct, with programs of a few instructions where mode ebpf has its own.
type floorArm struct {
	arm     result.Arm
	program floor.Program
}

var floors = []floorArm{
	{result.Arm{ID: "floor-empty", Title: "floor: empty program", Text: "as direct, with a program that does nothing " +
		"at connect() and at each device of the node, both ways: what any program there costs at least"}, floor.Empty},
	{result.Arm{ID: "floor-lookup", Title: "floor: one lookup", Text: fmt.Sprintf("as direct, with programs there that "+
		"look up the destination's address in a hash table of %s", experiment.Thousands(floor.Entries))}, floor.Lookup},
}

// findFloors finds those that this machine can run: all where mode ebpf has programs at devices, else none.
func (r *trial) findFloors() {
	if err := bpf.ProbeDevices(); err != nil {
		r.grid.Cannot = append(r.grid.Cannot, testbed.Unable{Name: "floors", Why: testbed.Brief(err.Error())})
		return
	}
	r.floors = floors
}

// addFloor makes a floor's pair.
func (r *trial) addFloor(ctx context.Context, arm string, program floor.Program) error {
	p, err := r.bed.AddPair(ctx, arm, 0)
	if err != nil {
		return err
	}
	var devices []floor.Device
	err = testbed.DialLink(p.Near, func(c *link.Conn) error {
		l, err := c.Devices()
		for _, d := range l {
			devices = append(devices, floor.Device{Index: d.Index, Loopback: d.Loopback})
		}
		return err
	})
	if err != nil {
		return err
	}
	return p.Near.Do(func() error {
		c, err := floor.Attach(program, p.Cgroup(), testbed.ServerAddr(0), devices...)
		if err == nil {
			r.bed.Defer(c.Close)
		}
		return err
	})
}
