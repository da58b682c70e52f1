package policy

import (
	"fmt"
	"maps"
	"strings"
	"testing"
)

// A set of labels has what it was made of, whatever that is.
func TestLabelSet(t *testing.T) {
	defer func(own *labelKeys) { keys = own }(keys)
	keys = &labelKeys{numbers: map[string]int{}}
	checkLabelSets(t)
	keys = &labelKeys{numbers: map[string]int{}}
	for i := range len(keys.texts) - 2 {
		keys.number(fmt.Sprint("key", i))
	}
	checkLabelSets(t) // of whose keys one has the last number
	if got := keys.number("one more"); got != 0 {
		t.Errorf("a key beyond the last has number %d", got)
	}
}

func checkLabelSets(t *testing.T) {
	for _, m := range []map[string]string{
		nil, {"app": "web"}, {"": ""}, {"": "x", "a": "", "ab": "c", "a/b": "\x00"},
		{"a": strings.Repeat("v", 240)}, {"a": "x", "b": strings.Repeat("v", 253)},
		{"a": "x", "b": strings.Repeat("v", 65_530)},
		{strings.Repeat("k", 300): strings.Repeat("v", 70_000), "z": "1", "b": "2"},
	} {
		l := newLabels(m)
		if got := maps.Collect(l.all()); len(got) != len(m) || !maps.Equal(got, m) {
			t.Errorf("%.100v is read as %.100v", m, got)
		}
		for k, v := range m {
			if got, there := l.get(k); !there || got != v {
				t.Errorf("%.100q of %.100v is %.100q, %t", k, m, got, there)
			}
			if _, there := l.get(k + "\x00"); there {
				t.Errorf("%.100v has a label that it lacks", m)
			}
		}
		if got := newLabels(maps.Collect(l.all())); got != l {
			t.Errorf("%.100v has two texts", m)
		}
	}
}
