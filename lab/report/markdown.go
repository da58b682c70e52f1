package report

import (
	"fmt"
	"io"
	"strings"
)

// markdown writes the page for a repository's or a wiki's reader. Charts are links to their files.
func (p *page) markdown(w io.Writer) error {
	var b strings.Builder
	say := func(format string, a ...any) { fmt.Fprintf(&b, format+"\n", a...) }
	list := func(title string, l []string) {
		if len(l) == 0 {
			return
		}
		say("## %s\n", title)
		for _, s := range l {
			say("- %s", escape(s))
		}
		say("")
	}
	say("# %s\n\n%s\n\n*%s*\n", escape(p.Title), escape(p.Question), escape(p.Where))
	list("This is not a whole, clean run", p.Warnings)
	if p.Noisy {
		list("This run was noisy", p.Noise)
	}
	list("Verdict", p.Verdict)
	for _, of := range []struct {
		title  string
		tables []*table
	}{{"Claims", some(p.Claims)}, {"Aims", some(p.Aims)}, {"Traffic", p.Answers}, {"Without a baseline", p.Absolute}} {
		if len(of.tables) > 0 {
			say("## %s\n", of.title)
		}
		for _, t := range of.tables {
			if t.Title != "" {
				say("### %s\n", escape(t.Title))
			}
			say("%s", t.markdown())
		}
	}
	if len(p.Charts) > 0 {
		say("## Charts\n")
		for _, c := range p.Charts {
			say("![%s](%s/%s.svg)\n", escape(strings.ReplaceAll(c.Text, "]", ")")), ChartsDir, c.Name)
		}
		for _, g := range p.Ghosts {
			say("- hollow: %s", escape(g))
		}
	}
	if p.Counters != nil {
		say("## Exact counts\n\n%s", p.Counters.markdown())
	}
	if p.Upkeep != nil {
		say("## Exact counts without a baseline\n\n%s", p.Upkeep.markdown())
	}
	say("## Method in brief\n\n%s\n", escape(strings.Join(p.Method, "\n\n")))
	list("Not measured", p.Missing)
	list("Remarks", p.Remarks)
	say("## Machine\n")
	for _, m := range append(p.Machine, p.More...) {
		say("- %s: %s", escape(m.Name), escape(m.Value))
	}
	if !p.Noisy {
		say("\n## Noise\n\n%s", escape(strings.Join(p.Noise, " ")))
	}
	say("\n## Raw files, and how to repeat this\n")
	for _, f := range p.Files {
		say("- `%s`: %s; %s, SHA-256 %s", f.Name, f.Text, size(f.Size), f.Hash)
	}
	if p.Command != "" {
		say("\n```sh\n%s\n```", p.Command)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// escape keeps text from being read as Markdown or HTML.
func escape(s string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "*", `\*`, "_", `\_`, "`", "'", "[", `\[`, "#", `\#`).Replace(s)
}

func (t *table) markdown() string {
	var b strings.Builder
	var group []string // the heading over each column
	for _, g := range t.Groups {
		for range g.Cols {
			group = append(group, g.Title)
		}
	}
	row := func(cells []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	var titles, rule []string
	for i, h := range t.Head {
		if group != nil && group[i] != "" {
			h = strings.TrimSuffix(group[i]+", "+h, ", ")
		}
		titles = append(titles, escape(h))
		rule = append(rule, map[bool]string{true: "--:", false: "---"}[t.numeric(i)])
	}
	row(titles)
	row(rule)
	for _, r := range t.Rows {
		var cells []string
		for _, c := range r {
			s := escape(c.Text)
			if c.Small != "" {
				s += " (" + escape(c.Small) + ")"
			}
			cells = append(cells, s)
		}
		row(cells)
	}
	if t.Note != "" {
		fmt.Fprintf(&b, "\n%s\n", escape(t.Note))
	}
	return b.String()
}
