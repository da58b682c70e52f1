package experiment

import (
	"bytes"
	"context"
	"os"
	"time"

	"fairlead.dev/fairlead/lab/instructions"
	"fairlead.dev/fairlead/lab/result"
)

// ExactRounds is how many rounds an exact run has, unless the user says otherwise: as few as bound a median.
const ExactRounds = 7

// quickExactRounds is how many a quick one has at most: counts of rounds hardly differ, and all of them take long.
const quickExactRounds = 3

// NoTime is why an exact run leaves measures of time out that aren't processor time.
const NoTime = "they are times, and an exact machine's clock jumps over idle time"

// counted returns the design of an exact run: each measure of which the operations are traced has its parts, on each
// other in a picture. Those are the measures that are compared with the baseline, unless they are processor time.
func counted(d result.Design) result.Design {
	d = d.Counted()
	var all []result.Measure
	for _, m := range d.Measures {
		all = append(all, m)
		if m.Unit != result.Instructions || !m.Ratio || m.From != "" || m.Counted != "" {
			continue
		}
		picture := result.Picture{ID: m.ID + "-parts", Kind: result.Stack, Title: m.Title + ": where its instructions go",
			Alone: true}
		for _, p := range instructions.PartsOf() {
			part := result.Measure{ID: result.PartID(m.ID, p.ID), Title: m.Title + ": " + p.Title, Unit: result.Instructions,
				Stat: result.Value, Exact: true, Detail: true, Text: "of one operation, by the addresses of all its instructions"}
			all, picture.Measures = append(all, part), append(picture.Measures, part.ID)
		}
		d.Pictures = append(d.Pictures, picture)
	}
	d.Measures = all
	return d
}

// foldStep returns the step that says where the traced operations' instructions went.
func foldStep(out *result.Writer) Step {
	return Step{"folding traces", 10 * time.Second, func(context.Context) error {
		b, err := os.ReadFile("/proc/kallsyms")
		if err != nil {
			return err
		}
		s, err := instructions.ReadSymbols(bytes.NewReader(b))
		if err != nil {
			return err
		}
		return out.Folded(func(trace []byte) (string, map[string]float64, error) {
			addresses, err := instructions.Addresses(trace)
			if err != nil {
				return "", nil, err
			}
			if addresses, err = instructions.Shortest(addresses); err != nil {
				return "", nil, err
			}
			stacks, err := instructions.Fold(addresses, s)
			values := map[string]float64{}
			for id, n := range stacks.Parts() {
				values[result.PartID("", id)] = float64(n)
			}
			return stacks.String(), values, err
		})
	}}
}
