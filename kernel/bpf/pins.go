package bpf

import (
	"fmt"

	"github.com/cilium/ebpf/btf"
)

// formerNames are types of state maps under the names that they and their fields had when the forms of pins were made
// of these.
var formerNames = map[string]string{
	`Struct:"port_bits"[fields=2 fieldNames=[<0> generation]]`: "" +
		`Struct:"uses"[fields=2 fieldNames=[<0> generation]]`,
	`Struct:"affinity_key"[fields=2 fieldNames=[address pool]]`: "" +
		`Struct:"client"[fields=2 fieldNames=[address pool]]`,
	`Struct:"affinity_entry"[fields=2 fieldNames=[backend seen]]`: "" +
		`Struct:"memory"[fields=2 fieldNames=[backend seen]]`,
	`Struct:"counted_socket"[fields=2 fieldNames=[endpoint since]]`: "" +
		`Struct:"counted"[fields=2 fieldNames=[endpoint since]]`,
	`Struct:"tuple"[fields=6 fieldNames=[source destination sport dport protocol ...]]`: "" +
		`Struct:"tuple"[fields=6 fieldNames=[source destination from to protocol ...]]`,
	`Struct:"nat_entry"[fields=6 fieldNames=[to from seen change state ...]]`: "" +
		`Struct:"way"[fields=6 fieldNames=[to from seen change state ...]]`,
	`Struct:"fragment"[fields=4 fieldNames=[source destination id protocol]]`: "" +
		`Struct:"piece"[fields=4 fieldNames=[source destination id protocol]]`,
	`Struct:"ports"[fields=2 fieldNames=[sport dport]]`: "" +
		`Struct:"ports"[fields=2 fieldNames=[from to]]`,
	`Struct:"netns_key"[fields=3 fieldNames=[namespace family zero]]`: "" +
		`Struct:"home"[fields=3 fieldNames=[namespace family zero]]`,
	`Struct:"netns_addr"[fields=4 fieldNames=[address expires flags zero]]`: "" +
		`Struct:"address_of"[fields=4 fieldNames=[address until place zero]]`,
	`Struct:"route"[fields=12 fieldNames=[source destination expires in_ifindex out_ifindex ...]]`: "" +
		`Struct:"lane"[fields=12 fieldNames=[source destination until from to ...]]`,
	`Struct:"peer_name"[fields=8 fieldNames=[cookie namespace pool entry backend ...]]`: "" +
		`Struct:"name"[fields=8 fieldNames=[cookie namespace pool entry backend ...]]`,
	`Struct:"socket_flows"[fields=3 fieldNames=[next zero flow]]`: "" +
		`Struct:"flows"[fields=3 fieldNames=[next zero flow]]`,
	`Struct:"lookup"[fields=12 fieldNames=[entry client previous backend namespace ...]]`: "" +
		`Struct:"question"[fields=12 fieldNames=[entry from kept backend namespace ...]]`,
}

// typeName describes a type for the form of a pin: its name, the number of its fields, and the first five.
func typeName(t btf.Type) string {
	name := fmt.Sprint(t)
	if former, ok := formerNames[name]; ok {
		return former
	}
	return name
}
