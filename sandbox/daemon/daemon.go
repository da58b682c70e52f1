// Package daemon keeps a sandbox up: it follows a source of objects, and runs one agent in each node's namespace.
//
// It knows of an agent only how to start it, and that GET /readyz on 127.0.0.1:10249 in its node's namespace says
// whether it is ready. What it does it writes into a status file for other processes: see StatusOf.
package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/source"
)

// Options say what to keep up.
type Options struct {
	Name   string                     // the sandbox's
	Follow string                     // where the objects come from, for people
	Source source.Source              // the objects
	Agent  func(node string) []string // program and arguments of a node's agent; nil: no agents
	// Network has the agents connect the pods (sandbox.Options.CNI, the folder by AgentFolder); Apart as there.
	Network, Apart bool
	Progress       func(done, total int) // while the sandbox is built for the first time
	Up             func()                // once it is up; agents may not be ready yet
}

// Status is what a daemon says of itself to other processes.
type Status struct {
	Follows string    `json:"follows"`           // Options.Follow
	Since   time.Time `json:"since"`             // when it came up
	Problem string    `json:"problem,omitempty"` // why the sandbox doesn't follow its source at the moment
	Apart   string    `json:"apart,omitempty"`   // why pods have no network yet
	Agents  []Agent   `json:"agents"`            // by node
}

// Folder is where the daemon of a sandbox keeps its status and logs.
func Folder(name string) string { return filepath.Join(sandbox.Dir, name) }

// AgentFolder is where the agent of a node has files and sockets of its own.
func AgentFolder(name, node string) string { return filepath.Join(Folder(name), "agent-"+node) }

func statusPath(name string) string { return filepath.Join(Folder(name), "status.json") }

// StatusOf reads the status of a sandbox's daemon. A sandbox without one returns an error that is fs.ErrNotExist.
func StatusOf(name string) (s Status, err error) {
	b, err := os.ReadFile(statusPath(name))
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return s, fmt.Errorf("read status of sandbox %s: %w", name, err)
	}
	return s, nil
}

