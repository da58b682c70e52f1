package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Options of getsockopt and sizes of linux/netfilter_ipv4/ip_tables.h and linux/netfilter/x_tables.h. IPv6's are the
// same but for the address part of an entry.
const (
	getInfo, getEntries = 64, 65
	infoUnderflow       = 56 // of struct ipt_getinfo: where each hook's policy is
	infoSize            = 80
	entriesHead         = 40 // of struct ipt_get_entries
	targetOffset4       = 88 // of struct ipt_entry
	targetOffset6       = 140
	targetHead          = 32 // of struct xt_standard_target
	verdictDrop         = -1 // NF_DROP, as an entry has it
)

// LegacyForwardDrops reports whether the policy of chain FORWARD in the legacy variant's table filter is DROP, in the
// calling thread's network namespace. A table that was never used is not created by asking.
func LegacyForwardDrops(f Family) (bool, error) {
	names, err := os.ReadFile(f.names())
	if errors.Is(err, fs.ErrNotExist) || err == nil && !strings.Contains("\n"+string(names), "\nfilter\n") {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("iptables: read the names of tables: %w", err)
	}
	domain, level := unix.AF_INET, unix.SOL_IP
	if f == IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, fmt.Errorf("iptables: open socket: %w", err)
	}
	defer unix.Close(fd)
	for { // until the table keeps its size between the two questions
		var i info
		copy(i[:], "filter")
		if err := getsockopt(fd, level, getInfo, i[:]); err != nil {
			return false, fmt.Errorf("iptables: ask for the size of table filter: %w", err)
		}
		table := make([]byte, entriesHead+binary.NativeEndian.Uint32(i[infoSize:]))
		copy(table, i[:32])
		copy(table[32:], i[infoSize:])
		err := getsockopt(fd, level, getEntries, table)
		if errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("iptables: read table filter: %w", err)
		}
		at := binary.NativeEndian.Uint32(i[infoUnderflow+4*unix.NF_INET_FORWARD:])
		return policyOf(table[entriesHead:], f, int(at)) == verdictDrop, nil
	}
}

// policyOf returns the verdict of the entry at an offset of a table: the last one of a built-in chain, which matches
// all packets.
func policyOf(table []byte, f Family, at int) int32 {
	offset := targetOffset4
	if f == IPv6 {
		offset = targetOffset6
	}
	if at < 0 || at+offset+2 > len(table) {
		return 0
	}
	at += int(binary.NativeEndian.Uint16(table[at+offset:])) + targetHead
	if at+4 > len(table) {
		return 0
	}
	return int32(binary.NativeEndian.Uint32(table[at:]))
}

// getsockopt reads an option of any size.
func getsockopt(fd, level, name int, into []byte) error {
	size := uint32(len(into))
	_, _, e := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name),
		uintptr(unsafe.Pointer(&into[0])), uintptr(unsafe.Pointer(&size)), 0)
	if e != 0 {
		return e
	}
	return nil
}
