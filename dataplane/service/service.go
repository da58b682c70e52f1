// Package service holds what service data planes share: notes about them, and what they count. The planes are the
// packages below.
package service

import "fairlead.dev/fairlead/model"

// Notes of planes whose packets are forwarded as any others are.
var (
	RemarkForward = model.Remark{ID: "forward",
		Text: "If the node drops forwarded packets by default (policy DROP in FORWARD, as " +
			"Docker sets it), other rules must accept those to endpoints and their replies: /status has the problem " +
			"ForwardPolicyDrop then."}
	RemarkInvalid = model.Remark{ID: "invalid",
		Text: "Packets that connection tracking calls invalid are not dropped, as in " +
			"kube-proxy's mode nftables: where these reset connections, set conntrack.tcpBeLiberal. See " +
			"fairlead_conntrack_invalid_packets_total."}
	// of planes that don't serve node ports at other nodes' addresses
	RemarkRemote = model.Remark{ID: "remote-node-ports",
		Text: "Node ports at other nodes' addresses are served by those nodes, which masquerade: endpoints, and network " +
			"policies there, see the other node instead of the client.",
		About: &model.Packets{NodePorts: true, Origins: model.OriginsOf(model.FromNode, model.FromPod)}}
)

// PodsBypass is why planes that translate in the node's network stack can't serve pods that are connected by ipvlan.
const PodsBypass = "it translates in the node's network stack, which packets to these pods bypass"

// RepliesReturn is why backends' nodes can't reply to clients themselves, in planes that keep a connection's state
// where it came in.
const RepliesReturn = "answers must come back through the node that was asked"

// All is all packets that match a frontend.
func All() *model.Packets { return &model.Packets{} }

// Over is the packets of a protocol that match a frontend.
func Over(p model.Protocol) *model.Packets { return &model.Packets{Protocols: []model.Protocol{p}} }

// Scheduled is the packets to frontends with one of those schedulers.
func Scheduled(s ...model.Scheduler) *model.Packets {
	return &model.Packets{Schedulers: model.SchedulersOf(s...)}
}
