package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// demand is what a selector wants of one label.
type demand struct {
	key    string
	op     metav1.LabelSelectorOperator
	values []string // sorted
}

// selector is a label selector: all demands must hold. It is sorted, so that equal ones have equal texts.
type selector []demand

// readSelector returns what s says. The error names what can't be read.
func readSelector(s *metav1.LabelSelector) (selector, error) {
	out := make(selector, 0, len(s.MatchLabels)+len(s.MatchExpressions))
	for k, v := range s.MatchLabels {
		out = append(out, demand{k, metav1.LabelSelectorOpIn, []string{v}})
	}
	for _, e := range s.MatchExpressions {
		d := demand{e.Key, e.Operator, nil}
		switch e.Operator {
		case metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn:
			if len(e.Values) == 0 {
				return nil, fmt.Errorf("operator %s needs values", e.Operator)
			}
			d.values = slices.Compact(slices.Sorted(slices.Values(e.Values)))
		case metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist:
			if len(e.Values) > 0 {
				return nil, fmt.Errorf("operator %s has values", e.Operator)
			}
		default:
			return nil, fmt.Errorf("unknown operator %q", e.Operator)
		}
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b demand) int {
		return cmp.Or(strings.Compare(a.key, b.key), strings.Compare(string(a.op), string(b.op)),
			slices.Compare(a.values, b.values))
	})
	return slices.CompactFunc(out, func(a, b demand) bool {
		return a.key == b.key && a.op == b.op && slices.Equal(a.values, b.values)
	}), nil
}

// matches reports whether labels fulfil all demands.
func (s selector) matches(l labelSet) bool {
	for i := range s {
		if !s[i].holds(l) {
			return false
		}
	}
	return true
}

func (d *demand) holds(l labelSet) bool {
	v, there := l.get(d.key)
	switch d.op {
	case metav1.LabelSelectorOpIn:
		if len(d.values) == 1 {
			return there && v == d.values[0]
		}
		_, found := slices.BinarySearch(d.values, v)
		return there && found
	case metav1.LabelSelectorOpNotIn:
		_, found := slices.BinarySearch(d.values, v)
		return !there || !found
	case metav1.LabelSelectorOpExists:
		return there
	}
	return !there
}

// pairs returns the values of one key of which a label must have one, nil if the selector wants no such label.
func (s selector) pairs() (key string, values []string) {
	for i := range s {
		if s[i].op == metav1.LabelSelectorOpIn && (values == nil || len(s[i].values) < len(values)) {
			key, values = s[i].key, s[i].values
		}
	}
	return key, values
}

// values returns those of which the label of that key must have one, nil if any will do.
func (s selector) values(key string) []string {
	for i := range s {
		if s[i].key == key && s[i].op == metav1.LabelSelectorOpIn {
			return s[i].values
		}
	}
	return nil
}

// String returns "app=web,tier in (a,b),!old".
func (s selector) String() string {
	var b strings.Builder
	for i, d := range s {
		if i > 0 {
			b.WriteByte(',')
		}
		switch d.op {
		case metav1.LabelSelectorOpIn:
			if len(d.values) == 1 {
				b.WriteString(quote(d.key) + "=" + quote(d.values[0]))
				continue
			}
			writeSet(&b, d.key, " in (", d.values)
		case metav1.LabelSelectorOpNotIn:
			writeSet(&b, d.key, " notin (", d.values)
		case metav1.LabelSelectorOpExists:
			b.WriteString(quote(d.key))
		default:
			b.WriteString("!" + quote(d.key))
		}
	}
	return b.String()
}

func writeSet(b *strings.Builder, key, op string, values []string) {
	b.WriteString(quote(key) + op)
	for i, v := range values {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(quote(v))
	}
	b.WriteByte(')')
}

// quote returns s itself where it is as labels are: different texts stay different inside a longer one.
func quote(s string) string {
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_', c == '.', c == '/':
		default:
			return strconv.Quote(s)
		}
	}
	return s
}
