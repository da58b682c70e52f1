package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/cmd/fairlead/text"
	"fairlead.dev/fairlead/model"
)

// traceCommand prints what connections to Services come to.
func traceCommand() *cobra.Command {
	var n nodeFlags
	var o cli.Output
	var service, pod string
	c := &cobra.Command{
		Use:   "trace [--source DIR --node NAME]",
		Short: "Print what each connection to a Service comes to, as it happens",
		Long: `Print what each connect() and each first datagram of a client on this node to a Service comes to, as it
happens, until interrupted: who asks, for which Service, and which endpoint it is given, or why none. It takes an
agent with --mode ebpf; packets that go through the plane behind it ("left to packets") are followed no further.
One process may trace a node at a time.` + asTheAgent,
		Example: `  fairlead trace --source examples/shop --node a
  fairlead trace --source examples/shop --node a --service shop/web --pod shop/client
  fairlead trace --source examples/shop --node a -o json | jq -r 'select(.outcome != "translated")'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if o != "" && o != "json" {
				return fmt.Errorf("invalid --output %q: use json, a line for each connection", o)
			}
			w, err := n.read(c.Context(), true)
			if err != nil {
				return err
			}
			if _, err := w.All(); err != nil {
				c.PrintErrln("fairlead: warning: pods of other nodes have no names:", err)
			}
			t := &tracer{node: w.Services.Node.Name, services: w.Pools(), pods: w.Pods(), out: cli.Out(c), json: o == "json"}
			f, err := t.filter(service, pod)
			if err != nil {
				return err
			}
			lost, err := mode.Trace(c.Context(), n.config.Options(), f, t.print)
			if lost > 0 {
				c.PrintErrf("%d more were lost: they came faster than they could be printed; narrow it with --service or --pod\n",
					lost)
			}
			return errors.Join(err, t.err)
		},
	}
	n.add(c)
	o.Add(c)
	c.Flags().Lookup("output").Usage = "output format: json, a line for each connection"
	c.Flags().StringVar(&service, "service", "",
		"only of this Service (namespace/name, or namespace/name:port for one of its ports)")
	c.Flags().StringVar(&pod, "pod", "", "only of the pod namespace/name, or of the network namespace that has "+
		"this address")
	return c
}

// tracer prints events.
type tracer struct {
	node     string
	services map[uint64]*model.Pool // by their IDs
	pods     map[netip.Addr]string  // by their addresses
	clients  map[uint64]string      // by cookies of network namespaces
	listed   time.Time              // when these were last looked for
	out      io.Writer
	json     bool
	err      error // of writing
}

// filter finds what --service and --pod name.
func (t *tracer) filter(service, pod string) (f mode.TraceFilter, err error) {
	for id, p := range t.services {
		if service != "" && (p.Service == service || p.Owner.String() == service) {
			f.Pools = append(f.Pools, id)
		}
	}
	if service != "" && f.Pools == nil {
		return f, fmt.Errorf("--service %q: the node serves no such Service; write it as namespace/name, and see "+
			"fairlead show", service)
	}
	if pod == "" {
		return f, nil
	}
	hosts, err := mode.TraceHosts()
	if err != nil {
		return f, err
	}
	for _, h := range hosts {
		for _, a := range h.Addresses {
			if a.String() == pod || t.pods[a] == pod {
				f.Namespace = h.Cookie
				return f, nil
			}
		}
	}
	return f, fmt.Errorf("--pod %q: no network namespace of this node has its address: write a pod that runs here as "+
		"namespace/name, or an address", pod)
}

// client names a network namespace: by its pod, or its first address. Those that are new are looked for once a second
// at most.
func (t *tracer) client(cookie uint64) string {
	if name, known := t.clients[cookie]; known || time.Since(t.listed) < time.Second {
		return name
	}
	t.listed, t.clients = time.Now(), map[uint64]string{}
	hosts, err := mode.TraceHosts()
	if err != nil {
		return ""
	}
	for i, h := range hosts {
		switch {
		case i == 0:
			t.clients[h.Cookie] = "node " + t.node
		case len(h.Addresses) > 0:
			t.clients[h.Cookie] = h.Addresses[0].String()
		}
		for _, a := range h.Addresses {
			if name := t.pods[a]; name != "" && i > 0 {
				t.clients[h.Cookie] = name
			}
		}
	}
	return t.clients[cookie]
}

// traced is an event as it is printed.
type traced struct {
	Time      time.Time `json:"time"`
	Client    string    `json:"client,omitempty"` // pod, address or node; empty where its network namespace can't be found
	Namespace uint64    `json:"networkNamespace"` // cookie
	Process   uint32    `json:"process"`
	Command   string    `json:"command"`
	Service   string    `json:"service,omitempty"` // empty where the source had none when the command was started
	Entry     string    `json:"entry"`
	Backend   string    `json:"backend,omitempty"`
	Pod       string    `json:"backendPod,omitempty"`
	Outcome   string    `json:"outcome"`
}

// print prints an event.
func (t *tracer) print(e mode.TraceEvent) {
	row := traced{Time: e.At(), Client: t.client(e.Namespace), Namespace: e.Namespace, Process: e.Process,
		Command: e.Command,
		Entry:   fmt.Sprintf("%s/%s", e.Entry, model.Protocol(e.Protocol)), Outcome: e.Outcome.String()}
	if p := t.services[e.Pool]; p != nil {
		row.Service = p.Service
	}
	if e.Backend.IsValid() {
		row.Backend, row.Pod = e.Backend.String(), t.pods[e.Backend.Addr()]
	}
	var err error
	if t.json {
		err = json.NewEncoder(t.out).Encode(row)
	} else {
		_, err = fmt.Fprintln(t.out, escape.String(row.String()))
	}
	if t.err == nil {
		t.err = err
	}
}

// String returns a line for people.
func (r traced) String() string {
	client := r.Client
	if client == "" {
		client = fmt.Sprint("namespace ", r.Namespace)
	}
	line := fmt.Sprintf("%s  %-24s %-20s %s %s", r.Time.Format("15:04:05.000000"), client,
		fmt.Sprintf("%s[%d]", r.Command, r.Process), text.Dash(r.Service), r.Entry)
	if r.Backend != "" {
		line += " → " + r.Backend
	}
	if r.Pod != "" {
		line += " " + r.Pod
	}
	return line + "  " + r.Outcome
}
