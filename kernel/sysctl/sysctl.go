// Package sysctl reads and writes kernel settings below /proc/sys, also those of one network namespace whatever thread
// asks.
package sysctl

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
)

// File is an open setting. Those below net stay those of the network namespace that the opening thread was in.
type File struct {
	name     string
	f        *os.File
	readOnly error // why it can't be written; nil: it can
	missing  error // why it can't be read either, where f is nil
}

// Open opens a setting by its path below /proc/sys, such as net/ipv4/ip_forward: for reading alone where it can't be
// written, which Set then says. An error that is fs.ErrNotExist means that this kernel hasn't the setting.
func Open(name string) (*File, error) {
	f, readOnly := os.OpenFile("/proc/sys/"+name, os.O_RDWR, 0)
	if readOnly != nil {
		var err error
		if f, err = os.Open("/proc/sys/" + name); err != nil {
			return nil, fmt.Errorf("sysctl %s: %w", name, err)
		}
	}
	return &File{name: name, f: f, readOnly: readOnly}, nil
}

// OpenOptional opens a setting that may not be there, such as where /proc/sys is not mounted: Get and Set say so then.
func OpenOptional(name string) *File {
	s, err := Open(name)
	if err != nil {
		return &File{name: name, missing: err}
	}
	return s
}

// Close closes the handle.
func (s *File) Close() error {
	if s.f == nil {
		return nil
	}
	return s.f.Close()
}

// Get returns the value without white space around it.
func (s *File) Get() (string, error) {
	if s.missing != nil {
		return "", s.missing
	}
	b := make([]byte, 64)
	n, err := s.f.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return "", fmt.Errorf("sysctl %s: %w", s.name, err)
	}
	return string(bytes.TrimSpace(b[:n])), nil
}

// Set writes the value.
func (s *File) Set(value string) error {
	if s.missing != nil {
		return s.missing
	}
	if s.readOnly != nil {
		return fmt.Errorf("sysctl %s=%s: %w: set it on the node", s.name, value, s.readOnly)
	}
	if _, err := s.f.WriteAt([]byte(value), 0); err != nil {
		return fmt.Errorf("sysctl %s=%s: %w", s.name, value, err)
	}
	return nil
}

// Ensure has a setting of the calling thread's namespace be the value, and says what it was and whether that was
// changed.
func Ensure(name, value string) (was string, changed bool, err error) {
	s, err := Open(name)
	if err != nil {
		return "", false, err
	}
	defer s.Close()
	if was, err = s.Get(); err != nil || was == value {
		return was, false, err
	}
	return was, true, s.Set(value)
}

// Number returns a setting of the calling thread's namespace that is a whole number.
func Number(name string) (int, error) {
	s, err := Open(name)
	if err != nil {
		return 0, err
	}
	defer s.Close()
	text, err := s.Get()
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("sysctl %s is no number: %w", name, err)
	}
	return n, nil
}
