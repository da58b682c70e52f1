package cni

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// How long the plugin waits for the agent's socket: as long as an upgrade lasts, and less than a runtime waits.
const (
	addWait    = 20 * time.Second
	delWait    = 2 * time.Second
	statusWait = 10 * time.Second
)

// Plugin is one process of the plugin.
type Plugin struct {
	Environment func(string) string // os.Getenv
	Stdin       io.Reader
	Stdout      io.Writer
	Loopback    bool          // serve calls of LoopbackName
	AddWait     time.Duration // 0: addWait, and for STATUS statusWait
	DelWait     time.Duration // 0: delWait
}

// mostConfig is how many bytes a network configuration may have.
const mostConfig = 4 << 20

// Run serves one call and returns the exit code.
func (p *Plugin) Run() int {
	stdin, err := io.ReadAll(io.LimitReader(p.Stdin, mostConfig))
	var out any
	var c call
	if err != nil {
		err = Errorf(CodeIO, "read the network configuration: %s", err)
	} else if c, err = parse(p.Environment, stdin); err == nil {
		if p.Loopback && c.Command != Version {
			out, err = c.loopback()
		} else {
			out, err = p.serve(c)
		}
	}
	if err != nil {
		e := *ErrorOf(err)
		if e.Version = c.config.Version; e.Version == "" {
			e.Version = Versions[len(Versions)-1]
		}
		json.NewEncoder(p.Stdout).Encode(e)
		return 1
	}
	if out != nil {
		if err := json.NewEncoder(p.Stdout).Encode(out); err != nil {
			return 1
		}
	}
	return 0
}

// serve serves a call and returns what to print, nil for nothing.
func (p *Plugin) serve(c call) (any, error) {
	switch c.Command {
	case Version:
		version := c.config.Version
		if version == "" {
			version = Versions[len(Versions)-1]
		}
		return struct {
			Version   string   `json:"cniVersion"`
			Supported []string `json:"supportedVersions"`
		}{version, Versions}, nil
	case Add:
		r, err := p.call(c, wait(p.AddWait, addWait))
		if err != nil {
			return nil, away(CodeTryAgain, err)
		}
		switch {
		case r.Result != nil:
			return r.Result.in(c.config.Version), nil
		case c.Prev != nil:
			return c.config.Prev, nil // with all that this plugin knows nothing of
		}
		return nil, Errorf(CodeFailed, "the agent returned no result")
	case Check:
		_, err := p.call(c, wait(p.DelWait, delWait))
		return nil, away(CodeTryAgain, err)
	case Status:
		_, err := p.call(c, wait(p.AddWait, statusWait))
		return nil, away(CodeUnavailable, err)
	}
	if c.Command == Del {
		if err := c.removeChild(); err != nil {
			return nil, Errorf(CodeFailed, "delete interface %s of the pod: %s", c.Interface, err)
		}
	}
	_, err := p.call(c, wait(p.DelWait, delWait))
	if errors.Is(err, errAway) {
		if err = nil; c.Command == Del {
			err = c.remove()
		}
	}
	return nil, err
}

// call sends a call to the agent, for whose socket it waits.
func (p *Plugin) call(c call, wait time.Duration) (*Response, error) {
	var ns *os.File
	if c.Command == Add || c.Command == Check {
		var err error
		if ns, err = os.Open(c.NetNS); err != nil {
			return nil, Errorf(CodeEnvironment, "open the pod's network namespace: %s", err)
		}
		defer ns.Close()
	}
	socket := c.config.Socket
	if socket == "" {
		socket = DefaultSocket
	}
	r, err := Send(socket, c.Request, ns, wait)
	if err != nil {
		return nil, err
	}
	if r.Error != nil {
		return nil, r.Error
	}
	return r, nil
}

func wait(d, otherwise time.Duration) time.Duration {
	if d == 0 {
		return otherwise
	}
	return d
}

// away returns err, with a code if it is that the agent is away.
func away(code uint, err error) error {
	if errors.Is(err, errAway) {
		return Errorf(code, "the Fairlead agent of this node doesn't answer: %s; is its pod running?", err)
	}
	return err
}

// remove removes a pod from the network without the agent: its device, which takes the other end and its routes along,
// then
// its record. What isn't there is no error. The agent finds out when it starts.
func (c *call) remove() error {
	id := Key(c.Container, c.Interface)
	if err := deleteDevice(Device(id)); err != nil {
		return Errorf(CodeFailed, "delete device %s: %s", Device(id), err)
	}
	if err := os.Remove(c.record()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Errorf(CodeIO, "delete the address record: %s", err)
	}
	return nil
}

// record returns the path of the attachment's record.
func (c *call) record() string {
	folder := c.config.Records
	if folder == "" {
		folder = DefaultRecords
	}
	return filepath.Join(folder, RecordFile(Key(c.Container, c.Interface)))
}

// removeChild deletes the pod's interface if its record has it connected by ipvlan: no device of the node takes it
// along, and the agent may not see the pod's network namespace, with which it ends.
func (c *call) removeChild() error {
	b, err := os.ReadFile(c.record())
	var r struct {
		Device string `json:"device"`
	}
	if err != nil || json.Unmarshal(b, &r) != nil || !strings.HasPrefix(r.Device, "ipvlan") {
		return nil
	}
	ns, err := os.Open(c.NetNS)
	if err != nil {
		return nil
	}
	defer ns.Close()
	return inside(ns, func() error { return deleteDevice(c.Interface) })
}
