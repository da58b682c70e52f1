package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// run runs the plugin and returns what it printed.
func run(t *testing.T, stdin string, environment ...string) (code int, out string) {
	t.Helper()
	env := map[string]string{}
	for _, e := range environment {
		k, v, _ := strings.Cut(e, "=")
		env[k] = v
	}
	var b strings.Builder
	p := Plugin{Environment: func(k string) string { return env[k] }, Stdin: strings.NewReader(stdin), Stdout: &b,
		AddWait: 200 * time.Millisecond, DelWait: 100 * time.Millisecond}
	code = p.Run()
	return code, strings.TrimSpace(b.String())
}

const absent = `,"socket":"/nonexistent/cni.sock","records":"/nonexistent"`

func TestCallsWithoutAnAgent(t *testing.T) {
	conf := func(version, more string) string {
		return fmt.Sprintf(`{"cniVersion":%q,"name":"n","type":"fairlead-cni"%s}`, version, absent+more)
	}
	pod := []string{"CNI_CONTAINERID=c-1", "CNI_IFNAME=eth0", "CNI_NETNS=/proc/self/ns/net"}
	for name, c := range map[string]struct {
		stdin string
		env   []string
		code  uint // of the error; 0: none
		want  string
	}{
		"VERSION":            {`{"cniVersion":"1.0.0"}`, []string{"CNI_COMMAND=VERSION"}, 0, `"supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]`},
		"VERSION of nothing": {"", []string{"CNI_COMMAND=VERSION"}, 0, `"cniVersion":"1.1.0"`},
		"no command":         {conf("1.1.0", ""), nil, CodeEnvironment, "CNI_COMMAND"},
		"malformed":          {"{", append(pod, "CNI_COMMAND=ADD"), CodeDecode, "standard input"},
		"old version":        {conf("0.2.0", ""), append(pod, "CNI_COMMAND=ADD"), CodeVersion, "0.2.0"},
		"no version":         {`{"name":"n"}`, append(pod, "CNI_COMMAND=DEL"), CodeVersion, "use one of 0.3.1"},
		"no name":            {`{"cniVersion":"1.0.0"}`, append(pod, "CNI_COMMAND=ADD"), CodeConfig, "no name"},
		"no container": {conf("1.0.0", ""), []string{"CNI_COMMAND=ADD", "CNI_IFNAME=eth0", "CNI_NETNS=x"},
			CodeEnvironment, "CNI_CONTAINERID"},
		"a path as container": {conf("1.0.0", ""), []string{"CNI_COMMAND=DEL", "CNI_IFNAME=eth0", "CNI_CONTAINERID=../x"},
			CodeEnvironment, "CNI_CONTAINERID"},
		"no interface": {conf("1.0.0", ""), []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=c", "CNI_NETNS=x"},
			CodeEnvironment, "CNI_IFNAME"},
		"a long interface": {conf("1.0.0", ""), []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=c",
			"CNI_IFNAME=0123456789abcdef"}, CodeEnvironment, "CNI_IFNAME"},
		"no namespace": {conf("1.0.0", ""), []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=c", "CNI_IFNAME=eth0"},
			CodeEnvironment, "CNI_NETNS"},
		"namespace gone": {conf("1.0.0", ""), []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=c", "CNI_IFNAME=eth0",
			"CNI_NETNS=/nonexistent"}, CodeEnvironment, "/nonexistent"},
		"ADD":                    {conf("1.0.0", ""), append(pod, "CNI_COMMAND=ADD"), CodeTryAgain, "doesn't answer"},
		"CHECK":                  {conf("1.0.0", `,"prevResult":{}`), append(pod, "CNI_COMMAND=CHECK"), CodeTryAgain, "doesn't answer"},
		"CHECK without a result": {conf("1.0.0", ""), append(pod, "CNI_COMMAND=CHECK"), CodeConfig, "prevResult"},
		"IPs of one family":      {conf("1.0.0", `,"runtimeConfig":{"ips":["10.0.0.1","10.0.0.2/24"]}`), append(pod, "CNI_COMMAND=ADD"), CodeConfig, "10.0.0.2/24"},
		"a bandwidth too small":  {conf("1.0.0", `,"runtimeConfig":{"bandwidth":{"egressRate":999}}`), append(pod, "CNI_COMMAND=ADD"), CodeConfig, "use at least 1000"},
		"a negative bandwidth":   {conf("1.0.0", `,"runtimeConfig":{"bandwidth":{"ingressRate":-1}}`), append(pod, "CNI_COMMAND=ADD"), CodeDecode, "ingressRate"},
		"an IP that is none":     {conf("1.0.0", `,"runtimeConfig":{"ips":["x"]}`), append(pod, "CNI_COMMAND=ADD"), CodeConfig, "runtimeConfig.ips"},
		"IPs of both families":   {conf("1.0.0", `,"runtimeConfig":{"ips":["10.0.0.1/32","fd00::1"]}`), append(pod, "CNI_COMMAND=ADD"), CodeTryAgain, "doesn't answer"},
		"STATUS":                 {conf("1.1.0", ""), []string{"CNI_COMMAND=STATUS"}, CodeUnavailable, "doesn't answer"},
		"GC":                     {conf("1.1.0", ""), []string{"CNI_COMMAND=GC"}, 0, ""},
		"DEL":                    {conf("1.1.0", ""), append(pod, "CNI_COMMAND=DEL"), 0, ""},
	} {
		code, out := run(t, c.stdin, c.env...)
		var e Error
		if json.Unmarshal([]byte(out), &e); e.Code != c.code || (code != 0) != (c.code != 0) || !strings.Contains(out,
			c.want) ||
			c.code != 0 && e.Version == "" {
			t.Errorf("%s: exit code %d, %s", name, code, out)
		}
	}
}

