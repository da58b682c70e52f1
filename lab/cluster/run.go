// Package cluster measures the network of a reader's own cluster, whatever its CNI plugin and its service proxy: it has
// pods of Fairlead's image answer and connect to each other, on the same node, across nodes, through a Service and in
// the nodes' own network, and records round trips, new connections and streams as an experiment of the lab does. It
// needs pods and Services in one namespace, and nothing else. What it makes is removed at the end, after an
// interruption, and by the next run after a kill.
package cluster

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/lab/progress"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// Options is what the user wants of a run.
type Options struct {
	Image      string
	Network    string   // what the cluster's plugin and proxy are, in the user's words
	Nodes      []string // none: wherever the scheduler puts the pods; else the server's and the other clients'
	Placements []Placement
	Samples    int // operations of a block
	Rounds     int
	Port       uint16 // of the server; the next one is for streams; 0: 8080, and 18080 in the node's network
	Seed       uint64
	Out        string // folder in which the run's own is made
	Command    []string
	Output     io.Writer // for progress
}

// Question is what a run asks.
const Question = "Round trips, new connections and streams between pods of your own cluster"

// Rounds is how many a run has unless it is told otherwise.
const Rounds = 9

// Usual are the placements of a run unless it is told otherwise.
var Usual = []Placement{OtherNode, SameNode}

// clientTime is about how long a client's pod takes from its start to its removal.
const clientTime = 4 * time.Second

// Planned returns about how long so many rounds of so many placements take.
func Planned(rounds, placements int) time.Duration {
	return time.Duration(rounds*placements) * clientTime
}

// run is a run at work.
type run struct {
	Options
	api             *API
	id, host, owner string
	poll            time.Duration
	say             func(format string, a ...any) // prints a line for the user
	targets         map[Placement][]Target
	machine         result.Machine
	where           []string // which pod is on which node
}

// streams is how long a block of a stream is.
const streams = 500 * time.Millisecond

// LeftError is that a run could not remove what it made.
type LeftError struct {
	Namespace, Run string
	Why            error
}

// Error implements error.
func (e *LeftError) Error() string {
	return fmt.Sprintf("not all that the run made is removed: %v; the next run from this machine removes it, or: kubectl "+
		"delete pods,services -n %s -l %s=%s", e.Why, e.Namespace, labelRun, e.Run)
}

// Unwrap returns the reason.
func (e *LeftError) Unwrap() error { return e.Why }

// Run measures and returns the folder with the results. Everything that it made in the cluster is removed when it
// returns, also where ctx ended: then the error is ctx's. What it could not remove is named by a LeftError.
func Run(ctx context.Context, a *API, o Options) (dir string, err error) {
	host, err := os.Hostname()
	if err != nil {
		return "", err
	}
	r := &run{Options: o, api: a, host: host, owner: testbed.Owner(), poll: 300 * time.Millisecond,
		id: fmt.Sprintf("%x", rand.Uint32()), targets: map[Placement][]Target{}}
	r.say = func(format string, a ...any) { fmt.Fprintf(r.Output, format+"\n", a...) }
	if err := r.sweep(ctx); err != nil {
		return "", cmp.Or(ctx.Err(), err)
	}
	defer func() {
		limited, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer stop()
		why := r.removeAll(limited, func(corev1.Pod) bool { return true }, labelRun+"="+r.id)
		if why != nil {
			err = errors.Join(err, &LeftError{Namespace: a.Namespace, Run: r.id, Why: why})
		}
	}()
	if err := r.prepare(ctx); err != nil {
		return "", cmp.Or(ctx.Err(), err)
	}
	return r.measure(ctx)
}

