package flowlog

import (
	"maps"
	"slices"
)

// Log is what several nodes recorded.
type Log struct {
	Headers []Header
	Pods    map[string]Pod
	Flows   []Seen // sorted by key
}

// Seen is a flow and the nodes that saw it.
type Seen struct {
	Flow
	Nodes []string // sorted
}

// SeenBy reports whether a node saw the flow.
func (s Seen) SeenBy(node string) bool { return slices.Contains(s.Nodes, node) }

// Nodes returns the nodes that recorded.
func (l *Log) Nodes() (nodes []string) {
	for _, h := range l.Headers {
		nodes = append(nodes, h.Node)
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// Missing returns how many connections are in no flow, as Header has them.
func (l *Log) Missing() (lost, beyond, unclear uint64) {
	for _, h := range l.Headers {
		lost, beyond, unclear = lost+h.Lost, beyond+h.Beyond, unclear+h.Unclear
	}
	return lost, beyond, unclear
}

// Merge returns what files have together. Connections between nodes are seen by both, so that of a flow that several
// nodes saw the highest count is returned; those of one node's files are added. What policies
// denied alone is left out.
func Merge(files ...*File) *Log {
	l := &Log{Pods: map[string]Pod{}}
	type at struct {
		Key
		node string
	}
	counts, seen := map[at]uint64{}, map[Key]*Seen{}
	for _, f := range files {
		l.Headers = append(l.Headers, f.Header)
		maps.Copy(l.Pods, f.Pods)
		for _, flow := range f.Flows {
			if flow.Count == 0 {
				continue
			}
			k := flow.Key()
			s := seen[k]
			if s == nil {
				s = &Seen{Flow: flow}
				s.Count, s.Denied = 0, 0
				seen[k] = s
			}
			here := at{k, f.Node}
			counts[here] += flow.Count
			s.Count = max(s.Count, counts[here])
			if !s.SeenBy(f.Node) {
				s.Nodes = append(s.Nodes, f.Node)
				slices.Sort(s.Nodes)
			}
		}
	}
	for _, s := range seen {
		l.Flows = append(l.Flows, *s)
	}
	slices.SortFunc(l.Flows, func(a, b Seen) int { return a.Key().Compare(b.Key()) })
	return l
}
