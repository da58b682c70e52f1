package cluster

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/sandbox"
)

// token is where a pod finds its ServiceAccount.
const token = "/var/run/secrets/kubernetes.io/serviceaccount"

// start runs a container of the pod on node a as a kubelet has it run, by runc: the image's files, the pod's
// environment, capabilities and mounts, and the runtime's own masks. Seccomp profiles are the runtime's business and
// not here.
func (r release) start(t testing.TB, c corev1.Container) *running {
	t.Helper()
	h, err := box.Node("a")
	check(t, err)
	built(t, "FAIRLEAD_IMAGE")
	files, err := shipped()
	check(t, err)
	dir := t.TempDir()
	if out, err := exec.Command("cp", "-al", files.root, filepath.Join(dir, "rootfs")).CombinedOutput(); err != nil {
		t.Fatalf("link the image's files: %v: %s", err, out) // runc makes mount points among them
	}
	spec := exec.Command("runc", "spec")
	spec.Dir = dir
	if out, err := spec.CombinedOutput(); err != nil {
		t.Fatalf("runc spec: %v: %s: install the package runc, which `make packages` does", err, out)
	}
	text, err := os.ReadFile(filepath.Join(dir, "config.json"))
	var s map[string]any
	check(t, err, json.Unmarshal(text, &s))
	process := s["process"].(map[string]any)
	process["args"] = slices.Concat(files.Entrypoint, c.Args)
	process["env"] = slices.Concat(files.Env, environment(c))
	r.fill(t, s, c, h, dir)
	text, err = json.Marshal(s)
	check(t, err, os.WriteFile(filepath.Join(dir, "config.json"), text, 0o644))
	name := h.Namespace + "-" + c.Name
	runc := func(args ...string) *exec.Cmd {
		return exec.Command("runc", append([]string{"--root", filepath.Join(dir, "state")}, args...)...)
	}
	a := follow(t, h, runc("run", "--bundle", dir, name))
	a.exec = func(args ...string) *exec.Cmd { return runc(append([]string{"exec", name}, args...)...) }
	t.Cleanup(func() {
		runc("delete", "--force", name).Run()
		a.alive = false
		a.cmd.Wait()
	})
	return a
}

// fill makes a runtime's specification (github.com/opencontainers/runtime-spec, config.md) of what runc offers and the
// pod says.
func (r release) fill(t testing.TB, s map[string]any, c corev1.Container, h *sandbox.Host, dir string) {
	may := c.SecurityContext
	process, linux := s["process"].(map[string]any), s["linux"].(map[string]any)
	process["terminal"] = false
	process["noNewPrivileges"] = may.AllowPrivilegeEscalation != nil && !*may.AllowPrivilegeEscalation
	s["root"].(map[string]any)["readonly"] = *may.ReadOnlyRootFilesystem
	var caps []string
	if may.Privileged != nil && *may.Privileged {
		caps = all
		linux["maskedPaths"], linux["readonlyPaths"] = nil, nil
	} else {
		for _, p := range may.Capabilities.Add {
			caps = append(caps, "CAP_"+string(p))
		}
	}
	process["capabilities"] = map[string]any{"bounding": caps, "effective": caps, "permitted": caps}
	spaces := []any{map[string]any{"type": "mount"}, map[string]any{"type": "ipc"}, map[string]any{"type": "uts"}}
	if !r.pod.HostPID {
		spaces = append(spaces, map[string]any{"type": "pid"})
	}
	linux["namespaces"] = spaces
	var mounts []any
	for _, m := range s["mounts"].([]any) {
		switch m := m.(map[string]any); m["destination"] {
		case "/sys/fs/cgroup": // this machine's may be of version 1
		case "/sys":
			m["type"], m["source"], m["options"] = "none", "/sys", []string{"bind", "nosuid", "noexec", "nodev", "ro"}
			mounts = append(mounts, m)
		default:
			mounts = append(mounts, m)
		}
	}
	for _, m := range c.VolumeMounts {
		mounts = append(mounts, bind(r.volume(t, m.Name, h, dir), m.MountPath, m.ReadOnly))
	}
	s["mounts"] = append(mounts, bind(files(t, filepath.Join(dir, "secret"), r.secret), token, true))
}

// environment returns a container's variables.
func environment(c corev1.Container) (l []string) {
	for _, e := range c.Env {
		if e.ValueFrom != nil {
			e.Value = map[string]string{"spec.nodeName": "a"}[e.ValueFrom.FieldRef.FieldPath]
		}
		l = append(l, e.Name+"="+e.Value)
	}
	return l
}

// volume returns the path of a volume. The node's cgroups are in a sandbox those below its own.
func (r release) volume(t testing.TB, name string, h *sandbox.Host, dir string) string {
	t.Helper()
	for _, v := range r.pod.Volumes {
		switch {
		case v.Name != name:
		case v.ConfigMap != nil:
			return files(t, filepath.Join(dir, name), r.files)
		case v.EmptyDir != nil:
			at := filepath.Join(dir, name)
			check(t, os.MkdirAll(at, 0o755))
			return at
		case v.HostPath.Path == "/sys/fs/cgroup":
			return h.Cgroup
		default:
			switch *v.HostPath.Type {
			case corev1.HostPathFileOrCreate:
				f, err := os.OpenFile(v.HostPath.Path, os.O_CREATE, 0o600)
				check(t, err)
				f.Close()
			case corev1.HostPathDirectoryOrCreate:
				check(t, os.MkdirAll(v.HostPath.Path, 0o755))
			}
			return v.HostPath.Path
		}
	}
	t.Fatalf("no volume %s", name)
	return ""
}

// files writes a folder of files.
func files(t testing.TB, dir string, texts map[string]string) string {
	t.Helper()
	check(t, os.MkdirAll(dir, 0o755))
	for name, text := range texts {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	return dir
}

func bind(from, to string, readOnly bool) any {
	o := []string{"rbind", "rprivate"}
	if readOnly {
		o = append(o, "ro")
	}
	return map[string]any{"type": "bind", "source": from, "destination": to, "options": o}
}

// all are what of root's powers a privileged container uses; this machine may itself lack some of the others.
var all = []string{"CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE"}
