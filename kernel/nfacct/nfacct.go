// Package nfacct reads and writes the kernel's named packet counters (nfnetlink_acct) in the calling thread's network
// namespace. Rules of iptables count in them with the match nfacct.
//
// Written against include/uapi/linux/netfilter/nfnetlink_acct.h and net/netfilter/nfnetlink_acct.c.
package nfacct

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// Commands and attributes of nfnetlink_acct.h.
const (
	cmdNew, cmdGet, cmdDel = 0, 1, 3
	attrName, attrPackets  = 1, 2
)

// header is the length of struct nfgenmsg.
const header = 4

// request sends a command about a counter and calls f with each message of the reply.
func request(cmd, flags uint16, name string, f func(message []byte)) error {
	s, err := netlink.Open(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return fmt.Errorf("nfacct: %w", err)
	}
	defer s.Close()
	err = s.Request(unix.NFNL_SUBSYS_ACCT<<8|cmd, flags, func(b *netlink.Buffer) {
		*b = append(*b, make([]byte, header)...)
		b.Text(attrName, name)
	}, func(m netlink.Message) {
		if f != nil {
			f(m.Body)
		}
	})
	if err != nil {
		return fmt.Errorf("nfacct: counter %s: %w", name, err)
	}
	return nil
}

// Supported reports whether the kernel has such counters, and the caller may use them.
func Supported() bool {
	err := request(cmdGet, 0, "supported", nil)
	return err == nil || errors.Is(err, unix.ENOENT)
}

// Ensure creates a counter unless there is one of that name.
func Ensure(name string) error {
	if err := request(cmdNew, unix.NLM_F_CREATE, name, nil); !errors.Is(err, unix.EBUSY) {
		return err
	}
	return nil
}

// Packets returns how many packets a counter has counted. The error is fs.ErrNotExist where there is no counter of
// that name.
func Packets(name string) (n uint64, err error) {
	found := false
	err = request(cmdGet, 0, name, func(message []byte) {
		if m, ok := packets(message); ok {
			n, found = m, true
		}
	})
	if err == nil && !found {
		err = fmt.Errorf("nfacct: counter %s: the kernel returned no number of packets", name)
	}
	return n, err
}

// packets reads the number out of a message: struct nfgenmsg and attributes.
func packets(b []byte) (n uint64, ok bool) {
	v := netlink.Find(b[min(header, len(b)):], attrPackets)
	if len(v) < 8 {
		return 0, false
	}
	return netlink.BE(v), true
}

// freed is how long the kernel may take to free a rule of nf_tables after its removal (nf_tables_trans_destroy_work).
const freed = time.Second

// Delete removes a counter. One that isn't there is no error, nor is one that a rule still counts in: it stays.
func Delete(name string) error {
	for end := time.Now().Add(freed); ; time.Sleep(time.Millisecond) {
		err := request(cmdDel, 0, name, nil)
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