// sweep removes what killed runs of this machine left, and what is older than a run can be. Another run that may be at
// work is an error.
func (r *run) sweep(ctx context.Context) error {
	var pods corev1.PodList
	if err := r.api.get(ctx, "pods?labelSelector="+labelRun, &pods); err != nil {
		return err
	}
	left := map[string]bool{}
	for _, p := range pods.Items {
		mine := p.Annotations[ownerHost] == r.host && testbed.Gone(p.Annotations[ownerID])
		if !mine && time.Since(p.CreationTimestamp.Time) < lifetime*time.Second {
			return fmt.Errorf("namespace %s has pod %s of a run on %s since %s: wait for its end, choose another "+
				"--namespace, or, if it is no longer at work: kubectl delete pods,services -n %[1]s -l %[5]s=%[6]s",
				r.api.Namespace, p.Name, p.Annotations[ownerHost], p.CreationTimestamp.UTC().Format(time.DateTime),
				labelRun, p.Labels[labelRun])
		}
		left[p.Labels[labelRun]] = true
	}
	var services corev1.ServiceList
	if err := r.api.get(ctx, "services?labelSelector="+labelRun, &services); err != nil {
		return err
	}
	for _, s := range services.Items { // without pods there is no run at work, or it is about to end
		left[s.Labels[labelRun]] = true
	}
	for id := range left {
		if err := r.removeAll(ctx, func(corev1.Pod) bool { return true }, labelRun+"="+id); err != nil {
			return fmt.Errorf("remove what an earlier run left: %w", err)
		}
	}
	return nil
}

// removeAll removes the Services and those pods that fit, of those with a label, and waits until they are gone.
func (r *run) removeAll(ctx context.Context, fits func(corev1.Pod) bool, selector string) error {
	var services corev1.ServiceList
	if err := r.api.get(ctx, "services?labelSelector="+selector, &services); err != nil {
		return err
	}
	for _, s := range services.Items {
		if err := r.api.remove(ctx, "services/"+s.Name); err != nil {
			return err
		}
	}
	for deleted := map[string]bool{}; ; {
		var pods corev1.PodList
		if err := r.api.get(ctx, "pods?labelSelector="+selector, &pods); err != nil {
			return err
		}
		pods.Items = slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return !fits(p) })
		if len(pods.Items) == 0 {
			return nil
		}
		for _, p := range pods.Items {
			if !deleted[p.Name] {
				deleted[p.Name] = true
				if err := r.api.remove(ctx, "pods/"+p.Name); err != nil {
					return err
				}
			}
		}
		if err := testbed.Sleep(ctx, r.poll); err != nil {
			return fmt.Errorf("pod %s in namespace %s is not gone yet: %w", pods.Items[0].Name, r.api.Namespace, err)
		}
	}
}

// How long a pod may take to start, and one with an image that can't be pulled; and after what time what it waits for
// is printed.
const (
	startTimeout = 3 * time.Minute
	pullTimeout  = time.Minute
	printAfter   = 5 * time.Second
)

// patienceWith returns how long a pod is waited for, of so much altogether: no time for one that can never start.
func patienceWith(p *corev1.Pod, within time.Duration) time.Duration {
	switch {
	case unusable(p):
		return 0
	case pulling(p):
		return min(within, pullTimeout)
	case p.Status.Phase == corev1.PodPending:
		return min(within, startTimeout)
	}
	return within
}

// wait waits for a pod to be as it should be.
func (r *run) wait(ctx context.Context, name string, within time.Duration,
	done func(*corev1.Pod) bool) (*corev1.Pod, error) {
	for begun, printed := time.Now(), ""; ; {
		var p corev1.Pod
		if err := r.api.get(ctx, "pods/"+name, &p); err != nil {
			return nil, err
		}
		if done(&p) {
			return &p, nil
		}
		why := waiting(&p)
		if why != printed && p.Status.Phase == corev1.PodPending && time.Since(begun) > printAfter {
			printed = why
			r.say("waiting for pod %s: %s", name, why)
		}
		ended := p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded
		if ended {
			if log, err := r.api.do(ctx, "GET", "pods/"+name+"/log?limitBytes=2000", nil); err == nil {
				why += ": " + testbed.Brief(string(log))
			}
		}
		if ended || time.Since(begun) > patienceWith(&p, within) {
			return nil, fmt.Errorf("pod %s in namespace %s is %s: %s", name, r.api.Namespace,
				strings.ToLower(string(p.Status.Phase)), why)
		}
		if err := testbed.Sleep(ctx, r.poll); err != nil {
			return nil, err
		}
	}
}

