package lab

import (
	"context"
	"errors"
	"os"
	"time"

	"fairlead.dev/fairlead/lab/cluster"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/testbed"
)

// Entry is an experiment as it is listed.
type Entry struct {
	Name     string        `json:"name"`
	Question string        `json:"question"`
	Quick    time.Duration `json:"quick_ns,omitempty"`  // planned here, with --quick; 0: not known
	Full     time.Duration `json:"full_ns,omitempty"`   // planned here, without
	Repeats  string        `json:"repeats,omitempty"`   // the article whose measurements it repeats
	Unknown  string        `json:"not_known,omitempty"` // why the times are not known
	Needs    string        `json:"needs,omitempty"`     // what it takes beside this machine
}

// ownCluster is the measurement that runs in the reader's own cluster.
func ownCluster() Entry {
	return Entry{Name: "cluster", Question: cluster.Question, Full: cluster.Planned(cluster.Rounds, len(cluster.Usual)),
		Repeats: "CenturyLink Labs, netperf-tester, 2016", Needs: "a Kubernetes cluster"}
}

// List returns all experiments and how long they are planned to take here, the one in the reader's own cluster last.
// For that each of the others tries what this machine can do, in namespaces of its own, which takes root: without, the
// times are not known.
func List(ctx context.Context, agent []string) (l []Entry, err error) {
	defer func() {
		if err == nil {
			l = append(l, ownCluster())
		}
	}()
	for _, e := range Experiments() {
		l = append(l, Entry{Name: e.Name, Question: e.Short, Repeats: e.Repeats})
	}
	if os.Geteuid() != 0 {
		for i := range l {
			l[i].Unknown = "planning tries what this machine can do, as root"
		}
		return l, nil
	}
	b, err := testbed.Open(testbed.Config{Agent: agent})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	for i, e := range Experiments() {
		for quick, d := range map[bool]*time.Duration{true: &l[i].Quick, false: &l[i].Full} {
			if *d, err = e.Planned(ctx, b, experiment.Options{Quick: quick}); err != nil {
				if ctx.Err() != nil {
					return nil, ctx.Err()
				}
				l[i].Unknown = testbed.Brief(err.Error())
			}
		}
	}
	return l, nil
}
