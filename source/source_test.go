package source

import (
	"fmt"
	"testing"
)

func TestUnreadKindsAreCounted(t *testing.T) {
	var l []Problem
	for i := range 7 {
		for j := range i + 1 {
			l = append(l, Problem{Object: Key{Kind: Kind(fmt.Sprintf("Kind%d", i)), Name: fmt.Sprint(j)}, Reason: KindNotRead})
		}
	}
	l = append(l, Problem{Reason: "Other"})
	sentence, remaining := Unread(l)
	const want = "ignored 28 documents that Fairlead has no use for: 7 Kind6, 6 Kind5, 5 Kind4, 4 Kind3, 3 Kind2, " +
		"2 other kinds"
	if sentence != want || len(remaining) != 1 {
		t.Errorf("%q, %d others", sentence, len(remaining))
	}
	if sentence, remaining := Unread(l[len(l)-1:]); sentence != "" || len(remaining) != 1 {
		t.Errorf("without any: %q, %d others", sentence, len(remaining))
	}
}
