package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/generate"
)

const nodeName = "a" // as generate calls it

// program is the path of one that the Makefile built.
func program(t testing.TB, variable string) string {
	t.Helper()
	path := os.Getenv(variable)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%s must be the path of a program: %v: run `make -C test/kubeproxy test`, which builds it", variable, err)
	}
	return path
}

// space makes a network namespace in which one can connect to Services whose endpoints are addresses of its own
// loopback.
func space(t testing.TB) *netns.Namespace {
	t.Helper()
	name := fmt.Sprintf("fl-kp-%d-%d", os.Getpid(), time.Now().UnixNano()%1e9)
	ns, err := netns.New(name)
	check(t, err)
	t.Cleanup(func() { check(t, errors.Join(ns.Close(), netns.Delete(name))) })
	c, err := link.Dial(ns)
	check(t, err)
	defer c.Close()
	const lo = 1
	check(t, c.Up(lo))
	for _, a := range addresses {
		check(t, c.AddAddress(lo, netip.PrefixFrom(a, 32)))
	}
	check(t, route.PutIn(ns, route.Route{To: netip.MustParsePrefix("10.0.0.0/8"), Dev: lo, Source: addresses[0]}))
	return ns
}

// addresses of a space: the client's, and the two places of a probe's endpoint.
var addresses = []netip.Addr{netip.MustParseAddr("10.64.0.1"), netip.MustParseAddr("10.64.0.2"),
	netip.MustParseAddr("10.64.0.3")}

// probe is a Service beyond those that are generated.
func probe(t testing.TB, ns *netns.Namespace) *kubeproxy.Probe {
	t.Helper()
	service := netip.AddrPortFrom(generate.ServiceAddress(100_000), 80)
	p, err := kubeproxy.NewProbe(ns, ns, service, [2]netip.AddrPort{netip.AddrPortFrom(addresses[1], 8080),
		netip.AddrPortFrom(addresses[2], 8080)})
	check(t, err)
	t.Cleanup(func() { check(t, p.Close()) })
	return p
}

// serveAt serves at an address of the namespace until told to stop.
func serveAt(t testing.TB, ns *netns.Namespace, s *apiserver.Server, address string) (at string, stop func()) {
	t.Helper()
	url, end, err := s.Start(ns, address)
	check(t, err)
	return strings.TrimPrefix(url, "http://"), func() { check(t, end()) }
}

// patience is how long anything may take.
func patience(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func check(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// options are for a kube-proxy in a space.
func options(t testing.TB, ns *netns.Namespace, mode kubeproxy.Mode, variant kubeproxy.Variant) kubeproxy.Options {
	return kubeproxy.Options{Binary: program(t, "KUBE_PROXY"), Mode: mode, Variant: variant, Namespace: ns, Node: nodeName,
		Dir: filepath.Join(t.TempDir(), "kube-proxy")}
}