// waiting returns why a pod doesn't run, as its status says.
func waiting(p *corev1.Pod) string {
	for _, s := range p.Status.ContainerStatuses {
		switch {
		case s.State.Waiting != nil && s.State.Waiting.Reason != "":
			text := strings.TrimSuffix(s.State.Waiting.Reason+": "+s.State.Waiting.Message, ": ")
			if pulling(p) {
				text += "; --image names one that the nodes can pull or already have"
			}
			return text
		case s.State.Terminated != nil:
			return fmt.Sprintf("its program ended with status %d %s", s.State.Terminated.ExitCode, s.State.Terminated.Message)
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			if n := p.Spec.NodeSelector[hostname]; n != "" {
				return fmt.Sprintf("%s: %s; --nodes wants a node with the label %s=%s", c.Reason, c.Message, hostname, n)
			}
			return c.Reason + ": " + c.Message + "; --placements same needs one node alone"
		}
	}
	return "no reason in its status"
}

// pulling reports whether a pod waits for its image in vain, so far.
func pulling(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool {
		return s.State.Waiting != nil && strings.Contains(s.State.Waiting.Reason, "Image")
	})
}

// unusable reports whether a pod's image will never be there, however long one waits.
func unusable(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool {
		return s.State.Waiting != nil && slices.Contains([]string{"InvalidImageName", "ErrImageNeverPull"},
			s.State.Waiting.Reason)
	})
}

// imageOf returns the image that a pod runs, with what its node says it is.
func (r *run) imageOf(p *corev1.Pod) string {
	for _, s := range p.Status.ContainerStatuses {
		if _, digest, found := strings.Cut(s.ImageID, "sha256:"); found {
			return fmt.Sprintf("image %s, sha256:%.12s", r.Image, digest)
		}
	}
	return "image " + r.Image
}

// start makes a pod and waits until it runs and has an address.
func (r *run) start(ctx context.Context, p *corev1.Pod) (*corev1.Pod, error) {
	if err := r.api.create(ctx, "pods", p, nil); err != nil {
		return nil, err
	}
	return r.wait(ctx, p.Name, startTimeout, func(p *corev1.Pod) bool {
		return p.Status.Phase == corev1.PodRunning && p.Status.PodIP != ""
	})
}

// prepare starts the servers and finds out what the clients connect to.
func (r *run) prepare(ctx context.Context) error {
	var s corev1.Service
	if err := r.api.create(ctx, "services", r.service(), &s); err != nil {
		return err
	}
	server, err := r.start(ctx, r.server())
	if err != nil {
		return err
	}
	if r.Network != "" {
		r.where = append(r.where, "network "+r.Network)
	}
	r.where = append(r.where, r.imageOf(server), "server on node "+server.Spec.NodeName)
	if err := r.readMachine(ctx, server.Name); err != nil {
		return err
	}
	pod, err := netip.ParseAddr(server.Status.PodIP)
	if err != nil {
		return fmt.Errorf("pod %s: %w", server.Name, err)
	}
	service, err := netip.ParseAddr(s.Spec.ClusterIP)
	if err != nil {
		return fmt.Errorf("service %s: %w", s.Name, err)
	}
	for _, p := range r.Placements {
		if p == HostNet {
			host, err := r.start(ctx, r.hostServer())
			if err != nil {
				return err
			}
			if err := r.readMachine(ctx, host.Name); err != nil {
				return err
			}
			a, err := netip.ParseAddr(host.Status.PodIP)
			if err != nil {
				return fmt.Errorf("pod %s: %w", host.Name, err)
			}
			r.targets[p] = []Target{{string(p), netip.AddrPortFrom(a, r.port(p))}}
			continue
		}
		r.targets[p] = []Target{{string(p), netip.AddrPortFrom(pod, r.port(p))},
			{string(p) + serviceSuffix, netip.AddrPortFrom(service, r.port(p))}}
	}
	base := r.baseline()
	r.targets[base] = append(r.targets[base], Target{again, r.targets[base][0].To})
	return nil
}

