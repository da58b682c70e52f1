package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/result"
)

//go:embed advice.html.tmpl
var adviceText string

var adviceTemplate = template.Must(template.Must(htmlTemplate.Clone()).New("advice").Parse(adviceText))

// Advice is what a page of advice says beside the numbers of the run that it rests on.
type Advice struct {
	Title, Question string
	Answer          []string   // sentences
	Commands        []string   // to switch; none: nothing is to be switched
	Rows            [][]string // of a table, the first its heading
	Sections        []Section
}

// Section is a titled list of sentences. Without any it is left out.
type Section struct {
	Title string
	List  []string
}

// WriteAdvice writes advice as one page that needs nothing else, with the charts and tables of a run's folder.
func WriteAdvice(w io.Writer, dir string, a Advice) error {
	r, err := result.Read(dir)
	if err != nil {
		return err
	}
	s, err := analysis.Summarize(r)
	if err != nil {
		return err
	}
	p, err := newPage(r, s, nil)
	if err != nil {
		return fmt.Errorf("report on %s: %w", dir, err)
	}
	t := &table{}
	for i, row := range a.Rows {
		if i == 0 {
			t.Head = row
			continue
		}
		cells := make([]cell, len(row))
		for k, text := range row {
			cells[k].Text = text
		}
		t.Rows = append(t.Rows, cells)
	}
	return adviceTemplate.Execute(w, struct {
		Advice
		Table *table
		Run   *page
	}{a, t, p})
}
