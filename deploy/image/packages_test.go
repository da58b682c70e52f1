package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

func TestPackagesArePinned(t *testing.T) {
	names := map[string]string{}
	for arch := range machines {
		l, err := Packages(arch)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range l {
			names[arch] += p.Name + "=" + p.Version + " "
			if len(p.SHA256) != 64 || !strings.HasSuffix(p.Path, "_"+arch+".deb") {
				t.Errorf("%+v", p)
			}
		}
	}
	if names["amd64"] != names["arm64"] || !strings.Contains(names["amd64"], "iptables=") {
		t.Errorf("the architectures differ: %v", names)
	}
}

// The tools run on nothing but what the layer holds.
func TestToolsRunAlone(t *testing.T) {
	o := Options{Tools: true, Mirror: Debian, Cache: packageCache()}
	text, err := o.tools(t.Context(), "amd64")
	if err != nil {
		t.Fatal(err)
	}
	again, err := o.tools(t.Context(), "amd64")
	if err != nil || !bytes.Equal(text, again) {
		t.Errorf("the same packages make another layer (%v)", err)
	}
	root := t.TempDir()
	unpack(t, bytes.NewReader(text), root)
	for command, want := range map[string]string{
		"iptables-legacy-save": "", "iptables-nft-save": "", "ip6tables-legacy-restore --version": "v1.8.9 (legacy)",
		"ip6tables-nft-restore --version": "v1.8.9 (nf_tables)",
	} {
		out, err := inRoot(root, strings.Fields(command)...)
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v\n%s", command, err, out)
		}
	}
}

func TestBillOfMaterials(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := Options{Binaries: map[string]string{"amd64": self}, Tools: true}.Bill("sha256:0", "2026-01-02T03:04:05Z")
	if err != nil {
		t.Fatal(err)
	}
	var b struct {
		Packages []struct {
			Name         string
			ExternalRefs []struct{ ReferenceLocator string }
		}
	}
	if err := json.Unmarshal(text, &b); err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, p := range b.Packages {
		found[p.Name] = p.ExternalRefs[0].ReferenceLocator
	}
	for name, begin := range map[string]string{"iptables": "pkg:deb/debian/iptables@1.8.9-2?arch=amd64",
		"github.com/ulikunitz/xz": "pkg:golang/github.com/ulikunitz/xz@v", "stdlib": "pkg:golang/stdlib@1."} {
		if !strings.HasPrefix(found[name], begin) {
			t.Errorf("%s is %q, want %s…", name, found[name], begin)
		}
	}
}

// inRoot runs a program with another root folder, in a network namespace of its own.
func inRoot(root string, command ...string) (string, error) {
	c := exec.Command("/usr/sbin/"+command[0], command[1:]...)
	c.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Cloneflags: syscall.CLONE_NEWNET}
	c.Dir = "/"
	out, err := c.CombinedOutput()
	return string(out), err
}
