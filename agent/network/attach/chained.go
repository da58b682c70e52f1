package attach

import (
	"context"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/ipam"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/model"
)

// adopt records a pod that the plugin before this one has connected, and returns it: its addresses, and the node's end
// of its device as far as that is known. Nothing is written into the kernel.
func (s *Server) adopt(id string, r cni.Request) (*model.Attachment, error) {
	record := ipam.Record{ID: id, Pod: r.Pod, UID: r.UID, Interface: r.Interface, NetNS: r.NetNS, Network: r.Network,
		Addresses: addressesIn(r), Foreign: true}
	veths, err := link.Veths(s.s, "")
	if err != nil {
		return nil, err
	}
	ends := map[string]bool{}
	for _, v := range veths {
		ends[v.Name] = true
	}
	record.End = deviceIn(r.Prev, ends)
	if err := s.options.Pool.Adopt(record); err != nil {
		return nil, err
	}
	return AttachmentOf(record), nil
}

// addressesIn returns the addresses of the pod's interface in the result that a request came with.
func addressesIn(r cni.Request) (l []netip.Addr) {
	for _, ip := range prevIPs(r) {
		if isOf(r.Prev, ip, r.Interface) {
			l = append(l, ip.Address.Addr().Unmap())
		}
	}
	return l
}

// isOf reports whether an address of a result is one of the pod's interface, or of no interface by name.
func isOf(r *cni.Result, ip cni.IP, name string) bool {
	if ip.Interface == nil || *ip.Interface < 0 || *ip.Interface >= len(r.Interfaces) {
		return true
	}
	i := r.Interfaces[*ip.Interface]
	return i.Sandbox != "" && i.Name == name
}

// deviceIn returns the only device of the node in a result that is one of these ends of pairs, "" where there are none
// or several: a bridge is in results, too.
func deviceIn(r *cni.Result, ends map[string]bool) (name string) {
	for _, i := range r.Interfaces {
		if i.Sandbox != "" || !ends[i.Name] {
			continue
		}
		if name != "" {
			return ""
		}
		name = i.Name
	}
	return name
}

// stands returns why what another plugin made of an attachment isn't there as a result says; nil: it is.
func (s *Server) stands(a *model.Attachment, r cni.Request) error {
	if now := addressesIn(r); !slices.Equal(now, a.Addresses) {
		return cni.Errorf(cni.CodeCheck, "the interface has addresses %v, and had %v when it was added", now, a.Addresses)
	}
	devices, err := s.devices()
	if err == nil && a.Device != "" && !devices[a.Device] {
		err = cni.Errorf(cni.CodeCheck, "device %s of the pod is gone: recreate the pod", a.Device)
	}
	return err
}

// inForce returns what else than its attachment a pod needs and the kernel lacks.
func (s *Server) inForce(ctx context.Context, a *model.Attachment) error {
	if s.options.Pods == nil {
		return nil
	}
	if err := s.options.Pods.Check(ctx, a); err != nil {
		return cni.Errorf(cni.CodeCheck, "%s", err)
	}
	return nil
}
