package model

import (
	"cmp"
	"fmt"
	"strings"
)

// The kinds of owners.
const (
	KindNode    = "Node"
	KindService = "Service"
	KindDevice  = "Device"

	KindAttachment = "Attachment" // of a pod, by Attachment.ID
	KindPod        = "Pod"

	KindNetworkPolicy        = "NetworkPolicy"
	KindClusterNetworkPolicy = "ClusterNetworkPolicy"
)

// Owner is the object of the cluster that a part of a decided node is made for. The zero value is none.
type Owner struct{ Kind, Namespace, Name string }

// String returns "shop/web", or "node a" for a node and other owners without a namespace.
func (o Owner) String() string {
	switch {
	case o.Namespace != "":
		return o.Namespace + "/" + o.Name
	case o.Kind != "":
		return strings.ToLower(o.Kind) + " " + o.Name
	}
	return o.Name
}

// Compare orders owners by kind, namespace and name.
func (o Owner) Compare(p Owner) int {
	return cmp.Or(cmp.Compare(o.Kind, p.Kind), cmp.Compare(o.Namespace, p.Namespace), cmp.Compare(o.Name, p.Name))
}

// OwnerOf returns the owner of a part.
func OwnerOf(p ServicePart) Owner {
	switch v := p.(type) {
	case *Frontend:
		return v.Owner
	case *Pool:
		return v.Owner
	case *ServiceNode:
		return Owner{Kind: KindNode, Name: v.Name}
	case *Link:
		return Owner{Kind: KindDevice, Name: v.Name}
	case *HealthCheck:
		return v.Owner
	case *ClusterIP:
		return v.Owner
	}
	return Owner{}
}

// LabelOf returns what of its owner a part is for, for people: "shop/web:http" for a port of a Service.
func LabelOf(p ServicePart) string {
	switch v := p.(type) {
	case *Frontend:
		return v.Service
	case *Pool:
		return v.Service
	}
	return OwnerOf(p).String()
}

// DerivedPart is a data plane's own part, which it makes of another one.
type DerivedPart interface {
	PolicyPart
	Origin() PolicyPart
}

// PolicyOwnerOf returns the owner of a part: the pod of a Subject or Device, so that it can be waited for, the first
// policy of a Ruleset, and none for parts that many share.
func PolicyOwnerOf(p PolicyPart) Owner {
	switch v := p.(type) {
	case DerivedPart:
		return PolicyOwnerOf(v.Origin())
	case *Subject:
		return podOwner(v.Pod)
	case *Device:
		if v.Pod != "" {
			return podOwner(v.Pod)
		}
	case *Ruleset:
		if len(v.Policies) > 0 {
			return v.Policies[0].Owner()
		}
	}
	return Owner{}
}

// podOwner returns the pod "namespace/name" as an owner.
func podOwner(pod string) Owner {
	namespace, name, _ := strings.Cut(pod, "/")
	return Owner{KindPod, namespace, name}
}

// PolicyLabelOf returns what a part is, for people: "pod shop/web-1 at 10.0.0.7", a Ruleset's or Peer's name.
func PolicyLabelOf(p PolicyPart) string {
	switch v := p.(type) {
	case DerivedPart:
		return PolicyLabelOf(v.Origin())
	case *PolicyNode:
		return "node"
	case *Subject:
		return fmt.Sprintf("pod %s at %s", v.Pod, v.Addr)
	case *Device:
		return "device " + v.Name
	case *Ruleset:
		return v.Name
	case *PeerTable:
		return fmt.Sprintf("peer table %016x", v.ID)
	case *PeerVerdict:
		return fmt.Sprintf("peer table %016x", v.PeerTable.ID)
	case *Peer:
		return "peer " + v.Name
	}
	return ""
}
