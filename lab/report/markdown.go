package report

import (
	"fmt"
	"io"
	"strings"
)

// markdown writes the page for a repository's or a wiki's reader. Charts are links to their files.
func (p *page) markdown(w io.Writer) error {
	b := &document{}
	b.say("# %s\n\n%s\n\n*%s*\n", escape(p.Title), escape(p.Question), escape(p.Where))
	for _, sentence := range p.Answer {
		b.say("%s\n", escape(sentence))
	}
	if p.Caution != "" {
		b.say("**%s**\n", escape(p.Caution))
	}
	for _, c := range p.Opening {
		b.say("%s\n", c.markdown())
	}
	b.list("This is not a whole, clean run", p.Warnings)
	if p.Noisy {
		b.list("This run was noisy", p.Noise)
	}
	p.markdownTables(b)
	if p.Counters != nil {
		b.say("## Exact counts\n\n%s", p.Counters.markdown())
	}
	if p.Upkeep != nil {
		b.say("## Exact counts without a baseline\n\n%s", p.Upkeep.markdown())
	}
	b.say("## Method in brief\n\n%s\n", escape(strings.Join(p.Method, "\n\n")))
	b.list("Not measured", p.Missing)
	b.list("Remarks", p.Remarks)
	p.markdownOrigin(b)
	_, err := io.WriteString(w, b.String())
	return err
}

// markdownTables writes the tables and the charts.
func (p *page) markdownTables(b *document) {
	for _, of := range []struct {
		title  string
		tables []*table
	}{{"Claims", some(p.Claims)}, {"Aims", some(p.Aims)}, {"Traffic", p.Answers}, {"Without a baseline", p.Absolute}} {
		if len(of.tables) > 0 {
			b.say("## %s\n", of.title)
		}
		for _, t := range of.tables {
			if t.Title != "" {
				b.say("### %s\n", escape(t.Title))
			}
			b.say("%s", t.markdown())
		}
	}
	if len(p.Charts) > 0 {
		b.say("## Charts\n")
		for _, c := range p.Charts {
			b.say("%s\n", c.markdown())
		}
		for _, g := range p.Ghosts {
			b.say("- hollow: %s", escape(g))
		}
	}
}

// markdown returns a link to the chart's file.
func (d drawn) markdown() string {
	return fmt.Sprintf("![%s](%s/%s.svg)", escape(strings.ReplaceAll(d.Text, "]", ")")), ChartsDir, d.Name)
}

// markdownOrigin writes where the numbers come from.
func (p *page) markdownOrigin(b *document) {
	b.say("## Machine\n")
	for _, m := range append(p.Machine, p.More...) {
		b.say("- %s: %s", escape(m.Name), escape(m.Value))
	}
	if !p.Noisy {
		b.say("\n## Noise\n\n%s", escape(strings.Join(p.Noise, " ")))
	}
	b.say("\n## Raw files, and how to repeat this\n")
	for _, f := range p.Files {
		b.say("- `%s`: %s; %s, SHA-256 %s", f.Name, f.Text, size(f.Size), f.Hash)
	}
	if p.Command != "" {
		b.say("\n```sh\n%s\n```", p.Command)
	}
}

// document is Markdown as it is written.
type document struct{ strings.Builder }

// say writes a line.
func (d *document) say(format string, a ...any) { fmt.Fprintf(d, format+"\n", a...) }

// list writes a section that is a list, if it holds anything.
func (d *document) list(title string, l []string) {
	if len(l) == 0 {
		return
	}
	d.say("## %s\n", title)
	for _, s := range l {
		d.say("- %s", escape(s))
	}
	d.say("")
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
	if t.Remark != "" {
		fmt.Fprintf(&b, "\n%s\n", escape(t.Remark))
	}
	return b.String()
}
