package vm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Kernel is a kernel on disk that can be booted.
type Kernel struct {
	Release string // what uname -r says
	Image   string // path
	Modules string // directory with modules and their index
	Initrd  string // path; empty where the image has all that it takes to get at the host's files
}

// Series is a series of kernels, such as 6.12.
type Series string

// Default is the second kernel, unless another is asked for.
const Default Series = "6.12"

// AllSeries returns the series that Prepare knows, the oldest first.
func AllSeries() []Series {
	return slices.SortedFunc(maps.Keys(suites), func(a, b Series) int { return compare(string(a), string(b)) })
}

// suites returns which of Debian's has a series' kernels.
var suites = map[Series]string{"5.10": "bullseye", "6.1": "bookworm", Default: "bookworm-backports",
	"6.18": "trixie-backports", "7.3": "trixie-backports"}

// What the name of a kernel's package begins and ends with, its version in between.
const (
	image = "linux-image-"
	cloud = "-cloud-amd64"
)

// compare compares versions by the numbers in them.
func compare(a, b string) int {
	numbers := func(s string) (l []int) {
		for _, n := range strings.FieldsFunc(s, func(r rune) bool { return r < '0' || r > '9' }) {
			i, _ := strconv.Atoi(n) // digits
			l = append(l, i)
		}
		return l
	}
	return slices.Compare(numbers(a), numbers(b))
}

// newest returns the series' newest kernel's package of those names, "" if there is none.
func (s Series) newest(names []string) string {
	var l []string
	for _, n := range names {
		if strings.HasPrefix(n, image+string(s)+".") && strings.HasSuffix(n, cloud) {
			l = append(l, n)
		}
	}
	if len(l) == 0 {
		return ""
	}
	return slices.MaxFunc(l, compare)
}

const (
	keys   = "/usr/share/keyrings/debian-archive-keyring.gpg"
	mirror = "http://deb.debian.org/debian" // for a machine whose own sources name none
)

// Prepare returns the kernel to boot: the one in the cache ($FAIRLEAD_CACHE, or fairlead in the user's cache
// directory), or else downloaded there with this machine's apt, 34 to 49 MB, checked by apt's keys and never installed.
// The system's apt configuration is read and stays as it is.
func Prepare(ctx context.Context, series Series) (Kernel, error) {
	suite, known := suites[series]
	if !known {
		return Kernel{}, fmt.Errorf("no kernel %q is known: there are %q", series, AllSeries())
	}
	dir, err := cache()
	if err != nil {
		return Kernel{}, fmt.Errorf("a place for the second kernel: %w", err)
	}
	unlock, err := lock(dir)
	if err != nil {
		return Kernel{}, fmt.Errorf("a place for the second kernel: %w", err)
	}
	defer unlock()
	target := filepath.Join(dir, string(series))
	if k, err := at(target); !errors.Is(err, fs.ErrNotExist) {
		return k, err
	}
	if err := (download{ctx, series, suite}).to(dir, target); err != nil {
		return Kernel{}, fmt.Errorf("download Debian's kernel %s to %s: %w", series, target, err)
	}
	return at(target)
}

func cache() (string, error) {
	dir := os.Getenv("FAIRLEAD_CACHE")
	if dir == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("%w: set FAIRLEAD_CACHE to a directory", err)
		}
		dir = filepath.Join(user, "fairlead")
	}
	dir, err := filepath.Abs(filepath.Join(dir, "kernel"))
	if err != nil {
		return "", err
	}
	return dir, os.MkdirAll(dir, 0o755)
}

// lock keeps other processes out until unlock.
func lock(dir string) (unlock func() error, err error) {
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f.Close, nil
}

// at returns the kernel unpacked in a directory. It's there whole or not at all, unless another program changed it.
func at(dir string) (Kernel, error) {
	if _, err := os.Stat(dir); err != nil {
		return Kernel{}, err
	}
	images, _ := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*")) // the pattern is well-formed
	if len(images) != 1 {
		return Kernel{}, fmt.Errorf("%s holds %d kernel images instead of one: remove it to have it downloaded again", dir,
			len(images))
	}
	release := strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	k := Kernel{Release: release, Image: images[0], Modules: filepath.Join(dir, "lib/modules", release)}
	if index := k.Modules + "/modules.dep.bin"; !exists(index) {
		return Kernel{}, fmt.Errorf("%s lacks %s: remove it to have it downloaded again", dir, index)
	}
	if initrd := filepath.Join(dir, "boot", "initrd"); exists(initrd) {
		k.Initrd = initrd
	}
	return k, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// download fetches things of a suite with apt-get, from a source of our own.
type download struct {
	ctx    context.Context
	series Series
	suite  string
}

// to makes place a directory with the series' newest kernel, with all of apt's state in a directory of our own, which
// is made below dir and goes again.
func (d download) to(dir, target string) error {
	tmp, err := os.MkdirTemp(dir, ".download-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	source := fmt.Sprintf("deb [signed-by=%s] %s %s main\n", keys, debian(d.ctx), d.suite)
	if err := os.WriteFile(filepath.Join(tmp, "sources.list"), []byte(source), 0o644); err != nil {
		return err
	}
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(tmp, d), 0o755); err != nil {
			return err
		}
	}
	if _, err := d.apt(tmp, "apt-get", "update", "--error-on=any"); err != nil {
		return err
	}
	names, err := d.packages(tmp)
	if err != nil {
		return err
	}
	root, release := filepath.Join(tmp, "root"), strings.TrimPrefix(names[0], image)
	for _, n := range names {
		if err := d.unpack(tmp, n, root); err != nil {
			return err
		}
	}
	if err := arrange(root, release); err != nil {
		return err
	}
	if _, err := output(d.ctx, tmp, "kmod", "depmod", "-b", root, release); err != nil {
		return err
	}
	if err := d.initrd(tmp, root, release); err != nil {
		return err
	}
	if _, err := at(root); err != nil {
		return err
	}
	return os.Rename(root, target)
}

