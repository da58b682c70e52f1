package config

import (
	"cmp"
	"errors"
	"net/netip"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/network"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// NetworkMode returns who connects pods.
type NetworkMode string

// The choices.
const (
	NetworkNone    NetworkMode = "None"    // another plugin
	NetworkOwn     NetworkMode = "Own"     // this agent
	NetworkChained NetworkMode = "Chained" // another plugin, and the runtime calls this agent behind it
)

// Encapsulation is how the overlay encapsulates packets.
type Encapsulation string

// The choices.
const (
	VXLAN Encapsulation = "VXLAN"
	IPIP  Encapsulation = "IPIP"
)

// DefaultCNIFolder is where container runtimes look for network configurations.
const DefaultCNIFolder = "/etc/cni/net.d"

// DefaultRunFolder is where an agent has its sockets for the CNI plugin and for commands, and the records of pods'
// addresses.
const DefaultRunFolder = "/run/fairlead"

// EnvRunFolder is the environment variable with another default of network.runFolder.
const EnvRunFolder = "FAIRLEAD_RUN_FOLDER"

// Network reports whether the agent connects pods.
func (c *Config) Network() bool { return c.Own.Network.Mode == NetworkOwn }

// Attaches reports whether the container runtime calls the agent for each pod.
func (c *Config) Attaches() bool { return c.Network() || c.Own.Network.Mode == NetworkChained }

// PodDevice returns how the agent connects pods, Veth where it doesn't.
func (c *Config) PodDevice() model.DeviceKind {
	if !c.Network() {
		return model.Veth
	}
	return model.DeviceKindOf(c.Own.Network.Device)
}

// ResolveNetwork returns what the resolver of the pod network is told, beside what that of Services is told.
func (c *Config) ResolveNetwork(services resolve.Config) network.Config {
	n := c.Own.Network
	o := network.Config{Node: services.Node, Overlay: n.Overlay, VNI: n.VNI, Port: n.Port, Uplink: n.Uplink, MTU: n.MTU,
		Device: model.DeviceKindOf(n.Device), DirectReturn: services.DirectServerReturn}
	if n.Encapsulation == IPIP {
		o.Tunnel = model.IPIP
	}
	o.Masquerade.Off = n.Masquerade == MasqueradeNone
	for _, text := range n.ServiceCIDRs {
		if r, err := netip.ParsePrefix(strings.TrimSpace(text)); err == nil { // validated
			o.ServiceCIDRs = append(o.ServiceCIDRs, r.Masked())
		}
	}
	for _, text := range n.AllowedSources {
		if g, err := grantOf(text); err == nil { // validated
			o.AllowedSources = append(o.AllowedSources, g)
		}
	}
	return o
}

// overlayPort returns the UDP port of the pod network's overlay, 0 where it has none.
func (c *Config) overlayPort() uint16 {
	if n := c.Own.Network; c.Network() && n.Overlay != network.Never && n.Encapsulation != IPIP {
		return cmp.Or(n.Port, network.DefaultPort)
	}
	return 0
}

// grantOf reads an entry of network.allowedSources.
func grantOf(text string) (g network.Grant, err error) {
	namespace, r, ok := strings.Cut(strings.TrimSpace(text), "=")
	if !ok || namespace == "" {
		return g, errors.New("must be NAMESPACE=RANGE, such as vpn=203.0.113.0/24")
	}
	g.Namespace = namespace
	if g.Range, err = network.ParseRange(r); err != nil {
		err = errors.New("must be NAMESPACE=RANGE, such as vpn=203.0.113.0/24: " + err.Error())
	}
	return g, err
}

// The values of network.masquerade that name no file.
const (
	MasqueradeCluster = "Cluster"
	MasqueradeNone    = "None"
)

// MasqueradeFile returns the path of the file with ranges that see pods' own addresses, "" for none.
func (c *Config) MasqueradeFile() string {
	if m := c.Own.Network.Masquerade; m != MasqueradeCluster && m != MasqueradeNone {
		return m
	}
	return ""
}

// network checks the settings of the pod network.
func (k *checks) network(c *NetworkConfiguration) {
	at := field.NewPath("network")
	k.oneOf(at.Child("mode"), string(c.Mode), string(NetworkNone), string(NetworkOwn),
		string(NetworkChained))
	k.oneOf(at.Child("overlay"), string(c.Overlay), string(network.Subnets), string(network.Always),
		string(network.Never))
	k.oneOf(at.Child("encapsulation"), string(c.Encapsulation), string(VXLAN), string(IPIP))
	k.oneOf(at.Child("device"), c.Device, model.DeviceKinds()...)
	if model.DeviceKindOf(c.Device).IPVLAN() && c.Overlay != network.Never {
		k.errs = append(k.errs, field.Invalid(at.Child("overlay"), c.Overlay, "must be Never with network.device "+c.Device+
			": its packets leave by the uplink alone, past the overlay"))
	}
	if m := c.Masquerade; m != "" && m != MasqueradeCluster && m != MasqueradeNone && !filepath.IsAbs(m) {
		k.errs = append(k.errs, field.Invalid(at.Child("masquerade"), m,
			"must be Cluster, None or the absolute path of a file"))
	}
	if c.VNI >= 1<<24 {
		k.errs = append(k.errs, field.Invalid(at.Child("vni"), c.VNI, "must be below 16777216"))
	}
	if c.MTU != 0 && (c.MTU < 576 || c.MTU > 65535) {
		k.errs = append(k.errs, field.Invalid(at.Child("mtu"), c.MTU, "must be from 576 to 65535, or unset"))
	}
	for i, text := range c.AllowedSources {
		if _, err := grantOf(text); err != nil {
			k.errs = append(k.errs, field.Invalid(at.Child("allowedSources").Index(i), text, err.Error()))
		}
	}
	for i, text := range c.ServiceCIDRs {
		if _, err := netip.ParsePrefix(strings.TrimSpace(text)); err != nil {
			k.errs = append(k.errs, field.Invalid(at.Child("serviceCIDRs").Index(i), text, "must be a range such as "+
				"10.96.0.0/12"))
		}
	}
}
