package experiment

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// KubeProxyArm is a mode of a real kube-proxy as an arm.
type KubeProxyArm struct {
	ID      string
	Mode    kubeproxy.Mode
	Variant kubeproxy.Variant
	style   int
	text    string
}

// The arms of a real kube-proxy.
const (
	ArmKubeProxyIPTables = "kube-proxy-iptables"
	ArmKubeProxyNFTables = "kube-proxy-nftables"
)

// KubeProxyArms are the modes in which a kube-proxy is measured.
var KubeProxyArms = []KubeProxyArm{
	{ArmKubeProxyIPTables, kubeproxy.IPTables, kubeproxy.Legacy, 9,
		"the kube-proxy that was given, in mode iptables, through iptables-legacy; told by an API server of the lab's"},
	{ArmKubeProxyNFTables, kubeproxy.NFTables, kubeproxy.Found, 10,
		"the kube-proxy that was given, in mode nftables; told by an API server of the lab's"},
}

// Arm returns it as a design has it.
func (a KubeProxyArm) Arm() result.Arm {
	return result.Arm{ID: a.ID, Title: "kube-proxy " + string(a.Mode), Style: a.style, Text: a.text}
}

// NoKubeProxy is what a report says where no kube-proxy was given.
const NoKubeProxy = "kube-proxy itself: none was given. --subject kube-proxy=PATH takes one; `make -C test/kubeproxy " +
	"build` builds one and says where."

// program is one of others, which a run may be given, and the command that builds it.
type program struct{ Name, build string }

// The programs of others that a run may be given.
var (
	KubeProxyProgram    = program{"kube-proxy", "make -C test/kubeproxy build"}
	KubeRouterProgram   = program{"kube-router", "make -C test/kubeproxy kube-router"}
	ControlPlaneProgram = program{"control-plane", "make -C test/cluster build"}
	BridgeProgram       = program{"bridge", CNIBuild}
	PTPProgram          = program{"ptp", CNIBuild}
	FairleadCNIProgram  = program{"fairlead-cni", "make build"} // ours, from another folder
)

// CNIBuild is the command that builds plugins of the CNI project in Go's folder of programs.
const CNIBuild = "go install github.com/containernetworking/plugins/plugins/{main/bridge,main/ptp,ipam/host-local}" +
	"@v1.10.0"

// Programs reads the subjects, such as kube-proxy=PATH, of which each may be given once, and returns absolute paths by
// name.
func (o Options) Programs(known ...program) (map[string]string, error) {
	paths := map[string]string{}
	for _, s := range o.Subjects {
		name, path, _ := strings.Cut(s, "=")
		i := slices.IndexFunc(known, func(p program) bool { return p.Name == name })
		switch {
		case i < 0 || path == "":
			return nil, fmt.Errorf("subject %q: want %s, the path of a program", s, wanted(known))
		case paths[name] != "":
			return nil, fmt.Errorf("subject %q: one %s is given already, and a run takes one", s, name)
		}
		switch info, err := os.Stat(path); {
		case err != nil:
			return nil, fmt.Errorf("subject %q: %w; `%s` builds one and says where", s, err, known[i].build)
		case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
			return nil, fmt.Errorf("subject %q: %s is no program that can be run", s, path)
		}
		abs, err := filepath.Abs(path)
		if err != nil {
			return nil, err
		}
		paths[name] = abs
	}
	return paths, nil
}

// wanted returns "kube-proxy=PATH or control-plane=PATH".
func wanted(known []program) string {
	var l []string
	for _, p := range known {
		l = append(l, p.Name+"=PATH")
	}
	return strings.Join(l, " or ")
}

// KubeProxyPath returns the path of the kube-proxy that was given, "" where none was, once TryKubeProxy succeeded.
func KubeProxyPath(ctx context.Context, b *testbed.Testbed, o Options) (binary string, err error) {
	programs, err := o.Programs(KubeProxyProgram)
	if err != nil {
		return "", err
	}
	return programs[KubeProxyProgram.Name], TryKubeProxy(ctx, b, programs[KubeProxyProgram.Name])
}

// TryKubeProxy runs a kube-proxy, if there is one, in every mode with one Service, each in a pair of its own.
func TryKubeProxy(ctx context.Context, b *testbed.Testbed, binary string) error {
	if binary == "" {
		return nil
	}
	for _, a := range KubeProxyArms {
		if err := tryProxy(ctx, b, binary, a); err != nil {
			return fmt.Errorf("try the subject %s: %w", binary, err)
		}
	}
	return nil
}

func tryProxy(ctx context.Context, b *testbed.Testbed, binary string, a KubeProxyArm) (err error) {
	p, err := testbed.NewPair(ctx, b.Name+"-try-"+a.ID)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	limited, stop := context.WithTimeout(ctx, 30*time.Second)
	defer stop()
	n, _, err := StartKubeProxy(limited, b, binary, a, p, testbed.NewCluster(1).Objects...)
	if err != nil {
		return err
	}
	return n.Close()
}

// StartKubeProxy starts a kube-proxy in a pair's node and waits until its first sync has ended. The caller closes it.
func StartKubeProxy(ctx context.Context, b *testbed.Testbed, binary string, a KubeProxyArm, p *testbed.Pair,
	objects ...source.Object) (*kubeproxy.Node, kubeproxy.Cold, error) {
	return kubeproxy.NewNode(ctx, kubeproxy.Options{Binary: binary, Mode: a.Mode, Variant: a.Variant, Namespace: p.Near,
		Node: testbed.NodeName,
		Dir:  filepath.Join(b.Dir, p.Near.Name)}, objects...)
}

// WithColdSyncTimeout returns a context that limits a cold sync of kube-proxy, which may take minutes beside others.
func WithColdSyncTimeout(ctx context.Context, b *testbed.Testbed, services int) (context.Context, func()) {
	return context.WithTimeout(ctx, b.Within(testbed.Patience)+time.Duration(services)*30*time.Millisecond)
}

// Where a probe's endpoint moves, and the Service that leads there: no other has that address.
var (
	ProbeService   = netip.AddrPortFrom(generate.ServiceAddress(generate.MaxServices-1), 80)
	ProbeEndpoints = [2]netip.AddrPort{netip.AddrPortFrom(testbed.ServerAddr(0), testbed.ServerPort+1),
		netip.AddrPortFrom(testbed.ServerAddr(1), testbed.ServerPort+1)}
)

// Moves is how often a probe's endpoint moves in a round. kube-proxy syncs at most once a second, so it rests before.
const (
	Moves     = 2
	MoveAfter = 1200 * time.Millisecond
)
