package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"strings"
)

//go:embed report.html.tmpl
var htmlText string

//go:embed report.css
var css string

var htmlTemplate = template.Must(template.New("report").Funcs(template.FuncMap{
	"css": func() template.CSS { return template.CSS(css) },
	// our own drawing: every text in it is escaped
	"svg":    func(d drawn) template.HTML { return template.HTML(strings.TrimSpace(string(d.SVG))) },
	"size":   size,
	"num":    func(t *table, i int) bool { return t.numeric(i) },
	"narrow": func(d drawn) template.HTML { return template.HTML(strings.TrimSpace(string(d.narrow))) },
	"wide":   func(d drawn) bool { return d.Kind == wide },
	"short":  func(s string) string { return s[:12] },
}).Parse(htmlText))

func (p *page) html(w io.Writer) error { return htmlTemplate.Execute(w, p) }

// size returns "1.2 MiB".
func size(n int) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d bytes", n)
}