// readMachine reads what a server wrote about its node: from then on it answers.
func (r *run) readMachine(ctx context.Context, pod string) error {
	for range 50 {
		log, err := r.api.do(ctx, "GET", "pods/"+pod+"/log", nil)
		if err != nil {
			return err
		}
		if line, _, whole := bytes.Cut(log, []byte("\n")); whole {
			if err := json.Unmarshal(line, &r.machine); err != nil {
				return fmt.Errorf("the log of pod %s is not that of Fairlead's server: %.200q; is %s Fairlead's image?", pod, line,
					r.Image)
			}
			return nil
		}
		if err := testbed.Sleep(ctx, r.poll); err != nil {
			return err
		}
	}
	return fmt.Errorf("pod %s wrote nothing; is %s Fairlead's image?", pod, r.Image)
}

// port returns the server's port for a placement.
func (r *run) port(p Placement) uint16 {
	switch {
	case p == HostNet && r.Port > 0:
		return r.Port + 2
	case p == HostNet:
		return hostPort
	}
	return cmp.Or(r.Port, podPort)
}

// baseline returns the placement that ratios are to.
func (r *run) baseline() Placement { return r.Placements[0] }

// measure runs the clients, round by round, and records what they measured.
func (r *run) measure(ctx context.Context) (dir string, err error) {
	d := r.design()
	dir = filepath.Join(r.Out, d.ID+"-"+time.Now().Format("20060102-150405"))
	out, err := result.Create(dir, result.Manifest{Design: d, Command: r.Command, Profile: "full", Seed: r.Seed,
		Build: testbed.ReadBuild(), Machine: r.machine, Before: testbed.ReadLoad(), Versions: r.where})
	if err != nil {
		return "", err
	}
	bar := progress.New(r.Output, r.Rounds*len(r.Placements), Planned(r.Rounds, len(r.Placements)))
	r.say = bar.Print
	order := rand.New(rand.NewPCG(r.Seed, 0))
	err = func() error {
		for i := range r.Rounds {
			for _, k := range order.Perm(len(r.Placements)) {
				p := r.Placements[k]
				bar.Step(fmt.Sprintf("round %d of %d, client %s", i+1, r.Rounds, p), clientTime)
				if err := r.round(ctx, out, p, i); err != nil {
					bar.Stop(err.Error())
					return err
				}
			}
		}
		bar.Finish()
		return nil
	}()
	outcome := ""
	if ctx.Err() != nil {
		err, outcome = ctx.Err(), "it was interrupted"
	} else if err != nil {
		outcome = err.Error()
	}
	return dir, errors.Join(err, out.Close(outcome, testbed.ReadLoad()))
}

// round has a client's pod do its job and records the blocks.
func (r *run) round(ctx context.Context, out *result.Writer, p Placement, i int) error {
	j := Job{Targets: r.targets[p], Samples: r.Samples, Stream: streams, Seed: r.Seed, Round: i}
	pod, err := r.client(p, j)
	if err != nil {
		return err
	}
	if err := r.api.create(ctx, "pods", pod, nil); err != nil {
		return err
	}
	within := startTimeout + time.Duration(len(j.Targets))*3*patience
	done, err := r.wait(ctx, pod.Name, within, func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodSucceeded })
	if err != nil {
		return err
	}
	log, err := r.api.do(ctx, "GET", "pods/"+pod.Name+"/log", nil)
	if err != nil {
		return err
	}
	blocks, err := readBlocks(log, j)
	if err != nil {
		return fmt.Errorf("pod %s: %w", pod.Name, err)
	}
	for _, b := range blocks {
		if err := out.Add(b); err != nil {
			return err
		}
	}
	if i == 0 {
		out.Remark(fmt.Sprintf("The client %s ran on node %s, the %s.", p, done.Spec.NodeName, r.where[len(r.where)-1]))
	}
	return r.removeAll(ctx, func(o corev1.Pod) bool { return o.Name == pod.Name }, labelRun+"="+r.id+","+labelRole+"="+
		pod.Labels[labelRole])
}

// The arms beside those of placements.
const (
	serviceSuffix = "-service" // the same through a Service
	again         = "again"
)