// packages returns the names of those that the series' newest kernel is made of, its image's first.
func (d download) packages(tmp string) ([]string, error) {
	all, err := d.apt(tmp, "apt-cache", "pkgnames", image+string(d.series)+".")
	if err != nil {
		return nil, err
	}
	name := d.series.newest(strings.Fields(all))
	if name == "" {
		return nil, fmt.Errorf("%s has no kernel %s (any more): set FAIRLEAD_CACHE to a directory that has one", d.suite,
			d.series)
	}
	depends, err := d.apt(tmp, "apt-cache", "depends", "--important", name)
	if err != nil {
		return nil, err
	}
	names := []string{name}
	for _, n := range strings.Fields(depends) { // since 6.19, files are in packages that the image's depends on
		if strings.HasSuffix(n, "-"+strings.TrimPrefix(name, image)) && !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return names, nil
}

// arrange puts files where kernels of bookworm have them: later ones have modules below /usr, and since 6.19 the image
// beside them.
func arrange(root, release string) error {
	if usr := filepath.Join(root, "usr/lib"); exists(filepath.Join(usr, "modules")) {
		if err := os.Rename(usr, filepath.Join(root, "lib")); err != nil {
			return err
		}
	}
	if beside := filepath.Join(root, "lib/modules", release, "vmlinuz"); exists(beside) {
		return errors.Join(os.MkdirAll(filepath.Join(root, "boot"), 0o755),
			os.Rename(beside, filepath.Join(root, "boot", "vmlinuz-"+release)))
	}
	return nil
}

// apt runs one of apt's programs in a directory that has all of its state.
func (d download) apt(dir, name string, args ...string) (string, error) {
	return output(d.ctx, dir, "apt", name, append([]string{"-q",
		"-o", "Dir::Etc::sourcelist=" + dir + "/sources.list", "-o", "Dir::Etc::sourceparts=-",
		"-o", "Dir::State::lists=" + dir + "/lists", "-o", "Dir::Cache=" + dir + "/cache",
		"-o", "APT::Sandbox::User=root", "-o", "APT::Architectures=amd64"}, args...)...)
}

// unpack puts a package's files below a directory.
func (d download) unpack(dir, name, root string) error {
	if _, err := d.apt(dir, "apt-get", "download", name); err != nil {
		return err
	}
	packages, _ := filepath.Glob(filepath.Join(dir, name+"_*.deb"))
	if len(packages) != 1 {
		return fmt.Errorf("apt-get download %s left %d files instead of one", name, len(packages))
	}
	_, err := output(d.ctx, dir, "dpkg", "dpkg-deb", "-x", packages[0], root)
	return err
}

// debian returns the address of the Debian archive that this machine's apt is configured for.
func debian(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages",
		"Origin: Debian", "Label: Debian").Output()
	if uri, _, _ := strings.Cut(string(out), "\n"); err == nil && uri != "" {
		return uri
	}
	return mirror
}

// output runs a program of a Debian package and returns its standard output.
func output(ctx context.Context, dir, pkg, name string, args ...string) (string, error) {
	path, err := program(pkg, name)
	if err != nil {
		return "", err
	}
	return said(ctx, dir, "", path, args...)
}

// said runs a program, with that to read, and returns its standard output.
func said(ctx context.Context, dir, input, path string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, path, args...)
	var stderr tail
	cmd.Dir, cmd.Stdin, cmd.Stderr, cmd.Env = dir, strings.NewReader(input), &stderr, append(os.Environ(), "LC_ALL=C")
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), errors.Join(err, ctx.Err()), &stderr)
	}
	return string(out), nil
}

// program finds a program of a Debian package, also where users' paths don't lead.
func program(pkg, name string) (string, error) {
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/sbin", "/usr/lib/qemu",
		"/usr/libexec") {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("the second kernel needs %s: apt-get install --no-install-recommends %s", name, pkg)
}
