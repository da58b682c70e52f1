package ipvs

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"

	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// runner is the plane, and the cutting of stale flows behind it, as a conformance.Runner.
type runner struct {
	plane   *Plane
	stale   *flows.Plane
	loop    *reconcile.Loop[model.ServicePart, Key, string]
	after   *reconcile.Loop[model.ServicePart, flows.Key, flows.Allowed]
	stop    context.CancelFunc
	ended   chan struct{}
	waiting []func()
}

func start() (conformance.Runner[model.ServicePart], error) {
	plane, err := New()
	if err != nil {
		return nil, err
	}
	stale, err := flows.New()
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("FAIRLEAD_TEST_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	r := &runner{plane: plane, stale: stale, stop: stop, ended: make(chan struct{}, 2),
		loop:  reconcile.New(plane, reconcile.Options[model.ServicePart]{Log: log}),
		after: reconcile.New(stale, reconcile.Options[model.ServicePart]{Log: log})}
	for _, run := range []func(context.Context) error{r.loop.Run, r.after.Run} {
		go func() { run(ctx); r.ended <- struct{}{} }()
	}
	return r, nil
}

func (r *runner) Change(put, del []model.ServicePart) {
	r.loop.Change(put, del)
	r.waiting = append(r.waiting, func() { r.after.Change(put, del) })
}

func (r *runner) Sync(ctx context.Context) error {
	if err := r.loop.Sync(ctx); err != nil {
		return err
	}
	for _, notify := range r.waiting {
		notify()
	}
	r.waiting = nil
	return r.after.Sync(ctx)
}

func (r *runner) Close() error {
	r.stop()
	<-r.ended
	<-r.ended
	r.stale.Close()
	return r.plane.Close()
}

// Dump implements conformance.Dumper.
func (r *runner) Dump() string {
	text := ""
	for _, c := range [][]string{{"nft", "list", "table", "inet", Table}, {"ip", "rule"},
		{"ip", "route", "show", "table", fmt.Sprint(owner)},
		{"cat", "/proc/net/ip_vs"}, {"cat", "/proc/net/ip_vs_conn"}, {"cat", "/proc/net/nf_conntrack"}} {
		out, err := exec.Command(c[0], c[1:]...).CombinedOutput()
		text += fmt.Sprintf("%v: %v\n%s", c, err, out)
	}
	return text
}
