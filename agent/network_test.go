package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/network/attach"
	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/network"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// sourceOf is a source of one batch.
type sourceOf []source.Object

func (s sourceOf) Run(ctx context.Context, deliver func(source.Batch)) error {
	var b source.Batch
	for _, o := range s {
		b.Changes = append(b.Changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	deliver(b)
	<-ctx.Done()
	return nil
}

func networkNode(name, address, pods string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: []string{pods}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}}}}
}

// hostPortPod is a Pod that waits to be attached.
var hostPortPod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
	Spec: corev1.PodSpec{NodeName: "a", Containers: []corev1.Container{{Ports: []corev1.ContainerPort{
		{ContainerPort: 80, HostPort: 8080}}}}}}

// TestAgentConnectsPods runs a whole agent, whose node is on a link with another one, and has it attach a pod.
func TestAgentConnectsPods(t *testing.T) {
	pod, wire := netnstest.New(t), netnstest.New(t)
	folder := t.TempDir()
	socket, conf := filepath.Join(folder, "cni.sock"), filepath.Join(folder, "net.d")
	if err := os.Mkdir(conf, 0o755); err != nil {
		t.Fatal(err)
	}
	inNode(t, func(ctx context.Context) error {
		here, err := netns.Current()
		if err != nil {
			return err
		}
		defer here.Close()
		l, err := link.Dial(here)
		if err != nil {
			return err
		}
		defer l.Close()
		dev, err := l.AddVeth(link.End{Name: "eth0"}, link.End{Name: "x"}, wire)
		if err = errors.Join(err, l.AddAddress(dev, netip.MustParsePrefix("192.168.0.1/24"))); err != nil {
			return err
		}
		interfaces, err := link.OpenInterfaces()
		if err != nil {
			return err
		}
		defer interfaces.Close()
		chosen, err := mode.Of("nftables")
		if err != nil {
			return err
		}
		o := Options{Mode: chosen, Log: slog.New(slog.DiscardHandler), Resolve: resolve.Config{Node: "a",
			Objects: resolve.Objects{HostPorts: true}},
			Source: sourceOf{networkNode("a", "192.168.0.1", "10.244.1.0/24"), networkNode("b", "172.16.0.2", "10.244.2.0/24"),
				networkNode("c", "172.16.0.3", "10.244.2.0/25"), hostPortPod},
			Network: &NetworkOptions{Resolve: network.Config{Node: "a"}, Socket: socket, Boot: "x",
				Records: filepath.Join(folder, "records"),
				Follow: func(ctx context.Context, notify func([]network.Device, bool)) error {
					return followInterfaces(ctx, interfaces, notify)
				},
				OnReady: func() error { return attach.WriteConfig(conf, socket, filepath.Join(folder, "records")) }}}
		const overlap = "10.244.2.0/25 overlaps 10.244.2.0/24 of the older Node b"
		problems := make(chan string, 100)
		o.Report = func(l []source.Problem) { problems <- fmt.Sprint(l) }
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		attached := make(chan error, 1)
		go func() {
			err := attachPod(ctx, socket, "c-1", pod)
			if err == nil { // its host port is in force at once, though its Pod has no address yet
				err = here.Do(func() error {
					_, err := echo.Request(ctx, model.TCP, netip.MustParseAddrPort("192.168.0.1:8080"), echo.Options{})
					return err
				})
			}
			if err == nil {
				err = awaitFile(filepath.Join(conf, attach.ConfigFile))
			}
			if err == nil { // another program replaces the folder
				err = errors.Join(os.RemoveAll(conf), os.Mkdir(conf, 0o755),
					awaitFile(filepath.Join(conf, attach.ConfigFile)))
			}
			for text := ""; err == nil && !strings.Contains(text, overlap); {
				select {
				case text = <-problems:
				case <-ctx.Done():
					err = fmt.Errorf("problems: %s", text)
				}
			}
			stop()
			attached <- err
		}()
		if err := Run(ctx, o); err != nil {
			return err
		}
		if err := <-attached; err != nil {
			return err
		}
		_, err = echo.Request(t.Context(), model.TCP, netip.MustParseAddrPort("10.244.1.2:80"), echo.Options{})
		pods, failed := mode.AttachedPods(t.Context())
		if err = errors.Join(err, failed, mode.CleanNetwork(t.Context())); err != nil || pods != 1 {
			return fmt.Errorf("%d pods, %w", pods, err)
		}
		pods, err = mode.AttachedPods(t.Context())
		if err == nil && pods > 0 {
			err = errors.New("clean left a pod's device")
		}
		return errors.Join(err, attach.RemoveConfig(conf), attach.RemoveConfig(conf))
	})
}

// attachPod has a pod attached as the plugin does, and runs a server in it.
func attachPod(ctx context.Context, socket, container string, pod *netns.Namespace) error {
	return attachPodAs(ctx, socket, container, "web", pod)
}

// attachPodAs is attachPod for the Pod of a name.
func attachPodAs(ctx context.Context, socket, container, name string, pod *netns.Namespace) error {
	path := filepath.Join(netns.Dir, pod.Name)
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	r := cni.Request{Command: cni.Add, Network: "fairlead", NetNS: path, Pod: "shop/" + name,
		Attachment: cni.Attachment{Container: container, Interface: "eth0"}, Ports: true}
	for ctx.Err() == nil {
		out, err := cni.Send(socket, r, file, 20*time.Second)
		if err != nil {
			return err
		}
		if out.Error == nil {
			break
		}
		if out.Error.Code != cni.CodeTryAgain {
			return out.Error
		}
	}
	return pod.Do(func() error {
		_, err := echo.Serve("shop/"+name, []echo.Port{{Number: 80, Protocol: model.TCP}}) // ends with the test's process
		return err
	})
}

// awaitFile waits until a file is there.
func awaitFile(name string) error {
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		if _, err := os.Stat(name); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%s is not written", name)
}