func TestDeleteWithoutAnAgentDeletesTheRecord(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, RecordFile("c-1/eth0"))
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	code, out := run(t, fmt.Sprintf(`{"cniVersion":"1.1.0","name":"n","socket":"/nonexistent","records":%q}`, folder),
		"CNI_COMMAND=DEL", "CNI_CONTAINERID=c-1", "CNI_IFNAME=eth0")
	if _, err := os.Stat(file); code != 0 || out != "" || err == nil {
		t.Errorf("%d, %s, %v", code, out, err)
	}
}

// serve runs an agent that replies to each request by f.
func serve(t *testing.T, f func(Request, *os.File) (Response, bool)) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "cni.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			r, file, err := Receive(c)
			if err != nil {
				Reply(c, Response{Error: ErrorOf(err)})
			} else if out, replies := f(r, file); replies {
				Reply(c, out)
			}
			file.Close()
			c.Close()
		}
	}()
	return socket
}

func TestAddIsPrintedByVersion(t *testing.T) {
	var calls atomic.Int32
	socket := serve(t, func(r Request, file *os.File) (Response, bool) {
		if calls.Add(1)%2 == 1 {
			return Response{}, false // an agent that ends before it replies
		}
		if r.Pod != "shop/web" || r.Network != "n" || r.Container != "c-1" || r.NetNS != "/proc/self/ns/net" {
			t.Errorf("%+v", r)
		}
		if s, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", file.Fd())); err != nil || !strings.HasPrefix(s, "net:") {
			t.Errorf("the file is %s, %v", s, err)
		}
		var result Result
		json.Unmarshal([]byte(`{"interfaces":[{"name":"eth0","mtu":1450,"sandbox":"x"}],"ips":[{"address":"10.0.0.2/32","interface":0},
			{"address":"fd00::2/128"}],"routes":[{"dst":"0.0.0.0/0","gw":"169.254.1.1"}]}`), &result)
		return Response{Result: &result}, true
	})
	for version, want := range map[string]string{
		"0.3.1": `{"cniVersion":"0.3.1","interfaces":[{"name":"eth0","sandbox":"x"}],"ips":[{"version":"4","address":"10.0.0.2/32","interface":0},{"version":"6","address":"fd00::2/128"}],"routes":[{"dst":"0.0.0.0/0","gw":"169.254.1.1"}]}`,
		"0.4.0": `{"cniVersion":"0.4.0","interfaces":[{"name":"eth0","sandbox":"x"}],"ips":[{"version":"4","address":"10.0.0.2/32","interface":0},{"version":"6","address":"fd00::2/128"}],"routes":[{"dst":"0.0.0.0/0","gw":"169.254.1.1"}]}`,
		"1.0.0": `{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"x"}],"ips":[{"address":"10.0.0.2/32","interface":0},{"address":"fd00::2/128"}],"routes":[{"dst":"0.0.0.0/0","gw":"169.254.1.1"}]}`,
		"1.1.0": `{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","mtu":1450,"sandbox":"x"}],"ips":[{"address":"10.0.0.2/32","interface":0},{"address":"fd00::2/128"}],"routes":[{"dst":"0.0.0.0/0","gw":"169.254.1.1"}]}`,
	} {
		code, out := run(t, fmt.Sprintf(`{"cniVersion":%q,"name":"n","socket":%q}`, version, socket), "CNI_COMMAND=ADD",
			"CNI_CONTAINERID=c-1", "CNI_IFNAME=eth0", "CNI_NETNS=/proc/self/ns/net",
			"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web")
		if code != 0 || out != want {
			t.Errorf("%s: %d, %s", version, code, out)
		}
	}
}

