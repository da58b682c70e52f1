package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/agent/escape"
)

// Output is the flag -o of commands that print for people and for programs.
type Output string

// Wide has tables print all columns.
const Wide Output = "wide"

// Add adds the flag to a command.
func (o *Output) Add(c *cobra.Command) {
	c.Flags().StringVarP((*string)(o), "output", "o", "", "output format: json, yaml, or wide for all columns")
	c.RegisterFlagCompletionFunc("output",
		cobra.FixedCompletions([]string{"json", "yaml", string(Wide)}, cobra.ShellCompDirectiveNoFileComp))
}

// Page is what a command prints on for people.
type Page struct {
	io.Writer
	Columns int  // of the terminal; 0: no limit
	Wide    bool // all columns of tables are asked for
}

// Out returns the page that a command prints on: what objects, processes and servers say can't control a terminal
// there.
func Out(c *cobra.Command) *Page {
	return &Page{Writer: escape.Writer(c.OutOrStdout()), Columns: columns(c.OutOrStdout())}
}

// columns returns the width of a terminal, or $COLUMNS; 0 where there is neither.
func columns(w io.Writer) int {
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
		return n
	}
	if f, ok := w.(*os.File); ok {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil {
			return n
		}
	}
	return 0
}

// Check returns an error for a format that there is none of: before minutes are spent on what is to be printed.
func (o Output) Check() error {
	if slices.Contains([]Output{"", Wide, "json", "yaml"}, o) {
		return nil
	}
	return fmt.Errorf("invalid --output %q: use json, yaml or wide", string(o))
}

// Print writes v as the flag says, or calls table.
func (o Output) Print(p *Page, v any, table func(*Page) error) error {
	switch o {
	case "":
		return table(p)
	case Wide:
		return table(&Page{Writer: p.Writer, Wide: true})
	case "json":
		e := json.NewEncoder(p)
		e.SetIndent("", "  ")
		return e.Encode(v)
	case "yaml":
		b, err := yaml.Marshal(v)
		if err == nil {
			_, err = p.Write(b)
		}
		return err
	}
	return o.Check()
}

const (
	Gap       = 2  // columns between two cells
	Narrowest = 12 // columns that a cell is not wrapped below
)

// Table writes rows in aligned columns, the first as heading. Cells that the page is too narrow for are wrapped, the
// widest columns first.
func (p *Page) Table(rows [][]string) error {
	var widths []int
	for i, r := range rows {
		rows[i] = slices.Clone(r)
		for j, c := range r {
			rows[i][j] = escape.String(c)
			if j == len(widths) {
				widths = append(widths, 0)
			}
			widths[j] = max(widths[j], utf8.RuneCountInString(rows[i][j]))
		}
	}
	for total := sum(widths) + Gap*(len(widths)-1); p.Columns > 0 && total > p.Columns; total-- {
		i := slices.Index(widths, slices.Max(widths))
		if widths[i] <= Narrowest {
			break
		}
		widths[i]--
	}
	for _, r := range rows {
		if err := p.row(r, widths); err != nil {
			return err
		}
	}
	return nil
}

// row writes one row, on as many lines as its tallest cell has.
func (p *Page) row(cells []string, widths []int) error {
	wrapped, height := make([][]string, len(cells)), 1
	for i, c := range cells {
		wrapped[i] = Wrap(c, widths[i])
		height = max(height, len(wrapped[i]))
	}
	for y := range height {
		line := ""
		for i, w := range wrapped {
			cell := ""
			if y < len(w) {
				cell = w[y]
			}
			line += fmt.Sprintf("%-*s", widths[i]+Gap, cell)
		}
		if _, err := fmt.Fprintln(p, strings.TrimRight(line, " ")); err != nil {
			return err
		}
	}
	return nil
}

// Paragraph writes text wrapped to the page, each line after the first with an indent.
func (p *Page) Paragraph(first, indent, text string) error {
	width := 0
	if p.Columns > 0 {
		width = max(p.Columns-utf8.RuneCountInString(indent), Narrowest)
	}
	for _, line := range Wrap(escape.String(text), width) {
		if _, err := fmt.Fprintln(p, first+line); err != nil {
			return err
		}
		first = indent
	}
	return nil
}

// List writes sentences below a title, nothing where there are none.
func (p *Page) List(title string, sentences []string) error {
	if len(sentences) == 0 {
		return nil
	}
	_, err := fmt.Fprintf(p, "\n%s\n", title)
	for _, s := range sentences {
		err = errors.Join(err, p.Paragraph("  - ", "    ", s))
	}
	return err
}

// Wrap breaks text into lines of at most width columns: at spaces, and within a word that is longer. Without a width
// text is one line.
func Wrap(text string, width int) (lines []string) {
	line := []rune{}
	for _, word := range strings.Fields(text) {
		w := []rune(word)
		if len(line) > 0 && (width == 0 || len(line)+1+len(w) <= width) {
			line = append(append(line, ' '), w...)
			continue
		}
		if len(line) > 0 {
			lines, line = append(lines, string(line)), nil
		}
		for width > 0 && len(w) > width {
			lines, w = append(lines, string(w[:width])), w[width:]
		}
		line = w
	}
	return append(lines, string(line))
}

func sum(l []int) (n int) {
	for _, x := range l {
		n += x
	}
	return n
}

// SortedKeys returns a map's keys in order.
func SortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
