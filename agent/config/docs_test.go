package config

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write generated documents instead of comparing them")

// proxyFlags are fields that kube-proxy's flags of another field's name set too.
var proxyFlags = map[string]string{
	"iptables.masqueradeAll": "masquerade-all", "nftables.masqueradeAll": "masquerade-all",
	"nftables.syncPeriod": "iptables-sync-period", "nftables.minSyncPeriod": "iptables-min-sync-period",
}

// ownField returns the field of FairleadConfiguration that a flag sets.
func ownField(r Row) (string, bool) {
	name, ok := strings.CutPrefix(r.Text, "FairleadConfiguration's ")
	name, _, _ = strings.Cut(name, ";")
	return strings.TrimSuffix(name, "."), ok
}

// flagsOf returns the flags that set a field, for a table's cell.
func flagsOf(is func(Row) bool, more string) string {
	var l []string
	for _, r := range rows {
		if is(r) {
			l = append(l, "`--"+r.Flag+"`")
		}
	}
	if more != "" {
		l = append(l, "`--"+more+"`")
	}
	return strings.Join(l, ", ")
}

// comments returns the comments of the fields of this package's structures, by structure and field.
func comments(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "fairlead.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	of := map[string]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if s, ok := spec.Type.(*ast.StructType); ok {
			for _, f := range s.Fields.List {
				if len(f.Names) == 1 {
					of[spec.Name.Name+"."+f.Names[0].Name] = strings.Join(strings.Fields(f.Doc.Text()), " ")
				}
			}
		}
		return false
	})
	return of
}

// ownRows are a table's rows of the fields of a structure: their comments say what they do, and their defaults.
func ownRows(t *testing.T, path string, of reflect.Type, doc map[string]string) (text string) {
	for i := range of.NumField() {
		f := of.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous {
			continue
		}
		if name = path + name; f.Type.Kind() == reflect.Struct {
			text += ownRows(t, name+".", f.Type, doc)
			continue
		}
		what, usual, ok := strings.Cut(doc[of.Name()+"."+f.Name], " Default: ")
		_, what, named := strings.Cut(what, " ")
		if !ok || !named || !strings.HasPrefix(what, "is ") {
			t.Errorf("the comment of %s must be \"NAME is … Default: …\"", name)
		}
		what = strings.TrimPrefix(what, "is ")
		text += fmt.Sprintf("| `%s` | %s | %s | %s | %s |\n", name, kind(f.Type), strings.TrimSuffix(usual, "."),
			flagsOf(func(r Row) bool { n, ok := ownField(r); return ok && n == name }, ""),
			strings.ToUpper(what[:1])+what[1:])
	}
	return text
}

// kind returns a field's type as a file has it.
func kind(of reflect.Type) string {
	if of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	switch {
	case strings.HasSuffix(of.Name(), "Duration"):
		return "duration"
	case of.Kind() == reflect.Slice:
		return "list"
	case of.Kind() == reflect.Map:
		return "map"
	}
	return strings.TrimRight(of.Kind().String(), "1236458")
}

// usual returns a field's default for a table's cell, "" where that is empty, 0 or false.
func usual(v reflect.Value) string {
	if v.Kind() == reflect.Pointer && !v.IsNil() {
		v = v.Elem()
	}
	if d, ok := v.Interface().(metav1.Duration); ok && !v.IsZero() {
		return "`" + strings.NewReplacer("h0m0s", "h", "m0s", "m").Replace(d.Duration.String()) + "`"
	}
	if empty := v.Kind() == reflect.Map && v.Len() == 0; v.IsZero() || empty || v.Kind() == reflect.Slice {
		return ""
	}
	return "`" + strings.Trim(show(v), `"`) + "`"
}

// proxyRows are a table's rows of the fields of KubeProxyConfiguration: those that take effect, or those that don't.
func proxyRows(honoured bool) (text string) {
	all := leaves(defaults())
	for _, f := range fields {
		if f.Honoured != honoured {
			continue
		}
		of, value := "object", ""
		if i := slices.IndexFunc(all, func(l leaf) bool { return l.path == f.Path }); i >= 0 {
			of, value = kind(all[i].value.Type()), usual(all[i].value)
		}
		text += fmt.Sprintf("| `%s` | %s | %s | %s | %s |\n", f.Path, of, value,
			flagsOf(func(r Row) bool { return r.Field == f.Path }, proxyFlags[f.Path]), f.Text)
	}
	return text
}

// references are docs/reference/configuration.md's tables, by the names of their marks.
func references(t *testing.T) map[string]string {
	const head = "| field | type | default | flag | what it does |\n|---|---|---|---|---|\n"
	flags, fs := "| flag | default | what it does |\n|---|---|---|\n", pflag.NewFlagSet("", pflag.ContinueOnError)
	new(Flags).Add(fs)
	for _, r := range rows {
		if _, own := ownField(r); own || r.Text == "" {
			continue
		}
		value := fs.Lookup(r.Flag).DefValue
		if value != "" && value != "[]" {
			value = "`" + value + "`"
		}
		flags += fmt.Sprintf("| `--%s` | %s | %s |\n", r.Flag, strings.TrimSuffix(value, "[]"), r.Text)
	}
	former := "| former flag | present flag |\n|---|---|\n"
	for _, r := range rows {
		for old, now := range renamed {
			if now == r.Flag {
				former += fmt.Sprintf("| `--%s` | `--%s` |\n", old, now)
			}
		}
	}
	return map[string]string{
		"own":      head + ownRows(t, "", reflect.TypeFor[FairleadConfiguration](), comments(t)),
		"fields":   head + proxyRows(true),
		"noeffect": strings.Replace(head, "what it does", "what happens instead", 1) + proxyRows(false),
		"flags":    flags,
		"former":   former,
	}
}

// The configuration reference is made from the types, their comments and the flags.
func TestTablesAreDocumented(t *testing.T) {
	const file = "../../docs/reference/configuration.md"
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	want := string(b)
	for name, text := range references(t) {
		begin := fmt.Sprintf("<!-- begin %s: generated by go test ./agent/config -run Documented -update -->\n", name)
		end := fmt.Sprintf("<!-- end %s -->\n", name)
		head, rest, ok := strings.Cut(want, begin)
		_, tail, closed := strings.Cut(rest, end)
		if !ok || !closed {
			t.Fatalf("%s lacks its marks %q and %q", file, begin, end)
		}
		want = head + begin + text + end + tail
	}
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != string(b) {
		t.Errorf("%s is out of date: run go test ./agent/config -run Documented -update", file)
	}
}

// A default that a comment says is the flag's.
func TestCommentsSayTheDefaults(t *testing.T) {
	fs, table := pflag.NewFlagSet("", pflag.ContinueOnError), references(t)["own"]
	new(Flags).Add(fs)
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		name := strings.Trim(cells[4], " `-")
		f := fs.Lookup(name)
		if f == nil || f.DefValue == "" || f.DefValue == "0" || name == "mode" {
			continue // the comment says what decides
		}
		if !strings.Contains(cells[3], f.DefValue) {
			t.Errorf("--%s has the default %s, the comment says %s", name, f.DefValue, cells[3])
		}
	}
}