// TestPreviousResultIsPassedOn has the agent return no result of its own behind another plugin.
func TestPreviousResultIsPassedOn(t *testing.T) {
	socket := serve(t, func(r Request, _ *os.File) (Response, bool) {
		if r.Prev == nil || len(r.Prev.IPs) != 1 || r.Prev.IPs[0].Address.String() != "10.0.0.2/24" {
			t.Errorf("%+v", r.Prev)
		}
		return Response{}, true
	})
	const prev = `{"cniVersion":"0.3.1","ips":[{"version":"4","address":"10.0.0.2/24"}],"dns":{"search":["x"]}}`
	environment := []string{"CNI_CONTAINERID=c-1", "CNI_IFNAME=eth0", "CNI_NETNS=/proc/self/ns/net", "CNI_COMMAND=ADD"}
	for more, want := range map[string]string{`,"prevResult":` + prev: prev,
		`,"prevResult":{"ips":[{"address":"x"}]}`: `"msg":"prevResult in the network configuration`} {
		_, out := run(t, fmt.Sprintf(`{"cniVersion":"0.3.1","name":"n","socket":%q%s}`, socket, more), environment...)
		if !strings.Contains(out, want) {
			t.Errorf("%s: %s", more, out)
		}
	}
}

func TestErrorsOfTheAgentAreTheRuntimes(t *testing.T) {
	socket := serve(t, func(Request, *os.File) (Response, bool) {
		return Response{Error: Errorf(CodeLimited, "all addresses are in use")}, true
	})
	code, out := run(t, fmt.Sprintf(`{"cniVersion":"1.1.0","name":"n","socket":%q}`, socket), "CNI_COMMAND=STATUS")
	if want := `{"cniVersion":"1.1.0","code":51,"msg":"all addresses are in use"}`; code != 1 || out != want {
		t.Errorf("%d, %s", code, out)
	}
	if e := ErrorOf(errors.New("x")); e.Code != CodeFailed || e.Error() != "x" {
		t.Errorf("%v", e)
	}
}

// TestNewerPeersAreUnderstood has an agent and a plugin say more than this version knows.
func TestNewerPeersAreUnderstood(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "cni.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		defer c.Close()
		_, file, _ := Receive(c)
		file.Close()
		c.Write([]byte(`{"later":[1],"result":{"later":{},"ips":[{"address":"10.0.0.2/32","later":""}]}}` + "\n"))
	}()
	code, out := run(t, fmt.Sprintf(`{"cniVersion":"1.0.0","name":"n","socket":%q}`, socket), "CNI_COMMAND=ADD",
		"CNI_CONTAINERID=c-1", "CNI_IFNAME=eth0", "CNI_NETNS=/proc/self/ns/net")
	if code != 0 || !strings.Contains(out, "10.0.0.2/32") {
		t.Errorf("a newer agent: %d, %s", code, out)
	}
	socket = serve(t, func(r Request, _ *os.File) (Response, bool) {
		if r.Command != Status {
			t.Errorf("%+v", r)
		}
		return Response{}, true
	})
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.Write([]byte(`{"command":"STATUS","network":"n","later":{"a":1}}` + "\n"))
	var r Response
	if err := json.NewDecoder(c).Decode(&r); err != nil || r.Error != nil {
		t.Errorf("a newer plugin: %+v, %v", r, err)
	}
}

