package record

import (
	"net/netip"

	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/model"
)

// table is the flows that were recorded. It is bounded: in all, and for each pod of this node, so that a pod that scans
// others hides none of theirs.
type table struct {
	names       *names
	max, perPod int
	flows       map[flowlog.Key]counts
	owned       map[netip.Addr]int      // flows, by the address of the pod of this node that they are counted to
	pods        map[string]*flowlog.Pod // those of flows, by name
	beyond      uint64                  // connections of flows beyond a bound
	unclear     uint64                  // connections that can't be read
}

// counts are connections of a flow: those that were let through, and those that policies denied.
type counts struct{ allowed, denied uint64 }

func newTable(n *names, max, perPod int) table {
	return table{names: n, max: max, perPod: perPod, flows: map[flowlog.Key]counts{}, owned: map[netip.Addr]int{},
		pods: map[string]*flowlog.Pod{}}
}

// add records a connection of a pod of this node. One that was open before counts only if its flow is not known.
func (t *table) add(c connection) {
	client, server := c.client.Addr(), c.server.Addr()
	if t.names.isOwn(client) {
		return // policies don't evaluate what the node itself sends
	}
	p, local := t.names.of(client)
	q, localServer := t.names.of(server)
	owner := client
	switch {
	case !local && !localServer:
		return
	case c.unclear:
		t.unclear++
		return
	case !local:
		owner = server
	}
	k := flowlog.Key{Client: t.end(client, p), Server: t.end(server, q), Protocol: model.Protocol(c.protocol)}
	if flowlog.HasPorts(k.Protocol) {
		k.Port = c.server.Port()
	}
	n, known := t.flows[k]
	if !known {
		if len(t.flows) >= t.max || t.owned[owner] >= t.perPod {
			t.beyond += max(c.count, 1)
			return
		}
		t.owned[owner]++
	}
	switch {
	case c.denied:
		n.denied += c.count
	case c.count > 0 || n.allowed == 0:
		n.allowed += max(c.count, 1)
	}
	t.flows[k] = n
}

// end returns an end of a flow.
func (t *table) end(a netip.Addr, p *flowlog.Pod) flowlog.End {
	if p == nil {
		return flowlog.End{Addr: a}
	}
	t.pods[p.Name] = p
	return flowlog.End{Addr: a, Pod: p.Name}
}

// file returns what was recorded. Pods that were not known when their flows began may be by now.
func (t *table) file() *flowlog.File {
	for k, n := range t.flows {
		named := k
		for _, e := range []*flowlog.End{&named.Client, &named.Server} {
			if p, _ := t.names.of(e.Addr); p != nil && e.Pod == "" {
				*e = t.end(e.Addr, p)
			}
		}
		if named != k {
			delete(t.flows, k)
			known := t.flows[named]
			t.flows[named] = counts{known.allowed + n.allowed, known.denied + n.denied}
		}
	}
	f := &flowlog.File{Header: flowlog.Header{Beyond: t.beyond, Unclear: t.unclear}, Pods: map[string]flowlog.Pod{}}
	for k, n := range t.flows {
		f.Flows = append(f.Flows, flowlog.Flow{Client: k.Client, Server: k.Server, Protocol: k.Protocol, Port: k.Port,
			Count: n.allowed, Denied: n.denied})
		for _, e := range []flowlog.End{k.Client, k.Server} {
			if e.Pod != "" {
				f.Pods[e.Pod] = *t.pods[e.Pod]
			}
		}
	}
	return f
}
