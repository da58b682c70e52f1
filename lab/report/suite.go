package report

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/chart"
	"fairlead.dev/fairlead/lab/result"
)

// The file of a run of several experiments, and the version of its format.
const (
	SuiteFile   = "all.json"
	SuiteSchema = 1
)

// Suite is a run of several experiments in turn, each with a folder of its own below the suite's.
type Suite struct {
	Schema  int           `json:"schema"`
	Command []string      `json:"command"`
	Started time.Time     `json:"started"`
	Ended   time.Time     `json:"ended"`
	Within  time.Duration `json:"within_ns,omitempty"` // that it may take; 0: any
	Outcome string        `json:"outcome,omitempty"`   // "" for one that came to its end
	Parts   []SuitePart   `json:"parts"`
	Claims  []SuiteClaim  `json:"claims"`
}

// SuitePart is one experiment of several.
type SuitePart struct {
	Experiment string        `json:"experiment"`
	Question   string        `json:"question"`
	Folder     string        `json:"folder,omitempty"`     // below the suite's; "": it measured nothing
	Elapsed    time.Duration `json:"elapsed_ns,omitempty"` // with its preparation
	Outcome    string        `json:"outcome,omitempty"`    // why it did not run, or not to its end
}

// SuiteClaim is a claim that experiments test by aims whose ids begin with its own.
type SuiteClaim struct {
	ID     string `json:"id"` // such as "C1"
	Text   string `json:"text"`
	Source string `json:"source"`
	By     string `json:"by,omitempty"` // the experiment that tests it
}

// Write writes the suite's file into its folder.
func (s Suite) Write(dir string) error { return result.WriteJSON(filepath.Join(dir, SuiteFile), s) }

// IsSuite reports whether a folder is of a run of several experiments.
func IsSuite(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, SuiteFile))
	return err == nil
}

//go:embed suite.html.tmpl
var suiteText string

var suiteTemplate = template.Must(template.Must(htmlTemplate.Clone()).New("suite").Funcs(template.FuncMap{
	"span": span}).Parse(suiteText))

// suitePage is what people read of a suite.
type suitePage struct {
	Suite
	Where   string
	Answer  []string
	Charts  []drawn
	Rows    []suiteRow
	Command string
}

// suiteRow is what became of a claim, or of a part of one.
type suiteRow struct {
	ID, Text, Source      string
	Says, Interval, Limit string
	Resolution            string // what the run can't tell from nothing
	Outcome               analysis.Outcome
	Sign, Class, Why      string
	Experiment, Link      string
	claim                 chart.Claim
}

// BuildSuite makes the page of a suite from its file and its parts' summaries, in place of an older one.
func BuildSuite(dir string) error {
	p, err := newSuitePage(dir)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := suiteTemplate.Execute(&b, p); err != nil {
		return fmt.Errorf("report on %s: %w", dir, err)
	}
	return write(filepath.Join(dir, HTMLFile), b.Bytes())
}

// RebuildSuite makes the reports of all parts of a suite again, then its page.
func RebuildSuite(dir string) error {
	s, err := readSuite(dir)
	if err != nil {
		return err
	}
	for _, p := range s.Parts {
		if p.Folder != "" {
			if err := Build(filepath.Join(dir, p.Folder)); err != nil {
				return err
			}
		}
	}
	return BuildSuite(dir)
}

func readSuite(dir string) (s Suite, err error) {
	b, err := os.ReadFile(filepath.Join(dir, SuiteFile))
	if err != nil {
		return s, fmt.Errorf("read a run of several experiments: %w", err)
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("read %s: %w", filepath.Join(dir, SuiteFile), err)
	}
	if s.Schema != SuiteSchema {
		return s, fmt.Errorf("read %s: its schema is %d; this program reads %d", dir, s.Schema, SuiteSchema)
	}
	for _, p := range s.Parts {
		if p.Folder != "" && !filepath.IsLocal(p.Folder) {
			return s, fmt.Errorf("read %s: the folder %q of %s is not below it", dir, p.Folder, p.Experiment)
		}
	}
	return s, nil
}

func newSuitePage(dir string) (*suitePage, error) {
	s, err := readSuite(dir)
	if err != nil {
		return nil, err
	}
	summaries := map[string]analysis.Summary{} // by folder
	for _, p := range s.Parts {
		if p.Folder == "" {
			continue
		}
		var sum analysis.Summary
		b, err := os.ReadFile(filepath.Join(dir, p.Folder, analysis.SummaryFile))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = json.Unmarshal(b, &sum)
		}
		if err != nil {
			return nil, fmt.Errorf("read the summary of %s: %w", p.Experiment, err)
		}
		summaries[p.Folder] = sum
	}
	p := &suitePage{Suite: s, Command: shell(s.Command),
		Where: s.Started.UTC().Format("2 January 2006, 15:04 UTC") + " · " + span(s.Ended.Sub(s.Started))}
	for _, c := range s.Claims {
		p.Rows = append(p.Rows, claimRows(s, c, summaries)...)
	}
	p.Answer = p.sentences()
	p.draw()
	return p, nil
}