// Run makes the sandbox and keeps it up until ctx ends, then takes it down and removes Folder. It returns an error
// where the source's first objects make no sandbox, or the source fails.
func Run(ctx context.Context, o Options) (err error) {
	if err := os.MkdirAll(Folder(o.Name), 0o755); err != nil {
		return fmt.Errorf("keep sandbox %s up: %w", o.Name, err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	batches := make(chan source.Batch)
	go func() {
		err := o.Source.Run(ctx, func(b source.Batch) {
			select {
			case batches <- b:
			case <-ctx.Done():
			}
		})
		if ctx.Err() == nil {
			cancel(fmt.Errorf("follow %s: %w", o.Follow, reason(err)))
		}
	}()
	d := &daemon{Options: o, objects: map[source.Key]source.Object{}, agents: map[string]*agent{}}
	d.status = Status{Follows: o.Follow, Since: time.Now()}
	defer func() { err = errors.Join(err, d.down()) }()
	for {
		var again <-chan time.Time
		if d.status.Apart != "" {
			again = time.After(impatient)
		}
		select {
		case b := <-batches:
			if err := d.apply(ctx, b); err != nil {
				return cmp.Or(failure(ctx), err)
			}
		case <-again:
			d.attach(ctx)
		case <-ctx.Done():
			return failure(ctx)
		}
	}
}

// failure returns why ctx ended where that wasn't asked for.
func failure(ctx context.Context) error {
	if cause := context.Cause(ctx); cause != ctx.Err() {
		return cause
	}
	return nil
}

// reason names the end of a source that gave no reason.
func reason(err error) error {
	if err == nil {
		return errors.New("the source ended")
	}
	return err
}

type daemon struct {
	Options
	objects map[source.Key]source.Object
	cluster *sandbox.Cluster
	agents  map[string]*agent

	mu     sync.Mutex
	status Status
}

// apply makes the sandbox follow a batch. After the first, what goes wrong is told and the sandbox stays as it is.
func (d *daemon) apply(ctx context.Context, b source.Batch) error {
	for _, p := range b.Problems {
		slog.Warn("object not taken as it stands", "problem", p.String())
	}
	for _, c := range b.Changes {
		if c.Object == nil {
			delete(d.objects, c.Key)
		} else {
			d.objects[c.Key] = c.Object
		}
	}
	objects := slices.Collect(maps.Values(d.objects))
	if d.cluster == nil {
		o := sandbox.Options{Name: d.Name, Objects: objects, Serve: true, Progress: d.Progress, Apart: d.Options.Apart}
		if d.Network {
			o.CNI = func(node string) string { return AgentFolder(d.Name, node) }
		}
		c, err := sandbox.Up(ctx, o)
		if err != nil {
			return err
		}
		d.cluster = c
		slog.Info("sandbox is up", "name", d.Name, "hosts", len(c.Hosts()))
		d.staff(ctx)
		d.attach(ctx)
		if d.Up != nil {
			d.Up()
		}
		return nil
	}
	err := d.cluster.Update(ctx, objects)
	if err != nil {
		slog.Error("sandbox can't follow", "error", err)
	} else {
		slog.Info("sandbox follows", "changes", len(b.Changes), "hosts", len(d.cluster.Hosts()))
	}
	d.publish(func(s *Status) { s.Problem = message(err) })
	d.staff(ctx)
	d.attach(ctx)
	return nil
}

// attach has pods connected that have no network yet. What fails is tried again.
func (d *daemon) attach(ctx context.Context) {
	err := d.cluster.Attach(ctx)
	if why := message(err); why != d.status.Apart {
		d.publish(func(s *Status) { s.Apart = why })
	}
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// staff ends the agents of nodes that are gone, or are not what they were, and starts those of new ones.
func (d *daemon) staff(ctx context.Context) {
	nodes := map[string]*sandbox.Host{}
	if d.Agent != nil {
		for _, h := range d.cluster.Hosts() {
			if h.Role == sandbox.Node {
				nodes[h.Node] = h
			}
		}
	}
	for name, a := range d.agents {
		if nodes[name] != a.host {
			a.end()
			delete(d.agents, name)
		}
	}
	for name, h := range nodes {
		if d.agents[name] == nil {
			d.agents[name] = d.hire(ctx, h)
		}
	}
	d.publish(func(*Status) {})
}

// publish changes the status and writes it down.
func (d *daemon) publish(change func(*Status)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change(&d.status)
	if err := d.status.write(d.Name); err != nil {
		slog.Error("status is not written", "error", err)
	}
}

// Publish writes the status of the daemon of that name, which is this process.
func Publish(name string, s Status) error { return s.write(name) }

func (s Status) write(name string) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	tmp := statusPath(name) + ".new"
	if err := os.WriteFile(tmp, append(b, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, statusPath(name))
}

// down ends all agents at once, then takes the sandbox down.
func (d *daemon) down() error {
	var wg sync.WaitGroup
	for _, a := range d.agents {
		wg.Go(a.end)
	}
	wg.Wait()
	if d.cluster == nil {
		return nil
	}
	return errors.Join(d.cluster.Down(), os.RemoveAll(Folder(d.Name)))
}

// record sets an agent's part of the status.
func (d *daemon) record(a Agent) {
	d.publish(func(s *Status) {
		i, found := slices.BinarySearchFunc(s.Agents, a, func(x, y Agent) int { return strings.Compare(x.Node, y.Node) })
		if found {
			s.Agents[i] = a
		} else {
			s.Agents = slices.Insert(s.Agents, i, a)
		}
	})
}

// forget removes an agent from the status.
func (d *daemon) forget(node string) {
	d.publish(func(s *Status) {
		s.Agents = slices.DeleteFunc(s.Agents, func(a Agent) bool { return a.Node == node })
	})
}

// Absent reports whether err is that there is no such sandbox or daemon.
func Absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }
