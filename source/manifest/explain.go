package manifest

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	kjson "sigs.k8s.io/json"

	"fairlead.dev/fairlead/source"
)

// explain returns why the JSON object j is no o: the decoder's own errors lack indexes and stop at the first wrong
// type.
func explain(j []byte, o source.Object, kind string, strict []error, err error) *rejection {
	if syntax, offset := kjson.SyntaxErrorOffset(err); syntax {
		return unread("", Syntax, "byte %d of the object: %v", offset, err)
	}
	var v any
	if err := kjson.UnmarshalCaseSensitivePreserveInts(j, &v); err != nil {
		return unread("", Syntax, "%v", err)
	}
	e := explainer{}
	e.value("", v, reflect.TypeOf(o).Elem())
	sure := true
	for _, s := range strict {
		if f, ok := s.(kjson.FieldError); ok && strings.HasPrefix(s.Error(), "duplicate") {
			e.add(f.FieldPath(), DuplicateField, "stands twice: keep one")
			naming := []string{"apiVersion", "kind", "metadata", "metadata.name", "metadata.namespace"}
			sure = sure && !slices.Contains(naming, f.FieldPath())
		}
	}
	if len(e.problems) == 0 {
		e.add("", WrongType, "%v", cmp.Or(err, fmt.Errorf("%v", strict)))
	}
	bad := refuse(identity(j, kind), e.problems)
	if !sure {
		bad.fate, bad.key = unreadable, source.Key{}
	}
	return bad
}

// An explainer compares a JSON value with a Go type.
type explainer struct{ problems []source.Problem }

func (e *explainer) add(field, reason, message string, args ...any) {
	e.problems = append(e.problems, source.Problem{Field: field, Reason: reason, Message: fmt.Sprintf(message, args...)})
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// value names what in v does not fit t, at path.
func (e *explainer) value(path string, v any, t reflect.Type) {
	switch {
	case v == nil:
		return
	case t.Kind() == reflect.Pointer:
		e.value(path, v, t.Elem())
		return
	case reflect.PointerTo(t).Implements(unmarshaler):
		e.custom(path, v, t)
		return
	}
	switch t.Kind() {
	case reflect.Struct:
		if m, ok := v.(map[string]any); ok {
			e.fields(path, m, t)
		} else {
			e.wrong(path, v, "must be an object")
		}
	case reflect.Map:
		m, ok := v.(map[string]any)
		if !ok {
			e.wrong(path, v, "must be an object")
		}
		for _, k := range slices.Sorted(maps.Keys(m)) {
			e.value(fmt.Sprintf("%s[%s]", path, k), m[k], t.Elem())
		}
	case reflect.Slice:
		if l, ok := v.([]any); ok {
			for i := range l {
				e.value(fmt.Sprintf("%s[%d]", path, i), l[i], t.Elem())
			}
		} else if _, ok := v.(string); !ok || t.Elem().Kind() != reflect.Uint8 {
			e.wrong(path, v, "must be a list: begin each item with \"- \"")
		}
	default:
		e.scalar(path, v, t)
	}
}

func (e *explainer) scalar(path string, v any, t reflect.Type) {
	switch t.Kind() {
	case reflect.String:
		switch v.(type) {
		case string:
		case bool:
			e.wrong(path, v, "must be text: put it in quotes (YAML takes y, yes, on, n, no and off for true and false)")
		default:
			e.wrong(path, v, "must be text: put it in quotes")
		}
	case reflect.Bool:
		if _, ok := v.(bool); !ok {
			e.wrong(path, v, "must be true or false, without quotes")
		}
	case reflect.Int32, reflect.Int64, reflect.Int:
		if n, ok := v.(int64); !ok {
			e.wrong(path, v, "must be a whole number, without quotes")
		} else if reflect.Zero(t).OverflowInt(n) {
			e.add(path, Invalid, "%d is too large", n)
		}
	}
}

// custom tries what a type's own decoder says.
func (e *explainer) custom(path string, v any, t reflect.Type) {
	b, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(b, reflect.New(t).Interface())
	}
	if err != nil {
		e.wrong(path, v, "can't be read as "+t.Name()+": "+strings.TrimPrefix(err.Error(), "json: "))
	}
}

func (e *explainer) wrong(path string, v any, want string) {
	is := ""
	switch v := v.(type) {
	case string:
		is = "the text " + strconv.Quote(v)
	case map[string]any:
		is = "an object"
	case []any:
		is = "a list"
	default:
		is = fmt.Sprint(v)
	}
	e.add(path, WrongType, "is %s: %s", is, want)
}

func (e *explainer) fields(path string, m map[string]any, t reflect.Type) {
	types := fields(t)
	for _, name := range slices.Sorted(maps.Keys(m)) {
		at := strings.TrimPrefix(path+"."+name, ".")
		if ft, ok := types[name]; ok {
			e.value(at, m[name], ft)
		} else {
			e.add(at, UnknownField, "there is no such field%s", didYouMean(name, slices.Sorted(maps.Keys(types))...))
		}
	}
}

// fields returns the types of a struct's fields by their names in JSON.
func fields(t reflect.Type) map[string]reflect.Type {
	out := map[string]reflect.Type{}
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && name == "":
			maps.Copy(out, fields(f.Type))
		case name != "" && name != "-":
			out[name] = f.Type
		}
	}
	return out
}

// didYouMean returns ": did you mean x?" for the word nearest to an unknown one, and else how to go on.
func didYouMean(word string, known ...string) string {
	if near := Nearest(word, known); near != "" {
		return ": did you mean " + near + "?"
	}
	return ": remove it"
}

// Nearest returns the known word that word may be a slip of, "" if none: other case, or one letter that is wrong,
// missing, too much or swapped with its neighbour; of a long word, two.
func Nearest(word string, known []string) string {
	best, at := "", 3
	for _, k := range known {
		d := 0
		if !strings.EqualFold(word, k) {
			d = distance(strings.ToLower(word), strings.ToLower(k))
		}
		if d < at && (d < 2 || len(k) > 5) {
			best, at = k, d
		}
	}
	return best
}

// distance returns how many letters to add, remove, replace or swap with their neighbour to get from a to b (optimal
// string alignment), or 99 if the lengths differ by more than two.
func distance(a, b string) int {
	if len(a)-len(b) > 2 || len(b)-len(a) > 2 {
		return 99
	}
	before, row := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		next := make([]int, len(b)+1)
		next[0] = i + 1
		for j := range len(b) {
			replace := row[j]
			if a[i] != b[j] {
				replace++
			}
			next[j+1] = min(replace, row[j+1]+1, next[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				next[j+1] = min(next[j+1], before[j-1]+1)
			}
		}
		before, row = row, next
	}
	return row[len(b)]
}

func kindNames() []string { return slices.Sorted(maps.Keys(kinds)) }