// draw makes a chart for each source of claims: one for all would not fit on a printed page.
func (p *suitePage) draw() {
	var sources []string
	for _, c := range p.Claims {
		if !slices.Contains(sources, c.Source) {
			sources = append(sources, c.Source)
		}
	}
	for i, source := range sources {
		f := chart.Forest{Better: "← it holds", Frame: chart.Frame{ID: fmt.Sprint("claims-", i+1), Width: 920, Title: source,
			Footer: p.Where}}
		if i == 0 {
			f.Sub = "each number over its bound, with its 95 % interval; a grey box is a bound on both sides, in which the " +
				"whole interval must lie"
		}
		n := map[string]int{}
		for _, c := range p.Claims {
			if c.Source != source {
				continue
			}
			n[whole(p.of(c))]++
			for _, r := range p.of(c) {
				f.Claims = append(f.Claims, r.claim)
			}
		}
		f.Title += ": " + outcomesOf(n)
		p.Charts = append(p.Charts, drawing(f.ID, wide, f.Title, f))
	}
}

// outcomesOf returns "3 confirmed, 1 refuted in part", of numbers by outcome words.
func outcomesOf(n map[string]int) string {
	var l []string
	for _, word := range outcomeWords {
		if n[word] > 0 {
			l = append(l, fmt.Sprintf("%d %s", n[word], word))
		}
	}
	return strings.Join(l, ", ")
}

// claimRows returns what the parts say of a claim: a row for each aim that tests it, or one that says why there is
// none.
func claimRows(s Suite, c SuiteClaim, summaries map[string]analysis.Summary) (l []suiteRow) {
	for _, p := range s.Parts {
		sum := summaries[p.Folder]
		for _, a := range sum.Aims {
			if a.Claim == "" || a.ID != c.ID && !strings.HasPrefix(a.ID, c.ID+",") {
				continue
			}
			r := suiteRow{ID: a.ID, Text: a.Text, Source: a.Claim, Says: "–", Limit: limit(a.Aim, sum.Design),
				Outcome: a.Outcome, Why: a.Why, Experiment: p.Experiment,
				Link: p.Folder + "/" + HTMLFile, claim: claimOf(a, sum.Design)}
			if a.Got != nil {
				r.Says, r.Resolution = quantity(a.Aim, sum.Design, a.Got.Value), resolutionOf(sum, a.Measure)
			}
			if a.Got != nil && a.Got.CI.Low == a.Got.CI.High {
				r.Resolution = "counted"
			} else if a.Got != nil {
				r.Interval = quantity(a.Aim, sum.Design, a.Got.CI.Low) + " – " + quantity(a.Aim, sum.Design, a.Got.CI.High)
			}
			l = append(l, r)
		}
	}
	if len(l) == 0 {
		l = []suiteRow{{ID: c.ID, Text: c.Text, Source: c.Source, Says: "–", Outcome: analysis.NotTestable,
			Why:   untested(s, c),
			claim: chart.Claim{ID: c.ID, Text: c.Text, Outcome: chart.Missing, Says: string(analysis.NotTestable)}}}
	}
	for i := range l {
		l[i].Sign, l[i].Class = outcomeSign(l[i].Outcome), outcomeClass(l[i].Outcome)
	}
	return l
}

// untested returns why no part has tested a claim.
func untested(s Suite, c SuiteClaim) string {
	for _, p := range s.Parts {
		switch {
		case p.Experiment != c.By:
		case p.Outcome != "":
			return c.By + ", which tests it: " + p.Outcome
		default:
			return c.By + ", which tests it, had no arm for it here"
		}
	}
	return "the experiment that tests it was not run"
}

// untestable returns the claims that nothing here can test, by reason: "Not testable here: C7 (…); C11 (…)."; "": none.
func (p *suitePage) untestable(ids []string) string {
	var reasons []string
	by := map[string][]string{}
	for _, r := range p.Rows {
		claim, _, _ := strings.Cut(r.ID, ",")
		if !slices.Contains(ids, claim) || slices.Contains(by[r.Why], claim) {
			continue
		}
		if by[r.Why] == nil {
			reasons = append(reasons, r.Why)
		}
		by[r.Why] = append(by[r.Why], claim)
	}
	for i, why := range reasons {
		reasons[i] = strings.Join(by[why], ", ") + " (" + why + ")"
	}
	if len(reasons) == 0 {
		return ""
	}
	return "Not testable here: " + strings.Join(reasons, "; ") + "."
}

// resolutionOf returns "resolution ±0.6 %", or "counted".
func resolutionOf(s analysis.Summary, measure string) string {
	m, _ := s.Design.Measure(measure)
	r, ok := s.Resolution[measure]
	switch {
	case m.Exact:
		return "counted"
	case !ok || !compared(m):
		return ""
	case m.More:
		return "resolution ±" + amount(r.Half, m.Unit)
	}
	return "resolution " + plusMinus(r.Half)
}

