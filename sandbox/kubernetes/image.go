package kubernetes

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"strings"
)

// PauseImage is the name of the image of a pod's first container, which holds its namespaces.
const PauseImage = "fairlead.dev/pause:1"

// pauses are programs that wait for ever, in machine code by architecture: pause(2) in a loop, where arm64, which lacks
// that, has ppoll(2) without anything to wait for.
var pauses = map[string]struct {
	machine elf.Machine
	code    []byte
}{
	"amd64": {elf.EM_X86_64, []byte{
		0xb8, 0x22, 0x00, 0x00, 0x00, // mov eax, 34
		0x0f, 0x05, // syscall
		0xeb, 0xf7, // jmp to the start
	}},
	"arm64": {elf.EM_AARCH64, []byte{
		0x00, 0x00, 0x80, 0xd2, // mov x0, 0
		0x01, 0x00, 0x80, 0xd2, // mov x1, 0
		0x02, 0x00, 0x80, 0xd2, // mov x2, 0
		0x03, 0x00, 0x80, 0xd2, // mov x3, 0
		0x68, 0x09, 0x80, 0xd2, // mov x8, 73
		0x01, 0x00, 0x00, 0xd4, // svc 0
		0xfa, 0xff, 0xff, 0x17, // b to the start
	}},
}

// pauseProgram returns the pause program, a static ELF file with one segment.
func pauseProgram(arch string) ([]byte, error) {
	p, ok := pauses[arch]
	if !ok {
		return nil, fmt.Errorf("no pause program for %s", arch)
	}
	const base, header, segment = 0x400000, 64, 56
	size := uint64(header + segment + len(p.code))
	var b bytes.Buffer
	ident := [16]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)}
	for _, part := range []any{
		elf.Header64{
			Ident: ident, Type: uint16(elf.ET_EXEC), Machine: uint16(p.machine), Version: uint32(elf.EV_CURRENT),
			Entry: base + header + segment, Phoff: header, Ehsize: header, Phentsize: segment, Phnum: 1,
		},
		elf.Prog64{
			Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Vaddr: base, Paddr: base, Filesz: size,
			Memsz: size, Align: 0x1000,
		},
		p.code,
	} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), nil
}

// WritePauseImage writes PauseImage as WriteImage does.
func WritePauseImage(path string) error {
	program, err := pauseProgram(runtime.GOARCH)
	if err != nil {
		return err
	}
	return WriteImage(path, PauseImage, program)
}

// WriteImage writes an image for this machine's architecture, of one program that needs no other file, as an archive
// that `docker load` and `ctr images import` read (github.com/moby/docker-image-spec). The program is at the image's
// root, by the last part of the image's name: that of example.com/web:1 is /web.
func WriteImage(path, name string, program []byte) error {
	file, _, _ := strings.Cut(name[strings.LastIndexByte(name, '/')+1:], ":")
	layer, err := archive(map[string][]byte{file: program}, file)
	if err != nil {
		return err
	}
	digest := sha256.Sum256(layer)
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Entrypoint": []string{"/" + file}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(digest[:])}},
	})
	if err != nil {
		return err
	}
	index, err := json.Marshal([]any{map[string]any{
		"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	files := map[string][]byte{"layer.tar": layer, "config.json": config, "manifest.json": index}
	image, err := archive(files, "layer.tar", "config.json", "manifest.json")
	if err != nil {
		return err
	}
	return os.WriteFile(path, image, 0o644)
}

// archive returns a tar of files, in that order.
func archive(files map[string][]byte, order ...string) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range order {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(files[name]))}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(files[name]); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}
