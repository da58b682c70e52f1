package main

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/reachability"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// liveCluster is the value of --against for the objects of the Kubernetes API.
const liveCluster = "cluster"

// compared is what plan --against prints.
type compared struct{ *reachability.Comparison }

// comparePolicies prints what becomes newly allowed or denied where the objects of against become those of --source.
func comparePolicies(c *cobra.Command, n *nodeFlags, o output, against string) error {
	after, config, err := n.cluster(c.Context())
	if err != nil {
		return err
	}
	if config.Own.Source == "" {
		return errors.New("--against compares with the objects of --source: name their folder or file")
	}
	before := input{options: after.options}
	if against == liveCluster {
		if before.objects, before.problems, err = loadCluster(c.Context(), config); err == nil {
			after.objects = overlay(before.objects, after.objects)
		}
	} else {
		before.objects, before.problems, err = manifest.Load(against)
	}
	if err != nil {
		return fmt.Errorf("--against: %w", err)
	}
	old, err := before.evaluate(c)
	if err != nil {
		return err
	}
	now, err := after.evaluate(c)
	if err != nil {
		return err
	}
	of, err := reachability.Compare(old, now)
	if err != nil {
		return err
	}
	k := compared{of}
	err = o.print(out(c), k, k.table)
	if err == nil && len(k.Allowed)+len(k.Denied) > 0 {
		return status{code: 1}
	}
	return err
}

// overlay returns below's objects, with those of above in place of theirs and beside them.
func overlay(below, above []source.Object) []source.Object {
	replaced := map[source.Key]bool{}
	for _, o := range above {
		replaced[source.KeyOf(o)] = true
	}
	out := slices.Clone(above)
	for _, o := range below {
		if !replaced[source.KeyOf(o)] {
			out = append(out, o)
		}
	}
	return out
}

func (k compared) table(p *page) error {
	var err error
	for _, part := range []struct {
		title string
		list  []reachability.Difference
	}{{"NEWLY ALLOWED", k.Allowed}, {"NEWLY DENIED", k.Denied}} {
		if len(part.list) == 0 {
			continue
		}
		rows := [][]string{{part.title, "TO", "PORTS", "NOW", "BEFORE"}}
		for _, d := range part.list {
			rows = append(rows, []string{d.From, d.To, d.Summary, d.Reason, d.Before})
		}
		_, failed := fmt.Fprintln(p)
		err = errors.Join(err, p.table(rows), failed)
	}
	line := fmt.Sprintf("%d pairs of workloads, nodes and CIDRs compared: %d newly allowed, %d newly denied.", k.Compared,
		len(k.Allowed), len(k.Denied))
	if k.Apart > 0 {
		line += fmt.Sprintf(" %d pods that are only before or only after are not compared.", k.Apart)
	}
	return errors.Join(err, p.paragraph("", "", line+" Nothing was changed."))
}
