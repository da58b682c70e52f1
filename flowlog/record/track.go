package record

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/kernel/sysctl"
)

// trackTable is the table of nf_tables that switches connection tracking on. It is the socket's that makes it, and goes
// with that.
const trackTable = "fairlead-record"

const withTrack = "record with --track to switch it on for that time"

// prepare has connections of the calling thread's network namespace tracked and reported, and returns what undoes that,
// and a warning where one family is left out. Unless track it changes nothing: the error says what is off.
func prepare(track bool) (undo func() error, warning string, err error) {
	setting := sysctl.OpenOptional(conntrack.EventsSetting)
	undo = setting.Close
	defer func() {
		if err != nil {
			err = errors.Join(err, undo())
		}
	}()
	events, err := setting.Get()
	if err != nil {
		return undo, "", fmt.Errorf("this kernel reports no connections: it needs CONFIG_NF_CONNTRACK_EVENTS: %w", err)
	}
	v4, v6, err := conntrack.Tracking()
	switch {
	case err != nil:
		return undo, "", err
	case events == "0" && !track:
		return undo, "", fmt.Errorf("connections have no events (sysctl %s is 0): set it to 1, or %s",
			conntrack.EventsSetting, withTrack)
	case !v4 && !v6 && !track:
		return undo, "", errors.New("connection tracking is off on this node, as no rule needs it, and the policy engine " +
			"ebpf, which records without it, evaluates no policy here: " + withTrack + ", which costs packets time")
	case v4 != v6 && !track:
		warning = "connection tracking is on for one IP family alone, and so is what is recorded: " + withTrack
	}
	if track && events == "0" {
		if err := setting.Set("1"); err != nil {
			return undo, "", err
		}
		undo = func() error { return errors.Join(setting.Set(events), setting.Close()) }
	}
	if track && !(v4 && v6) {
		before := undo
		table, err := switchOn()
		if err != nil {
			return undo, "", fmt.Errorf("switch connection tracking on: %w", err)
		}
		undo = func() error { return errors.Join(table.Close(), before()) }
	}
	return undo, warning, nil
}

// switchOn has connections tracked until the connection that it returns is closed.
func switchOn() (*nftables.Conn, error) {
	c, err := nftables.Open()
	if err != nil {
		return nil, err
	}
	supported, err := c.Supports(nftables.Owned)
	if err == nil && !supported {
		err = errors.New("this kernel has no tables that go with their owner (Linux 5.12): add a rule of your own that " +
			"matches a connection's state")
	}
	if err == nil {
		var t nftables.Tx
		t.AddTableAs(trackTable, nftables.Owned, "")
		t.AddChain(trackTable, nftables.Chain{Name: "track", Hook: &nftables.Hook{Type: "filter",
			Number: unix.NF_INET_POST_ROUTING, Priority: 0}})
		t.AddRule(trackTable, "track", nftables.Rule{Comment: "has connections tracked", Exprs: nftables.Exprs(
			nftables.Ct(nftables.CtState, nftables.R(0)))})
		err = c.Commit(&t)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}
