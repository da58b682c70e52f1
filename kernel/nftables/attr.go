package nftables

import "fairlead.dev/fairlead/kernel/netlink"

// nested marks attributes of attributes. Numbers inside nf_tables' attributes are in network byte order.
const nested = netlink.Nested

// value writes a data attribute that holds a plain value.
func value(b *netlink.Buffer, t uint16, v string) {
	outer := b.Open(t | nested)
	inner := b.Open(nftaDataValue)
	*b = append(*b, v...)
	b.Close(inner)
	b.Close(outer)
}

// verdict writes a data attribute that holds a verdict; chain is empty unless the code names one.
func verdict(b *netlink.Buffer, t uint16, v Verdict) {
	b.Nest(t, func() {
		b.Nest(nftaDataVerdict, func() {
			b.BE32(nftaVerdictCode, uint32(v.Code))
			if v.Chain != "" {
				b.Text(nftaVerdictChain, v.Chain)
			}
		})
	})
}

// verdictIn reads what verdict wrote, nil where there is none.
func verdictIn(data []byte) *Verdict {
	d := netlink.Find(data, nftaDataVerdict)
	if d == nil {
		return nil
	}
	return &Verdict{int32(number(netlink.Find(d, nftaVerdictCode))), netlink.Text(netlink.Find(d, nftaVerdictChain))}
}

func number(v []byte) uint32 { return uint32(netlink.BE(v)) }
