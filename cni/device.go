package cni

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"syscall"
)

// Key returns the ID of an attachment.
func Key(container, iface string) string { return container + "/" + iface }

// Hash returns an ID's hash (FNV-1a).
func Hash(id string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(id))
	return h.Sum64()
}

func digest(id string) string { return fmt.Sprintf("%016x", Hash(id)) }

// DevicePrefix is how the names of pods' devices begin.
const DevicePrefix = "fl"

// Device returns the name of the node's end of an attachment's device.
func Device(id string) string { return DevicePrefix + digest(id)[:10] }

// RecordFile returns the name of an attachment's record in the folder of records.
func RecordFile(id string) string { return "attachment-" + digest(id) + ".json" }

// deleteDevice deletes a device of the calling thread's network namespace (rtnetlink(7)). One that isn't there is no
// error.
func deleteDevice(name string) error {
	attribute := append(append(binary.NativeEndian.AppendUint16(nil, uint16(4+len(name)+1)),
		binary.NativeEndian.AppendUint16(nil, syscall.IFLA_IFNAME)...), name+"\x00"...)
	for len(attribute)%4 != 0 {
		attribute = append(attribute, 0)
	}
	err := changeLink(syscall.RTM_DELLINK, append(make([]byte, syscall.SizeofIfInfomsg), attribute...))
	if err == syscall.ENODEV {
		return nil
	}
	return err
}

// setUp brings a device of the calling thread's network namespace up, by its index.
func setUp(index uint32) error {
	b := append(make([]byte, 4), binary.NativeEndian.AppendUint32(nil, index)...)
	b = binary.NativeEndian.AppendUint32(b, syscall.IFF_UP)
	return changeLink(syscall.RTM_NEWLINK, binary.NativeEndian.AppendUint32(b, syscall.IFF_UP))
}

// changeLink sends a request about a device and returns the kernel's reply: nil or a syscall.Errno.
func changeLink(kind uint16, body []byte) error {
	fd, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, syscall.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	m := binary.NativeEndian.AppendUint32(nil, uint32(syscall.NLMSG_HDRLEN+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, syscall.NLM_F_REQUEST|syscall.NLM_F_ACK)
	m = append(append(m, make([]byte, 8)...), body...)
	if err := syscall.Sendto(fd, m, 0, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}); err != nil {
		return err
	}
	b := make([]byte, 4096)
	n, _, err := syscall.Recvfrom(fd, b, 0)
	if err != nil {
		return err
	}
	if n < syscall.NLMSG_HDRLEN+4 {
		return fmt.Errorf("a reply of %d bytes", n)
	}
	if e := syscall.Errno(-int32(binary.NativeEndian.Uint32(b[syscall.NLMSG_HDRLEN:]))); e != 0 {
		return e
	}
	return nil
}
