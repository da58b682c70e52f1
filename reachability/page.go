package reachability

import (
	"bytes"
	_ "embed" // the page
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

//go:embed page.html
var pageHTML []byte

// maxMembers is how many members of a group are named on the page.
const maxMembers = 20

// The data of the page.
type (
	pageData struct {
		Summary string        `json:"summary"`
		Groups  []pageGroup   `json:"groups"`
		Reasons []string      `json:"reasons"`
		Cells   [][]*pageCell `json:"cells"`
	}
	pageGroup struct {
		Name      string   `json:"name"`
		Namespace string   `json:"ns"`
		Members   []string `json:"members"`
		Count     int      `json:"count"`
		Ports     []string `json:"ports"`
	}
	// pageCell has a letter for each listed port and one for all others, and the indexes of their reasons.
	pageCell struct {
		Fates   string `json:"f"`
		Reasons []int  `json:"r"`
	}
)

// Summary returns how many pods, workloads and pairs of them there are, in a sentence.
func (m *Matrix) Summary() string {
	pods, workloads, all, some, none := 0, 0, 0, 0, 0
	templates := map[string]bool{}
	for i, g := range m.Groups {
		if g.Kind == Pods {
			workloads++
			for _, name := range g.Members {
				if of, is := templateOf(name); is {
					templates[of] = true
				} else {
					pods++
				}
			}
		}
		for _, c := range m.Cells[i] {
			switch {
			case c == nil:
			case c.All:
				all++
			case c.None:
				none++
			default:
				some++
			}
		}
	}
	members := fmt.Sprintf("%d pods", pods)
	if n := len(templates); n > 0 {
		members = strings.TrimPrefix(members+fmt.Sprintf(" and %d pod templates", n), "0 pods and ")
	}
	s := fmt.Sprintf("%s of %d workloads; of %d pairs %d may use every port, %d some ports, %d none", members, workloads,
		all+some+none, all, some, none)
	if m.More > 0 {
		s += fmt.Sprintf("; %d further ports are not listed", m.More)
	}
	return s
}

// WritePage writes the matrix as one HTML page, which needs nothing else.
func (m *Matrix) WritePage(w io.Writer) error {
	d := pageData{Summary: m.Summary()}
	index := map[string]int{}
	reason := func(x Decided) int {
		if x.Fate == "" {
			return -1
		}
		i, known := index[x.Reason]
		if !known {
			i = len(d.Reasons)
			index[x.Reason], d.Reasons = i, append(d.Reasons, x.Reason)
		}
		return i
	}
	for i, g := range m.Groups {
		of := pageGroup{g.Name, g.Namespace, g.Members[:min(len(g.Members), maxMembers)], len(g.Members), []string{}}
		for _, p := range m.Ports[i] {
			of.Ports = append(of.Ports, p.String())
		}
		d.Groups = append(d.Groups, of)
		row := make([]*pageCell, len(m.Groups))
		for j, c := range m.Cells[i] {
			if c == nil {
				continue
			}
			row[j] = &pageCell{}
			for _, x := range append(slices.Clone(c.Ports), c.Rest) {
				row[j].Fates += string(x.letter(c.All))
				row[j].Reasons = append(row[j].Reasons, reason(x))
			}
		}
		d.Cells = append(d.Cells, row)
	}
	b, err := json.Marshal(d) // escapes <, > and &
	if err != nil {
		return err
	}
	before, after, _ := bytes.Cut(pageHTML, []byte(">DATA<"))
	for _, part := range [][]byte{before, []byte(">"), b, []byte("<"), after} {
		if _, err := w.Write(part); err != nil {
			return err
		}
	}
	return nil
}

// letter returns the letter of a fate; of ports that there are none, that of all.
func (d Decided) letter(all bool) byte {
	switch {
	case d.Fate == Allowed, d.Fate == "" && all:
		return '+'
	case d.Fate == Mixed:
		return '~'
	}
	return '-'
}