// of returns the rows of a claim.
func (p *suitePage) of(c SuiteClaim) []suiteRow {
	return slices.DeleteFunc(slices.Clone(p.Rows), func(r suiteRow) bool {
		return r.ID != c.ID && !strings.HasPrefix(r.ID, c.ID+",")
	})
}

// mostOutcome is how long the reason may be that an answer states of what did not come to its end.
const mostOutcome = 60

// outcomeWords are what claims as wholes can come to.
var outcomeWords = []string{"confirmed", "confirmed in part", "refuted", "refuted in part", "inconclusive",
	string(analysis.NotTestable)}

// tally returns the claims' ids by what they come to.
func (p *suitePage) tally() map[string][]string {
	ids := map[string][]string{}
	for _, c := range p.Claims {
		word := whole(p.of(c))
		ids[word] = append(ids[word], c.ID)
	}
	return ids
}

// sentences returns the answer: what became of the claims, which were refuted, and what did not run.
func (p *suitePage) sentences() []string {
	ids, n := p.tally(), map[string]int{}
	for word, l := range ids {
		n[word] = len(l)
	}
	text := []string{fmt.Sprintf("Of %s: %s.", plural(len(p.Claims), "claim"), outcomesOf(n))}
	for _, word := range outcomeWords[:4] { // these say something
		if len(ids[word]) > 0 {
			text = append(text, upper(word)+": "+p.named(ids[word])+".")
		}
	}
	if l := ids["inconclusive"]; len(l) > 0 {
		text = append(text, "Inconclusive, for the noise and the length of this run: "+strings.Join(l, ", ")+".")
	}
	if why := p.untestable(ids[string(analysis.NotTestable)]); why != "" {
		text = append(text, why)
	}
	var missing []string
	for _, x := range p.Parts {
		if x.Outcome != "" {
			why := x.Outcome
			if len(why) > mostOutcome { // all of it stands in the table
				why, _, _ = strings.Cut(why, ": ")
			}
			missing = append(missing, x.Experiment+" ("+why+")")
		}
	}
	if len(missing) == 0 {
		return append(text, fmt.Sprintf("All %s ran to their end.", plural(len(p.Parts), "experiment")))
	}
	return append(text, fmt.Sprintf("Of %s, not to their end: %s.", plural(len(p.Parts), "experiment"),
		strings.Join(missing, "; ")))
}

// named returns claims with what they say: "C10 (iptables is faster than userspace); C18 (…)".
func (p *suitePage) named(ids []string) string {
	var l []string
	for _, c := range p.Claims {
		if slices.Contains(ids, c.ID) {
			l = append(l, c.ID+" ("+c.Text+")")
		}
	}
	return strings.Join(l, "; ")
}

// whole returns what a claim's rows mean together.
func whole(rows []suiteRow) string {
	n := map[analysis.Outcome]int{}
	for _, r := range rows {
		n[r.Outcome]++
	}
	undecided := n[analysis.Undecided] + n[analysis.NotMeasured]
	switch yes, no := n[analysis.Confirmed], n[analysis.Refuted]; {
	case no > 0 && yes+undecided == 0:
		return "refuted"
	case no > 0:
		return "refuted in part"
	case yes > 0 && undecided == 0:
		return "confirmed"
	case yes > 0:
		return "confirmed in part"
	case undecided > 0:
		return "inconclusive"
	}
	return string(analysis.NotTestable)
}

// ShowSuite writes a suite for a terminal of so many columns.
func ShowSuite(w io.Writer, dir string, width int) error {
	p, err := newSuitePage(dir)
	if err != nil {
		return err
	}
	var b strings.Builder
	for _, s := range p.Answer {
		b.WriteString(wrapped(s, width) + "\n")
	}
	var rows []Bar
	for word, ids := range p.tally() {
		rows = append(rows, Bar{word, fmt.Sprint(len(ids)), float64(len(ids))})
	}
	slices.SortFunc(rows, func(x, y Bar) int {
		return slices.Index(outcomeWords, x.Name) - slices.Index(outcomeWords, y.Name)
	})
	b.WriteString(Bars(rows, width) + "\n")
	cols := []column{{left: true}, {left: true}, {left: true, title: "measured"},
		{left: true, title: "experiment", drop: 2},
		{left: true, title: "claim", drop: 1, cut: true}}
	for _, r := range p.Rows {
		says := strings.TrimSpace(r.Says + " of " + r.Limit)
		if r.Says == "–" {
			says = string(r.Outcome)
		}
		for i, text := range []string{r.Sign, r.ID, says, r.Experiment, r.Text} {
			cols[i].cells = append(cols[i].cells, text)
		}
	}
	render(&b, cols, width)
	_, err = io.WriteString(w, b.String())
	return err
}