func TestMalformedRequests(t *testing.T) {
	socket := serve(t, func(Request, *os.File) (Response, bool) { return Response{}, true })
	for _, text := range []string{"{\n", "\n", "null", `{"command":1}` + "\n"} {
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		c.Write([]byte(text))
		c.CloseWrite()
		var r Response
		if err := json.NewDecoder(c).Decode(&r); err != nil || r.Error == nil || r.Error.Code != CodeDecode {
			t.Errorf("%q: %+v, %v", text, r, err)
		}
		c.Close()
	}
}

func TestDeviceNames(t *testing.T) {
	if d := Device(Key("c-1", "eth0")); len(d) != 12 || !strings.HasPrefix(d, DevicePrefix) || d == Device(Key("c-1",
		"eth1")) {
		t.Errorf("%s", d)
	}
	if err := deleteDevice("flnonexistent"); err != nil && os.Getuid() == 0 {
		t.Errorf("%v", err)
	}
}

// FuzzCalls has a call that is accepted name an attachment, whose record and device have names of their own, and valid
// addresses; and come to the agent as it was sent, in one line.
func FuzzCalls(f *testing.F) {
	f.Add("ADD", "c", "eth0", "/ns", "K8S_POD_NAME=x;;=", []byte(`{"cniVersion":"1.1.0","name":"n","prevResult":{"ips":[{"address":"x"}]}}`))
	f.Add("GC", "", "", "", "", []byte(`{"cniVersion":"1.1.0","name":"n","cni.dev/valid-attachments":[{"containerID":"a","ifname":"b"}]}`))
	f.Add("CHECK", "c", "eth0", "/ns", "K8S_POD_NAMESPACE=a;K8S_POD_NAME=b", []byte(`{"cniVersion":"0.4.0","name":"n",
		"runtimeConfig":{"ips":["10.0.0.2/24","fd00::2"],"portMappings":[{}]},"prevResult":{"interfaces":[{"name":"eth0",
		"sandbox":"/ns"}],"ips":[{"version":"4","address":"10.0.0.2/32","gateway":"169.254.1.1","interface":0}],
		"routes":[{"dst":"0.0.0.0/0"}]}}`))
	f.Add("ADD", "c", "eth0", "/ns", "", []byte(`{"cniVersion":"1.0.0","name":"n","prevResult":{"ips":[{"address":""}]}}`))
	f.Add("DEL", "..", "a/../b", "", "", []byte(`{"cniVersion":"1.0.0","name":"n\n","records":"/x/../y"}`))
	f.Fuzz(func(t *testing.T, command, container, iface, ns, args string, stdin []byte) {
		c, err := parse(func(k string) string {
			return map[string]string{"CNI_COMMAND": command, "CNI_CONTAINERID": container, "CNI_IFNAME": iface, "CNI_NETNS": ns,
				"CNI_ARGS": args}[k]
		}, stdin)
		if err != nil {
			if ErrorOf(err).Code >= CodeTryAgain {
				t.Errorf("%v", err)
			}
			return
		}
		if command == Add || command == Del || command == Check {
			file := c.record()
			if name := filepath.Base(file); name != RecordFile(Key(container, iface)) || strings.ContainsAny(name, "/\x00") ||
				len(Device(Key(container, iface))) > 15 || strings.Contains(container, "/") || strings.Contains(iface, "/") {
				t.Errorf("record %q of container %q, interface %q", file, container, iface)
			}
		}
		valid(t, c.Request)
		sent, err := json.Marshal(c.Request)
		if err != nil || bytes.ContainsRune(sent, '\n') {
			t.Fatalf("%s: %v", sent, err)
		}
		received(t, sent)
		for _, version := range Versions {
			if c.Prev == nil {
				break
			}
			printed, err := json.Marshal(c.Prev.in(version))
			var again Result
			if err = errors.Join(err, json.Unmarshal(printed, &again)); err != nil || len(again.IPs) != len(c.Prev.IPs) {
				t.Errorf("%s: %v", printed, err)
			}
		}
	})
}

