package resolve

import (
	"cmp"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/source"
)

// report gathers what is wrong with one object.
type report struct {
	object   source.Key
	problems []source.Problem
}

// add notes a problem. The message says what is wrong, what is done instead, and the way out.
func (r *report) add(field, reason, format string, args ...any) {
	r.problems = append(r.problems, source.Problem{
		Object: r.object, Field: field, Reason: reason, Message: fmt.Sprintf(format, args...),
	})
}

// flawed notes a flaw, with what is done instead and the way out.
func (r *report) flawed(field string, f *flaw, instead string) {
	r.add(field, f.reason, "%s: %s", f.text, instead)
}

// sortProblems orders problems by object, field, reason and message.
func sortProblems(ps []source.Problem) {
	slices.SortFunc(ps, func(a, b source.Problem) int {
		return cmp.Or(
			cmp.Compare(a.Object.Kind, b.Object.Kind),
			cmp.Compare(a.Object.Namespace, b.Object.Namespace),
			cmp.Compare(a.Object.Name, b.Object.Name),
			cmp.Compare(a.Field, b.Field),
			cmp.Compare(a.Reason, b.Reason),
			cmp.Compare(a.Message, b.Message))
	})
}