// design returns the measurement in words and numbers.
func (r *run) design() result.Design {
	d := result.Design{ID: "cluster", Title: "The network of this cluster",
		Question: "How long do round trips and new connections between pods of this cluster take, on a node, across nodes, " +
			"through a Service, and in the nodes' own network?",
		Vary:     result.Axis{Param: "services", Title: "", Short: ""},
		Baseline: string(r.baseline()), Again: again, Margin: 0.02, Rounds: r.Rounds,
		Measures: []result.Measure{
			{ID: roundTrip, Title: "round trip on a kept connection", Unit: "µs", Stat: result.P50, Ratio: true,
				Text: fmt.Sprintf("netperf's TCP_RR: one byte there and one back, %d in a row", r.Samples)},
			{ID: "rr-mean", Detail: true, From: roundTrip, Title: "round trip, mean", Unit: "µs", Stat: result.Mean,
				Ratio: true},
			{ID: "rr-jitter", Detail: true, From: roundTrip, Title: "round trip, standard deviation", Unit: "µs",
				Stat: result.StdDev},
			{ID: connection, Title: "connect, request, close", Unit: "µs", Stat: result.P50, Ratio: true,
				Text: fmt.Sprintf("netperf's TCP_CRR: connect, one byte there and one back, close with a reset, %d in a row",
					r.Samples)},
			{ID: "crr-mean", Detail: true, From: connection, Title: "connect, request, close, mean", Unit: "µs",
				Stat: result.Mean, Ratio: true},
			{ID: stream, Title: "throughput of a stream", Unit: "Gbit/s", Stat: result.Rate("bytes"), Ratio: true,
				Text: fmt.Sprintf("one connection for %v; every MiB is answered by a byte", streams)},
		},
		Method: []string{"A server's pod answers for the whole run; in each round a client's pod of each placement runs, " +
			"one after the other in an order drawn for each, and measures each operation in an order drawn too. Nothing " +
			"is pinned, and no limit is set: the pods run as pods do. The machine below is the server's node."},
		Missing: []string{"UDP; other traffic on the nodes, which this run doesn't know of."},
		Pictures: []result.Picture{
			{ID: "rr-overlay", Kind: result.Overlay, Title: "Round trip on a kept connection", Measures: []string{roundTrip},
				Arms: []string{string(r.baseline())}},
			{ID: "rr-deviation", Kind: result.Deviation, Title: "Round trip on a kept connection: mean and standard deviation",
				Measures: []string{roundTrip}},
			{ID: "crr-overlay", Kind: result.Overlay, Title: "New connection", Measures: []string{connection},
				Arms: []string{string(r.baseline())}},
		},
	}
	var cells []result.CellRef
	for _, p := range r.Placements {
		for _, t := range r.targets[p] {
			d.Arms = append(d.Arms, result.Arm{ID: t.Arm, Title: t.Arm, Text: text(t.Arm)})
			if t.Arm != again && t.Arm != d.Baseline {
				cells = append(cells, result.CellRef{Measure: roundTrip, Arm: t.Arm})
			}
		}
	}
	in := func(measure string) (l []result.CellRef) {
		for _, c := range cells {
			c.Measure = measure
			l = append(l, c)
		}
		return l
	}
	d.Answer = &result.Answer{Chart: "rr-overlay", Findings: []result.Finding{
		{Subject: "a round trip on a kept connection", Verb: "takes", Object: "time", Of: result.Ratio, Cells: in(roundTrip)},
		{Subject: "a new connection", Verb: "takes", Object: "time", Of: result.Ratio, Cells: in(connection)}}}
	return d
}

// text returns what an arm is.
func text(arm string) string {
	return map[string]string{
		string(SameNode):                  "client and server are pods of one node",
		string(SameNode) + serviceSuffix:  "the same through a Service",
		string(OtherNode):                 "client and server are pods of two nodes",
		string(OtherNode) + serviceSuffix: "the same through a Service",
		string(HostNet):                   "client and server are in the network of two nodes",
		again:                             "the baseline once more: what it differs by can't be told from nothing"}[arm]
}
