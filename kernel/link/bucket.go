package link

import (
	"encoding/binary"
	"fmt"
	"math"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// Bucket is a token bucket filter (tbf) at what a device sends: a queueing discipline of ours. Buckets are comparable.
type Bucket struct {
	Dev  int    // interface index
	Rate uint64 // bytes a second, with link-layer headers
}

// bucketHandle is the handle of our token buckets, by which those of others are left alone: 0xfa1 with a minor of 0.
const bucketHandle = 0xfa1 << 16

// Of a token bucket: include/uapi/linux/pkt_sched.h.
const (
	tbfParameters, tbfRate64, tbfBurst = 1, 4, 6 // TCA_TBF_PARMS, TCA_TBF_RATE64, TCA_TBF_BURST
	linkLayerEthernet                  = 1       // of struct tc_ratespec: sizes count as they are
	rateOffset                         = 8       // of the rate in struct tc_tbf_qopt
)

// Burst returns how many bytes may pass at once: those of 5 ms, and room for ten frames of 1.5 kB.
func (l Bucket) Burst() uint32 { return bytesOf(l.Rate, 5, 16<<10) }

// Limit returns how many bytes may wait: those of 50 ms, and room for twenty such frames. More is dropped.
func (l Bucket) Limit() uint32 { return bytesOf(l.Rate, 50, 32<<10) }

// bytesOf returns how many bytes a rate has in some milliseconds, at least least.
func bytesOf(rate, milliseconds uint64, least uint32) uint32 {
	return uint32(min(max(rate/1000*milliseconds, uint64(least)), math.MaxInt32))
}

// PutBuckets has devices send no more than a rate, in place of what queueing discipline each has.
func PutBuckets(b *netlink.Batch, l ...Bucket) {
	for _, t := range l {
		said := func() string {
			return fmt.Sprintf("limit interface %d to %d bytes a second by a token bucket filter (sch_tbf)", t.Dev, t.Rate)
		}
		b.Add(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, said, func(m *netlink.Buffer) {
			t.writeHeader(m)
			m.Text(unix.TCA_KIND, "tbf")
			m.Nest(unix.TCA_OPTIONS, func() {
				p := make([]byte, rateOffset, 36)
				p[1] = linkLayerEthernet
				p = binary.NativeEndian.AppendUint32(p, uint32(min(t.Rate, math.MaxUint32)))
				p = append(p, make([]byte, 12)...) // no rate of peaks
				p = binary.NativeEndian.AppendUint32(p, t.Limit()+t.Burst())
				p = append(p, make([]byte, 8)...) // the burst is below, in bytes
				m.Bytes(tbfParameters, p)
				m.Uint32(tbfBurst, t.Burst())
				if t.Rate > math.MaxUint32 {
					m.Bytes(tbfRate64, binary.NativeEndian.AppendUint64(nil, t.Rate))
				}
			})
		})
	}
}

// DeleteBuckets removes token buckets. One that isn't there is no error.
func DeleteBuckets(b *netlink.Batch, l ...Bucket) {
	for _, t := range l {
		said := func() string { return fmt.Sprintf("remove the limit of interface %d", t.Dev) }
		b.Add(unix.RTM_DELQDISC, 0, said, t.writeHeader, unix.ENOENT, unix.EINVAL, unix.ENODEV)
	}
}

// writeHeader writes a struct tcmsg.
func (l Bucket) writeHeader(m *netlink.Buffer) {
	*m = append(*m, unix.AF_UNSPEC, 0, 0, 0)
	*m = binary.NativeEndian.AppendUint32(*m, uint32(l.Dev))
	*m = binary.NativeEndian.AppendUint32(*m, bucketHandle)
	*m = binary.NativeEndian.AppendUint32(*m, math.MaxUint32) // TC_H_ROOT
	*m = binary.NativeEndian.AppendUint32(*m, 0)
}

// Buckets returns our token buckets of all devices.
func Buckets(s *netlink.Socket) (l []Bucket, err error) {
	err = netlink.Stable(func() error {
		l = nil
		return s.Request(unix.RTM_GETQDISC, unix.NLM_F_DUMP, func(b *netlink.Buffer) {
			*b = append(*b, make([]byte, tcHeader)...)
		}, func(m netlink.Message) {
			if t, own := bucketOf(m); own {
				l = append(l, t)
			}
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list queueing disciplines: %w", err)
	}
	return l, nil
}

const tcHeader = 20 // struct tcmsg

// bucketOf reads a message, and reports whether it has a token bucket of ours.
func bucketOf(m netlink.Message) (t Bucket, own bool) {
	dev := QueueDevice(m)
	if dev == 0 || binary.NativeEndian.Uint32(m.Body[8:]) != bucketHandle {
		return t, false
	}
	t.Dev = dev
	for kind, v := range m.Attributes(tcHeader) {
		if kind != unix.TCA_OPTIONS {
			continue
		}
		if p := netlink.Find(v, tbfParameters); len(p) >= rateOffset+4 {
			t.Rate = uint64(binary.NativeEndian.Uint32(p[rateOffset:]))
		}
		if r := netlink.Find(v, tbfRate64); len(r) == 8 {
			t.Rate = binary.NativeEndian.Uint64(r)
		}
	}
	return t, true
}

// QueueDevice returns the interface index of a message about a queueing discipline, 0 of others.
func QueueDevice(m netlink.Message) int {
	if m.Type != unix.RTM_NEWQDISC && m.Type != unix.RTM_DELQDISC || len(m.Body) < tcHeader {
		return 0
	}
	return int(int32(binary.NativeEndian.Uint32(m.Body[4:])))
}
