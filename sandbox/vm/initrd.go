package vm

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// earlyModules are those without which a guest has neither the host's files nor the port to the host.
var earlyModules = []string{"virtio_pci", "virtiofs", "virtio_console"}

// enter is the first process of a kernel that has these as modules: it executes the one that the host names, from
// the host's files.
const enter = `#!/bin/busybox sh
for m in %s; do /bin/busybox insmod /$m; done
for i in 1 2 3 4 5 6 7 8 9 10; do
	/bin/busybox mount -t virtiofs -o ro root /root && break
	/bin/busybox sleep 0.1
done
exec /bin/busybox switch_root /root "$%s" "$@"
`

// guestVariable has the path of a guest's first process, for enter.
const guestVariable = "fairlead_guest"

// initrd writes boot/initrd below root, where the kernel there needs one: a shell with its modules.
func (d download) initrd(tmp, root, release string) error {
	modules := filepath.Join(root, "lib/modules", release)
	index, err := os.ReadFile(filepath.Join(modules, "modules.dep"))
	if err != nil {
		return err
	}
	builtin, err := os.ReadFile(filepath.Join(modules, "modules.builtin"))
	if err != nil {
		return err
	}
	needed, err := loadOrder(string(index), string(builtin), earlyModules...)
	if err != nil || len(needed) == 0 {
		return err
	}
	files := filepath.Join(tmp, "initrd")
	if err := d.unpack(tmp, "busybox-static", files); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(files, "root"), 0o755); err != nil {
		return err
	}
	var names []string
	for _, m := range needed {
		names = append(names, path.Base(m))
		if err := os.Link(filepath.Join(modules, m), filepath.Join(files, path.Base(m))); err != nil {
			return err
		}
	}
	script := fmt.Sprintf(enter, strings.Join(names, " "), guestVariable)
	if err := os.WriteFile(filepath.Join(files, "init"), []byte(script), 0o755); err != nil {
		return err
	}
	list := strings.Join(append([]string{".", "root", "bin", "bin/busybox", "init"}, names...), "\n") + "\n"
	archive, err := said(d.ctx, files, list, filepath.Join(files, "bin/busybox"), "cpio", "-o", "-H", "newc")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root, "boot", "initrd"), []byte(archive), 0o644)
}

// loadOrder returns those of the modules that aren't built in and what they need, each after what it needs, as paths in
// index, the text of modules.dep (depmod(8)): there a module is followed by all that it needs, the first to load last.
// builtin is the text of modules.builtin.
func loadOrder(index, builtin string, modules ...string) (paths []string, err error) {
	for _, m := range modules {
		known := strings.Contains(builtin, "/"+m+".ko\n")
		for line := range strings.Lines(index) {
			file, needs, _ := strings.Cut(strings.TrimSpace(line), ":")
			if path.Base(file) != m+".ko" {
				continue
			}
			known = true
			all := append([]string{file}, strings.Fields(needs)...)
			slices.Reverse(all)
			for _, p := range all {
				if !slices.Contains(paths, p) {
					paths = append(paths, p)
				}
			}
		}
		if !known {
			return nil, fmt.Errorf("the kernel has no module %s, nor is it built in", m)
		}
	}
	return paths, nil
}
