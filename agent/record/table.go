package record

import (
	"net/netip"

	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/model"
)

// table is the flows that were recorded. It is bounded: in all, and for each pod of this node, so that a pod that scans
// others hides none of theirs.
type table struct {
	names       *names
	max, perPod int
	flows       map[flowlog.Key]uint64  // connections
	owned       map[netip.Addr]int      // flows, by the address of the pod of this node that they are counted to
	pods        map[string]*flowlog.Pod // those of flows, by name
	beyond      uint64                  // connections of flows beyond a bound
	unclear     uint64                  // connections that can't be read
}

func newTable(n *names, max, perPod int) table {
	return table{names: n, max: max, perPod: perPod, flows: map[flowlog.Key]uint64{}, owned: map[netip.Addr]int{},
		pods: map[string]*flowlog.Pod{}}
}

// add records a connection of a pod of this node. One that is not new counts only if its flow is not known.
func (t *table) add(c conntrack.Tracked, isNew bool) {
	client, server, clear := ends(c)
	if t.names.isOwn(client.Addr()) {
		return // policies don't evaluate what the node itself sends
	}
	p, local := t.names.of(client.Addr())
	q, localServer := t.names.of(server.Addr())
	owner := client.Addr()
	switch {
	case !local && !localServer:
		return
	case !clear:
		t.unclear++
		return
	case !local:
		owner = server.Addr()
	}
	k := flowlog.Key{Client: t.end(client.Addr(), p), Server: t.end(server.Addr(), q),
		Protocol: model.Protocol(c.Protocol)}
	if flowlog.HasPorts(k.Protocol) {
		k.Port = server.Port()
	}
	_, known := t.flows[k]
	switch {
	case !known && (len(t.flows) >= t.max || t.owned[owner] >= t.perPod):
		t.beyond++
	case !known:
		t.owned[owner]++
		t.flows[k] = 1
	case isNew:
		t.flows[k]++
	}
}

// end returns an end of a flow.
func (t *table) end(a netip.Addr, p *flowlog.Pod) flowlog.End {
	if p == nil {
		return flowlog.End{Addr: a}
	}
	t.pods[p.Name] = p
	return flowlog.End{Addr: a, Pod: p.Name}
}

// ends returns the client and the server of a connection, as policies see them: behind the translation of the
// destination, before that of the source. Of a connection that is older than connection tracking the first packet is
// not known: the end with the lower port is taken for the server, and clear is false where that doesn't say.
func ends(c conntrack.Tracked) (client, server netip.AddrPort, clear bool) {
	client, server = c.Source, c.ReplySource
	const ephemeral = 32768 // and above (ip_local_port_range)
	switch low, high := min(client.Port(), server.Port()), max(client.Port(), server.Port()); {
	case !c.Midstream:
		return client, server, true
	case low >= ephemeral || high < ephemeral:
		return client, server, false
	case client.Port() == low:
		return server, client, true
	}
	return client, server, true
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
			t.flows[named] += n
		}
	}
	f := &flowlog.File{Header: flowlog.Header{Beyond: t.beyond, Unclear: t.unclear}, Pods: map[string]flowlog.Pod{}}
	for k, n := range t.flows {
		f.Flows = append(f.Flows, flowlog.Flow{Client: k.Client, Server: k.Server, Protocol: k.Protocol, Port: k.Port,
			Count: n})
		for _, e := range []flowlog.End{k.Client, k.Server} {
			if e.Pod != "" {
				f.Pods[e.Pod] = *t.pods[e.Pod]
			}
		}
	}
	return f
}