// valid checks the addresses of a request.
func valid(t *testing.T, r Request) {
	t.Helper()
	families := map[bool]bool{}
	for _, a := range r.IPs {
		if !a.IsValid() || a.Zone() != "" || a.Is4In6() || families[a.Is4()] {
			t.Errorf("addresses %v", r.IPs)
		}
		families[a.Is4()] = true
	}
	if r.Prev != nil && slices.ContainsFunc(r.Prev.IPs, func(ip IP) bool { return !ip.Address.IsValid() }) {
		t.Errorf("addresses %+v", r.Prev.IPs)
	}
}

// received has a line come to the agent, and checks that what it reads is valid and the same in its own words.
func received(t *testing.T, line []byte) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		file := os.NewFile(uintptr(fd), "socket")
		c, err := net.FileConn(file)
		if err = errors.Join(err, file.Close()); err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ends[i] = c.(*net.UnixConn)
	}
	go func() {
		ends[0].Write(append(slices.Clone(line), '\n')) // a reader that has enough goes
		ends[0].CloseWrite()
	}()
	r, file, err := Receive(ends[1])
	if file != nil {
		t.Error("a file came that was not sent")
	}
	if err != nil {
		if e := (*Error)(nil); !errors.As(err, &e) {
			t.Errorf("%v has no code", err)
		}
		return
	}
	valid(t, r)
	first, err := json.Marshal(r)
	var again Request
	if err = errors.Join(err, json.Unmarshal(first, &again)); err != nil {
		t.Fatalf("%s: %v", first, err)
	}
	if second, err := json.Marshal(again); err != nil || !bytes.Equal(first, second) {
		t.Errorf("%s, then %s: %v", first, second, err)
	}
}

// FuzzRequests has the agent read any request as a valid one, or not at all.
func FuzzRequests(f *testing.F) {
	for _, r := range []Request{{Command: Status}, {Command: Add, Network: "n", Attachment: Attachment{"c", "eth0"},
		NetNS: "/ns", Pod: "a/b", IPs: []netip.Addr{netip.MustParseAddr("10.0.0.2")}, Ports: true,
		Prev: &Result{IPs: []IP{{Address: netip.MustParsePrefix("10.0.0.2/32")}}}},
		{Command: GC, Valid: []Attachment{{"c", "eth0"}}}} {
		b, err := json.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"command":"ADD","ips":["::ffff:10.0.0.2","10.0.0.2","fe80::1%eth0",""],"prev":{"ips":[{"address":""}]}}`))
	f.Fuzz(received)
}

// TestPluginIsSmall is about what the runtime starts for every pod.
func TestPluginIsSmall(t *testing.T) {
	const most = 3 << 20
	file := filepath.Join(t.TempDir(), "fairlead-cni")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", file, "../cmd/fairlead-cni")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	if s, err := os.Stat(file); err != nil || s.Size() > most {
		t.Errorf("the plugin has %d bytes, %d are the most", s.Size(), most)
	}
	out, err := exec.Command("go", "list", "-deps", "../cmd/fairlead-cni").Output()
	if err != nil {
		t.Fatal(err)
	}
	var others []string
	for p := range strings.FieldsSeq(string(out)) {
		if first, _, _ := strings.Cut(p, "/"); strings.Contains(first, ".") {
			others = append(others, p)
		}
	}
	if want := []string{"fairlead.dev/fairlead/cni", "fairlead.dev/fairlead/cmd/fairlead-cni"}; !reflect.DeepEqual(others,
		want) {
		t.Errorf("the plugin imports %v beside the standard library", others)
	}
}
