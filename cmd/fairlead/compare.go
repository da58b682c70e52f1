package main

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/reachability"
	"fairlead.dev/fairlead/resolve/policy/convert"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// liveCluster is the value of --against for the objects of the Kubernetes API.
const liveCluster = "cluster"

// compared is what plan --against prints.
type compared struct{ *reachability.Comparison }

// comparePolicies prints what becomes newly allowed or denied where the objects of against become those of --source.
func comparePolicies(c *cobra.Command, n *nodeFlags, o cli.Output, against string) error {
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
			after.objects, after.part = overlay(before.objects, after.objects), false
		}
	} else {
		if before.objects, before.problems, err = manifest.LoadTemplates(against); err == nil {
			err = before.convert(against)
		}
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
	err = o.Print(cli.Out(c), k, k.table)
	if err == nil && len(k.Allowed)+len(k.Denied) > 0 {
		return cli.Status{Code: 1}
	}
	return err
}

// convert adds the policies of older kinds in a folder or file as policy convert writes them, in place of the problems
// that they are not read.
func (i *input) convert(path string) error {
	if path == manifest.Stdin {
		return nil // which is read
	}
	type position struct {
		file string
		line int
	}
	converted := map[position]bool{}
	err := manifest.Files(path, func(file string, text []byte) {
		policies, problems := convert.Policies(text)
		for _, p := range policies {
			converted[position{file, p.Line}] = true
			i.objects = append(i.objects, p.Object)
		}
		for _, p := range problems {
			converted[position{file, p.Line}] = true
			p.File = file
			i.problems = append(i.problems, p)
		}
	})
	i.problems = slices.DeleteFunc(i.problems, func(p source.Problem) bool {
		return p.Reason != convert.NotConverted && converted[position{p.File, p.Line}]
	})
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

func (k compared) table(p *cli.Page) error {
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
		err = errors.Join(err, p.Table(rows), failed)
	}
	line := fmt.Sprintf("%d pairs of workloads, nodes and CIDRs compared: %d newly allowed, %d newly denied.", k.Compared,
		len(k.Allowed), len(k.Denied))
	if k.Apart > 0 {
		line += fmt.Sprintf(" %d pods that are only before or only after are not compared.", k.Apart)
	}
	return errors.Join(err, p.Paragraph("", "", line+" Nothing was changed."))
}
