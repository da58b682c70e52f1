package attach

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
)

// held is what pods need, which takes until it is let go.
type held struct {
	came   chan *model.Attachment
	letGo  chan struct{}
	lacks  atomic.Pointer[string] // what Check returns
	exempt atomic.Bool            // nothing is held
}

// Attach implements Pods.
func (h *held) Attach(ctx context.Context, a *model.Attachment, _ bool) error {
	if h.exempt.Load() {
		return nil
	}
	h.came <- a
	select {
	case <-h.letGo:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Check implements Pods.
func (h *held) Check(context.Context, *model.Attachment) error {
	if why := h.lacks.Load(); why != nil {
		return errors.New(*why)
	}
	return nil
}

// Detach implements Pods.
func (h *held) Detach(*model.Attachment) {}

// nothing is the line of an agent that connects no pod.
type nothing struct{}

func (nothing) Change(_, _ []model.NetworkPart)              {}
func (nothing) Sync(context.Context) error                   { return nil }
func (nothing) SyncOwner(context.Context, model.Owner) error { return nil }

// buildOthers builds the CNI project's plugins bridge, ptp and host-local beside fairlead-cni.
func buildOthers(t *testing.T) {
	t.Helper()
	const module = "github.com/containernetworking/plugins/plugins/"
	build := exec.Command("go", "build", "-trimpath", "-o", plugin+"/", module+"main/bridge", module+"main/ptp",
		module+"ipam/host-local")
	build.Dir = "../../../test/cluster/cni-plugins"
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the plugins to be chained to: %v: %s", err, out)
	}
}

// otherList is another plugin's network configuration: its version, the plugin, and the folder of addresses.
const otherList = `{"cniVersion":%q,"name":"podnet","disableCheck":false,"plugins":[{"type":%q,"bridge":"cni0",
	"isGateway":true,"ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":"10.55.0.0/24"}]],
	"routes":[{"dst":"0.0.0.0/0"}]}}]}`

// chain writes another plugin's configuration, has ours made of it, and returns that as a runtime reads it.
func (n *node) chain(version, other string) *libcni.NetworkConfigList {
	n.Helper()
	theirs := fmt.Appendf(nil, otherList, version, other, filepath.Join(n.folder, "host-local"))
	n.must(os.WriteFile(filepath.Join(n.folder, "10-other.conflist"), theirs, 0o600))
	n.must(WriteChained(n.folder, filepath.Join(n.folder, "cni.sock"), filepath.Join(n.folder, "records")))
	files, err := libcni.ConfFiles(n.folder, []string{".conf", ".conflist", ".json"})
	n.must(err)
	slices.Sort(files)
	l, err := libcni.ConfListFromFile(files[0])
	n.must(err)
	return l
}

// TestChainedBehindOthers has the CNI project's bridge and ptp connect pods, and the agent behind them.
func TestChainedBehindOthers(t *testing.T) {
	buildOthers(t)
	pods := &held{came: make(chan *model.Attachment), letGo: make(chan struct{})}
	n := newChained(t, pods)
	for _, other := range [][2]string{{"0.3.1", "bridge"}, {"1.0.0", "bridge"}, {"1.0.0", "ptp"}} {
		l := n.chain(other[0], other[1])
		p := n.newPod("web-" + other[1] + strings.ReplaceAll(other[0], ".", "-"))
		added := make(chan error, 1)
		go func() { added <- n.addTo(l, p) }()
		var a *model.Attachment
		select {
		case a = <-pods.came:
		case err := <-added:
			t.Fatalf("ADD has not come to the agent: %v", err)
		}
		select {
		case err := <-added:
			t.Errorf("ADD has returned before all that the pod needs was there: %v", err)
		default:
		}
		pods.letGo <- struct{}{}
		n.must(<-added)
		ends := []string{"link", "show", "master", "cni0"}
		if other[1] == "ptp" {
			ends = []string{"route", "show", p.addresses[0].String()}
		}
		out, err := exec.Command("ip", append([]string{"-n", n.ns.Name}, ends...)...).CombinedOutput()
		n.must(err)
		if !slices.Equal(a.Addresses, p.addresses) || a.Device == "" || !strings.Contains(string(out), a.Device) ||
			a.Pod != "shop/"+strings.TrimPrefix(p.conf.ContainerID, "c-") {
			t.Errorf("told of %+v, and the pod has %v; %s", a, p.addresses, out)
		}
		n.serve(p.ns)
		if _, err := n.request(n.ns, p.addresses[0]); err != nil {
			t.Error(err)
		}
		n.kill()
		n.start("boot 1")
		if l := n.agent.server.Attached(); len(l) != 1 || !reflect.DeepEqual(l[0], a) {
			t.Errorf("a new agent knows %+v, not %+v", l, a)
		}
		n.must(n.do(func() error { return n.cni.DelNetworkList(t.Context(), l, p.conf) }))
		n.nothingLeft()
	}
}

// nothingLeft checks that no pod is known, and that neither plugin has an address of one.
func (n *node) nothingLeft() {
	n.Helper()
	for _, pattern := range []string{"records/attachment-*", "host-local/podnet/10.*"} {
		if l, err := filepath.Glob(filepath.Join(n.folder, pattern)); err != nil || len(l) > 0 {
			n.Errorf("left: %v, %v", l, err)
		}
	}
	if n.agent != nil && len(n.agent.server.Attached()) > 0 {
		n.Errorf("left: %v", n.agent.server.Attached())
	}
}

// TestChainedPodsGo has pods checked, deleted without the agent, and gone without a DEL.
func TestChainedPodsGo(t *testing.T) {
	buildOthers(t)
	pods := &held{}
	pods.exempt.Store(true)
	n := newChained(t, pods)
	l := n.chain("1.0.0", "bridge")
	p := n.newPod("web")
	n.must(n.addTo(l, p))
	check := func() error {
		return n.do(func() error { return n.cni.CheckNetworkList(t.Context(), l, p.conf) })
	}
	n.must(check())
	why := "its policies are not in force"
	pods.lacks.Store(&why)
	if err := check(); err == nil || !strings.Contains(err.Error(), why) {
		t.Errorf("CHECK: %v", err)
	}
	n.kill()
	n.must(n.do(func() error { return n.cni.DelNetworkList(t.Context(), l, p.conf) }))
	n.nothingLeft()
	n.start("boot 1")

	var e *types.Error
	if err := n.add("1.0.0", p); !errors.As(err, &e) || e.Code != cni.CodeConfig {
		t.Errorf("ADD without another plugin: %v", err)
	}
	ns, err := netns.New(fmt.Sprintf("flchain%d", os.Getpid()))
	n.must(err)
	gone := &pod{ns: ns, conf: &libcni.RuntimeConf{ContainerID: "c-gone", NetNS: filepath.Join(netns.Dir, ns.Name),
		IfName: "eth0"}}
	n.must(n.addTo(l, gone))
	n.must(errors.Join(ns.Close(), netns.Delete(ns.Name)))
	for begin := time.Now(); len(n.agent.server.Attached()) > 0; {
		if time.Since(begin) > 10*time.Second {
			t.Fatalf("left: %v", n.agent.server.Attached())
		}
	}

	own := newNode(t)
	own.must(os.MkdirAll(filepath.Join(own.folder, "host-local"), 0o755))
	if err := own.addTo(own.chain("1.0.0", "bridge"), own.newPod("web")); !errors.As(err, &e) || e.Code != cni.CodeConfig {
		t.Errorf("ADD behind another plugin by an agent that connects pods itself: %v", err)
	}
}

// TestChainedList has the other plugin's configuration changed, removed, and left as it was in the end.
func TestChainedList(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	chained := func() error { return WriteChained(folder, "/run/s", "/run/r") }
	plugins := func() (l []map[string]any) {
		b, err := os.ReadFile(filepath.Join(folder, ChainedFile))
		var list struct{ Plugins []map[string]any }
		if err = errors.Join(err, json.Unmarshal(b, &list)); err != nil {
			t.Fatal(err)
		}
		return list.Plugins
	}
	if err := chained(); !errors.Is(err, errNoList) {
		t.Errorf("nothing to be chained to: %v", err)
	}
	const theirs = `{"cniVersion":"0.3.1","name":"x","plugins":[{"type":"ptp","mtu":1400},
		{"type":"portmap","capabilities":{"portMappings":true}}],"more":[1]}`
	write("20-x.conflist", theirs)
	write("10-fairlead.conflist", `{"cniVersion":"1.0.0","name":"fairlead","plugins":[{"type":"fairlead-cni"}]}`)
	if err := chained(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(folder, ConfigFile)); err == nil {
		t.Error("the list of network.mode Own is still there")
	}
	l := plugins()
	if len(l) != 3 || l[0]["mtu"] != 1400. || l[2]["type"] != cni.PluginName || l[2]["capabilities"] != nil ||
		l[2]["socket"] != "/run/s" || l[2]["records"] != "/run/r" || !MapsPorts(folder) {
		t.Errorf("%v", l)
	}
	b, _ := os.ReadFile(filepath.Join(folder, ChainedFile))
	if !bytes.Contains(b, []byte(`"more"`)) || !bytes.Contains(b, []byte(`"0.3.1"`)) {
		t.Errorf("%s", b)
	}
	write("10-y.conf", `{"cniVersion":"1.0.0","name":"y","type":"bridge"}`)
	if err := chained(); err != nil {
		t.Fatal(err)
	}
	if l := plugins(); len(l) != 2 || l[0]["type"] != "bridge" || l[1]["capabilities"] == nil || MapsPorts(folder) {
		t.Errorf("%v", l)
	}
	for name, c := range map[string][2]string{
		"not JSON":    {"05-z.conflist", "{"},
		"no name":     {"05-z.conflist", `{"cniVersion":"1.0.0","plugins":[{"type":"x"}]}`},
		"no plugin":   {"05-z.conflist", `{"cniVersion":"1.0.0","name":"z","plugins":[]}`},
		"old version": {"05-z.conflist", `{"cniVersion":"0.2.0","name":"z","plugins":[{"type":"x"}]}`},
		"too early":   {"01-a.conflist", `{"cniVersion":"1.0.0","name":"z","plugins":[{"type":"x"}]}`},
	} {
		write(c[0], c[1])
		if err := chained(); err == nil || !strings.Contains(err.Error(), c[0]) {
			t.Errorf("%s: %v", name, err)
		}
		os.Remove(filepath.Join(folder, c[0]))
	}
	for _, name := range []string{"10-y.conf", "20-x.conflist"} {
		os.Rename(filepath.Join(folder, name), filepath.Join(folder, name+".off"))
	}
	if err := chained(); err == nil || len(plugins()) != 2 {
		t.Errorf("the other plugin's configuration is gone: %v; ours must stay", err)
	}
	os.Rename(filepath.Join(folder, "20-x.conflist.off"), filepath.Join(folder, "20-x.conflist"))
	if err := errors.Join(RemoveConfig(folder), RemoveConfig(folder)); err != nil {
		t.Error(err)
	}
	entries, _ := os.ReadDir(folder)
	b, err := os.ReadFile(filepath.Join(folder, "20-x.conflist"))
	if err != nil || string(b) != theirs || len(entries) != 2 {
		t.Errorf("left: %v, %s", entries, b)
	}
}

func TestDeviceOfAResult(t *testing.T) {
	ends := map[string]bool{"veth1": true, "veth2": true}
	for text, want := range map[string]string{
		`[]`: "",
		`[{"name":"cni0"},{"name":"veth1"},{"name":"eth0","sandbox":"/x"}]`:  "veth1",
		`[{"name":"veth1"},{"name":"veth2"},{"name":"eth0","sandbox":"/x"}]`: "",
		`[{"name":"eth0"},{"name":"veth1","sandbox":"/x"}]`:                  "",
	} {
		r := &cni.Result{IPs: []cni.IP{{Address: netip.MustParsePrefix("10.0.0.1/24")}}}
		if err := json.Unmarshal([]byte(text), &r.Interfaces); err != nil {
			t.Fatal(err)
		}
		if got := deviceIn(r, ends); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}

// FuzzLists has a list be as it was but for our plugin, which is behind all others once.
func FuzzLists(f *testing.F) {
	f.Add([]byte(fmt.Sprintf(otherList, "1.0.0", "bridge", "/x")))
	f.Add([]byte(`{"cniVersion":"1.0.0","name":"y","type":"bridge"}`))
	f.Add([]byte(`{"cniVersion":"0.4.0","name":"y","Plugins":[{}],"plugins":[{"type":"portmap","x":1e400},{"Type":"a","type":null}],
		"disableCheck":true,"n":12345678901234567890}`))
	f.Add([]byte(`{"cniVersion":"1.1.0","name":"y","type":"fairlead-cni","plugins":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := parseList(b)
		if err != nil {
			return
		}
		ours := entry{Type: cni.PluginName, Socket: "/s", Records: "/r"}
		out, err := l.with(ours)
		if err != nil {
			return
		}
		again, err := parseList(out)
		if err != nil || !slices.Equal(again.types, append(slices.Clone(l.types), cni.PluginName)) {
			t.Fatalf("%s: %v, %v", out, again, err)
		}
		was, is := decoded(t, l.fields), decoded(t, again.fields)
		for k, v := range was {
			if k != "plugins" && !reflect.DeepEqual(v, is[k]) {
				t.Errorf("field %q is %v, was %v", k, is[k], v)
			}
		}
		plugins := is["plugins"].([]any)
		if n := len(plugins) - 1; len(was) != len(is) || !reflect.DeepEqual(plugins[:n], was["plugins"]) {
			t.Errorf("%s of %s", out, b)
		}
		var added entry
		last, err := json.Marshal(plugins[len(plugins)-1])
		if err = errors.Join(err, json.Unmarshal(last, &added)); err != nil || added.Socket != ours.Socket ||
			added.Capabilities["portMappings"] == slices.Contains(l.types, "portmap") {
			t.Errorf("%s, %v", last, err)
		}
	})
}

// decoded returns the values of fields, with numbers as they are written.
func decoded(t *testing.T, fields map[string]json.RawMessage) map[string]any {
	t.Helper()
	all := map[string]any{}
	for k, b := range fields {
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		var v any
		if err := d.Decode(&v); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		all[k] = v
	}
	return all
}

// FuzzResults has a pod have those addresses of a result that are its interface's or no interface's, and the one device
// of the node that is there.
func FuzzResults(f *testing.F) {
	f.Add([]byte(`{"interfaces":[{"name":"cni0"},{"name":"veth1"},{"name":"eth0","sandbox":"/x"}],
		"ips":[{"address":"10.0.0.1/24","interface":2},{"address":"fd00::1/64"},{"address":"10.0.0.2/24","interface":1}]}`),
		"eth0", "veth1")
	f.Add([]byte(`{"ips":[{"address":"::ffff:10.0.0.1/120","interface":-1},{"address":"10.0.0.1/24","interface":7}]}`), "", "")
	f.Fuzz(func(t *testing.T, b []byte, name, end string) {
		var prev cni.Result
		if json.Unmarshal(b, &prev) != nil {
			return
		}
		got := addressesIn(cni.Request{Attachment: cni.Attachment{Interface: name}, Prev: &prev})
		most, others := 0, 0
		for _, ip := range prev.IPs {
			known := ip.Interface != nil && *ip.Interface >= 0 && *ip.Interface < len(prev.Interfaces)
			if known && (prev.Interfaces[*ip.Interface].Name != name || prev.Interfaces[*ip.Interface].Sandbox == "") {
				others++
				continue
			}
			if most++; !slices.Contains(got, ip.Address.Addr().Unmap()) {
				t.Errorf("%+v is not among %v", ip, got)
			}
		}
		if len(got) != most || most+others != len(prev.IPs) {
			t.Errorf("%d addresses of %d, %d are others'", len(got), len(prev.IPs), others)
		}
		n := 0
		for _, i := range prev.Interfaces {
			if i.Sandbox == "" && i.Name == end && end != "" {
				n++
			}
		}
		if device := deviceIn(&prev, map[string]bool{end: true}); device != "" && (device != end || n != 1) {
			t.Errorf("device %q, %d of the node are %q", device, n, end)
		}
	})
}

// TestDeleteEndsAnAdd has a DEL come while its ADD waits for what the pod needs.
func TestDeleteEndsAnAdd(t *testing.T) {
	pods := &held{came: make(chan *model.Attachment), letGo: make(chan struct{})}
	n := newChained(t, pods)
	p := n.newPod("web")
	ns, err := os.Open(p.conf.NetNS)
	n.must(err)
	defer ns.Close()
	r := cni.Request{Command: cni.Add, Network: "x", NetNS: p.conf.NetNS, Prev: &cni.Result{},
		Attachment: cni.Attachment{Container: "c-1", Interface: "eth0"}, Pod: "shop/web"}
	socket := filepath.Join(n.folder, "cni.sock")
	added := make(chan *cni.Error, 1)
	go func() {
		out, err := cni.Send(socket, r, ns, 0)
		if err != nil {
			t.Error(err)
			out = &cni.Response{}
		}
		added <- out.Error
	}()
	select {
	case <-pods.came:
	case e := <-added:
		t.Fatalf("ADD has not come to what the pod needs: %v", e)
	}
	end := r // which the goroutine may still read
	end.Command = cni.Del
	if out, err := cni.Send(socket, end, nil, 0); err != nil || out.Error != nil {
		t.Errorf("DEL: %+v, %v", out, err)
	}
	if e := <-added; e == nil || e.Code != cni.CodeTryAgain {
		t.Errorf("ADD: %v", e)
	}
	n.nothingLeft()
}

// TestFirstConfigurationIsNamed has other networks' files come and go beside ours.
func TestFirstConfigurationIsNamed(t *testing.T) {
	folder := t.TempDir()
	for _, c := range []struct{ name, text, says string }{
		{"05-cilium.conflist", `{"plugins":[{"type":"cilium-cni"}]}`, "05-cilium.conflist"},
		{"00-multus.conf", `{"type":"multus","delegates":[{"type":"bridge"}]}`, "00-multus.conf"},
		{"00-multus.conf", `{"type":"multus","kubeconfig":"/fairlead-cni","delegates":[{"type":"bridge"}]}`, "00-multus.conf"},
		{"00-multus.conf", `{"type":"multus","delegates":[{"plugins":[{"type":"fairlead-cni"}]}]}`, ""},
		{"00-multus.conf", `{"type":"multus","delegates":[{"plugins":[{"type":"multus","delegates":[{"type":"bridge"}]},
			{"type":"fairlead-cni"}]}]}`, "00-multus.conf"}, // Multus behind itself
		{"00-multus.conf", `{"type":"multus","delegates":[{"plugins":[{"type":"bridge"},{"type":"fairlead-cni"}]}]}`,
			"00-multus.conf"}, // of mode Chained
		{"00-multus.conf", `{"type":"multus-shim","clusterNetwork":"/host/net.d/05-cilium.conflist"}`, "00-multus.conf"},
		{"00-multus.conf", `{"type":"multus-shim","clusterNetwork":"/host/net.d/00-multus.conf"}`, "00-multus.conf"},
		{"00-multus.conf", `{"type":"multus-shim","clusterNetwork":"/host/net.d/10-fairlead.conflist"}`, ""},
		{"10-flannel.conflist", `{"plugins":[{"type":"flannel"}]}`, ""}, // behind ours
		{"05-notes.txt", "x", ""},
	} {
		if err := os.WriteFile(filepath.Join(folder, c.name), []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		err := WriteConfig(folder, "/run/s", "/run/r")
		if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("beside %s: %v", c.name, err)
		}
		if _, err := os.Stat(filepath.Join(folder, ConfigFile)); err != nil {
			t.Errorf("beside %s: %v", c.name, err)
		}
		if err := os.Remove(filepath.Join(folder, c.name)); err != nil {
			t.Fatal(err)
		}
		if err := WriteConfig(folder, "/run/s", "/run/r"); err != nil {
			t.Errorf("without %s: %v", c.name, err)
		}
	}
}

// startMultus writes Multus' configuration as its pod does at its start: the first of the others' is its delegate.
func startMultus(t *testing.T, folder, file string) {
	t.Helper()
	files, err := libcni.ConfFiles(folder, []string{".conf", ".conflist"}) // sorted
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if strings.HasPrefix(filepath.Base(f), "00-multus.conf") {
			continue
		}
		b, err := os.ReadFile(f)
		multus := fmt.Sprintf(`{"type":"multus","delegates":[%s]}`, b)
		text := fmt.Sprintf(`{"cniVersion":"0.3.1","name":"multus-cni-network",%s`, multus[1:])
		if strings.HasSuffix(file, "list") {
			text = fmt.Sprintf(`{"cniVersion":"0.3.1","name":"multus-cni-network","plugins":[%s]}`, multus)
		}
		if err = errors.Join(err, os.WriteFile(filepath.Join(folder, file), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Fatal("nothing to delegate to")
}

// TestBesideMultus has Multus and the agent start again and again, in either order: a pod has each plugin called once,
// by files that don't grow.
func TestBesideMultus(t *testing.T) {
	const flannel = `{"cniVersion":"0.3.1","name":"cbr0","plugins":[{"type":"flannel","delegate":{"isDefaultGateway":true}},
		{"type":"portmap","capabilities":{"portMappings":true}}]}`
	for name, c := range map[string]struct {
		multus string // its file
		write  func(folder string) error
		calls  []string
	}{
		"chained": {"00-multus.conf", chained, []string{"multus", "flannel", "portmap", "fairlead-cni"}},
		"a list":  {"00-multus.conflist", chained, []string{"multus", "flannel", "portmap", "fairlead-cni"}},
		"own": {"00-multus.conf", func(folder string) error {
			os.Remove(filepath.Join(folder, "10-flannel.conflist"))
			return WriteConfig(folder, "/run/s", "/run/r")
		}, []string{"multus", "fairlead-cni"}},
	} {
		folder := t.TempDir()
		err := os.WriteFile(filepath.Join(folder, "10-flannel.conflist"), []byte(flannel), 0o600)
		if err != nil {
			t.Fatal(err)
		}
		startMultus(t, folder, c.multus)
		if err := c.write(folder); err == nil || !strings.Contains(err.Error(), c.multus) {
			t.Errorf("%s: Multus has another delegate: %v", name, err)
		}
		var first map[string]string
		for range 3 {
			startMultus(t, folder, c.multus)
			if err := c.write(folder); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			_, calls, err := First(folder)
			if err != nil || !slices.Equal(calls, c.calls) {
				t.Errorf("%s: a pod has called %v, %v", name, calls, err)
			}
			now := contents(t, folder)
			if first == nil {
				first = now
			}
			if !reflect.DeepEqual(now, first) {
				t.Errorf("%s: files changed: %v", name, now)
			}
		}
	}
}

func chained(folder string) error { return WriteChained(folder, "/run/s", "/run/r") }

// contents returns the files of a folder.
func contents(t *testing.T, folder string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(folder)
	all := map[string]string{}
	for _, e := range entries {
		b, failed := os.ReadFile(filepath.Join(folder, e.Name()))
		all[e.Name()], err = string(b), errors.Join(err, failed)
	}
	if err != nil {
		t.Fatal(err)
	}
	return all
}
