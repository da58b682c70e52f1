package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/cilium/ebpf"
)

// ProgramPrefix begins the names of pinned programs, which have no link of their own.
const ProgramPrefix = "program-"

// Unpin removes a file that may be gone.
func Unpin(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// ProgramID returns the ID of a pinned program, 0 where there is none.
func ProgramID(path string) (uint32, error) {
	p, err := ebpf.LoadPinnedProgram(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("bpf: open a program: %w", err)
	}
	defer p.Close()
	i, err := p.Info()
	if err != nil {
		return 0, fmt.Errorf("bpf: read a program: %w", err)
	}
	id, _ := i.ID()
	return uint32(id), nil
}

// ProgramName returns the name of the program of an ID.
func ProgramName(id ebpf.ProgramID) string {
	name, _ := ProgramOf(id)
	return name
}

// ProgramOf returns the name of the program of an ID and the maps that it uses.
func ProgramOf(id ebpf.ProgramID) (name string, maps []ebpf.MapID) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return "?", nil
	}
	defer p.Close()
	i, err := p.Info()
	if err != nil {
		return "?", nil
	}
	maps, _ = i.MapIDs()
	return i.Name, maps
}

// Flag returns 1 for true: a constant of a program.
func Flag(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}
