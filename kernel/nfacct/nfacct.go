// Package nfacct reads and writes the kernel's named packet counters (nfnetlink_acct) in the calling thread's network
// namespace. Rules of iptables count in them with the match nfacct.
//
// Written against include/uapi/linux/netfilter/nfnetlink_acct.h and net/netfilter/nfnetlink_acct.c.
package nfacct

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/nlattr"
)

// Commands and attributes of nfnetlink_acct.h.
const (
	cmdNew, cmdGet, cmdDel = 0, 1, 3
	attrName, attrPackets  = 1, 2
)

// request sends a command about a counter and returns the messages of the reply.
func request(cmd, flags int, name string) ([][]byte, error) {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_ACCT<<8|cmd, flags|unix.NLM_F_ACK)
	r.AddData(&nl.Nfgenmsg{})
	r.AddData(nl.NewRtAttr(attrName, nl.ZeroTerminated(name)))
	l, err := r.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("nfacct: counter %s: %w", name, err)
	}
	return l, nil
}

// Supported reports whether the kernel has such counters, and the caller may use them.
func Supported() bool {
	_, err := request(cmdGet, 0, "supported")
	return err == nil || errors.Is(err, unix.ENOENT)
}

// Ensure creates a counter unless there is one of that name.
func Ensure(name string) error {
	if _, err := request(cmdNew, unix.NLM_F_CREATE, name); !errors.Is(err, unix.EBUSY) {
		return err
	}
	return nil
}

// Packets returns how many packets a counter has counted. The error is fs.ErrNotExist where there is no counter of
// that name.
func Packets(name string) (uint64, error) {
	l, err := request(cmdGet, 0, name)
	if err != nil {
		return 0, err
	}
	for _, b := range l {
		if n, ok := packets(b); ok {
			return n, nil
		}
	}
	return 0, fmt.Errorf("nfacct: counter %s: the kernel tells no number of packets", name)
}

// packets reads the number out of a message: struct nfgenmsg and attributes.
func packets(b []byte) (n uint64, ok bool) {
	if len(b) < nl.SizeofNfgenmsg {
		return 0, false
	}
	v := nlattr.Find(b[nl.SizeofNfgenmsg:], attrPackets)
	if len(v) < 8 {
		return 0, false
	}
	return binary.BigEndian.Uint64(v), true
}

// freed is how long the kernel may take to free a rule of nf_tables after its removal (nf_tables_trans_destroy_work).
const freed = time.Second

// Delete removes a counter. One that isn't there is no error, nor is one that a rule still counts in: it stays.
func Delete(name string) error {
	for end := time.Now().Add(freed); ; time.Sleep(time.Millisecond) {
		_, err := request(cmdDel, 0, name)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
			return nil
		case !errors.Is(err, unix.EBUSY):
			return err
		case time.Now().After(end):
			return nil
		}
	}
}
