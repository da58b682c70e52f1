package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/network-policy-api/apis/v1alpha2"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// The reasons of this package's problems.
const (
	CannotRead     = "CannotRead"  // a file, a folder or a link can't be read
	Missing        = "Missing"     // the folder or file that is the source is gone
	NotWatched     = "NotWatched"  // changes in a folder will not be seen
	StillOpen      = "StillOpen"   // a program still has a file open for writing
	Syntax         = "Syntax"      // neither YAML nor JSON
	UnknownKind    = "UnknownKind" // no kind, or one that looks misspelt
	Template       = "Template"    // part of a Helm chart, which must be rendered first
	KindNotRead    = source.KindNotRead
	WrongVersion   = "WrongVersion"   // a kind that Fairlead reads in another apiVersion
	UnknownField   = "UnknownField"   // no such field
	DuplicateField = "DuplicateField" // one field twice
	WrongType      = "WrongType"      // text for a number, and so on
	Required       = "Required"       // a field is missing
	Invalid        = "Invalid"        // a value that an API server would refuse
	Duplicate      = "Duplicate"      // the same object stands elsewhere, and that one counts
)

// An item is what one document says, or what one item of a List does.
type item struct {
	hash uint64        // of the text, in a List; else 0
	obj  source.Object // nil where there is none; where refused, the last good content
	bad  *rejection    // nil where all is well
}

// A rejection says what is wrong with an item.
type rejection struct {
	fate     fate
	key      source.Key // zero where not known
	problems []source.Problem
}

// fate is what comes of an item that is not taken.
type fate int

const (
	ignored    fate = iota // not for Fairlead
	refused                // the object that it names keeps its last good content
	unreadable             // it may be any object
)

// kinds reports how each kind is written.
var kinds = map[string]struct {
	version string
	make    func() source.Object
}{
	string(source.Service):       {"v1", func() source.Object { return new(corev1.Service) }},
	string(source.Node):          {"v1", func() source.Object { return new(corev1.Node) }},
	string(source.Namespace):     {"v1", func() source.Object { return new(corev1.Namespace) }},
	string(source.Pod):           {"v1", func() source.Object { return new(corev1.Pod) }},
	string(source.EndpointSlice): {"discovery.k8s.io/v1", func() source.Object { return new(discoveryv1.EndpointSlice) }},
	string(source.ServiceCIDR):   {"networking.k8s.io/v1", func() source.Object { return new(networkingv1.ServiceCIDR) }},
	string(source.NetworkPolicy): {"networking.k8s.io/v1",
		func() source.Object { return new(networkingv1.NetworkPolicy) }},
	string(source.ClusterNetworkPolicy): {cnpv1.GroupVersion.String(),
		func() source.Object { return new(cnpv1.ClusterNetworkPolicy) }},
}

// current returns the apiVersion by which an object is read: in place of an older one with the same fields, the newest.
func current(version string) string {
	if version == v1alpha2.GroupVersion.String() {
		return cnpv1.GroupVersion.String()
	}
	return version
}

// decode returns what one document says. Items of a List that stand in old are taken from there.
func decode(c chunk, old *cache, words *strip.Words) []item {
	j, bad := c.toJSON(words.Templates)
	if bad != nil {
		return []item{{bad: bad}}
	}
	switch {
	case string(j) == "null":
		return nil
	case j[space(j, 0)] != '{':
		return []item{{bad: unread("", Syntax, "a document must be an object with apiVersion, kind and metadata")}}
	}
	version, kind := peek(j)
	return items(j, version, kind, old, words)
}

// items returns what the JSON object j says: those of a list, or one.
func items(j []byte, version, kind string, old *cache, words *strip.Words) []item {
	if of, ok := strings.CutSuffix(kind, "List"); ok && (of == "" || kinds[of].make != nil) && !foreign(version) {
		return list(j, version, kind, of, old, words)
	}
	if version == "fairlead.dev/v1alpha1" && kind == "PolicyExpectations" {
		return nil // about the objects that it stands beside
	}
	if words.Templates && workloads[kind].make != nil && !foreign(version) {
		return podsOf(j, version, kind, words)
	}
	return []item{object(j, version, kind, words)}
}

// unread makes the rejection of an item that may be any object.
func unread(field, reason, message string, args ...any) *rejection {
	return &rejection{fate: unreadable, problems: []source.Problem{
		{Field: field, Reason: reason, Message: fmt.Sprintf(message, args...)}}}
}

// toJSON returns the document as JSON. With templates, workloads are of use.
func (c chunk) toJSON(templates bool) ([]byte, *rejection) {
	if c.json && json.Valid(c.text) {
		return c.text, nil
	}
	j, err := yamlToJSON(c.text)
	if err == nil {
		return j, nil
	}
	if version, kind := c.headline(); !c.json && !errors.Is(err, errMore) && ignores(version, kind) &&
		(!templates || workloads[kind].make == nil) {
		return nil, notRead(nil, version, kind)
	}
	if bytes.Contains(c.text, []byte("{{")) {
		return nil, unread("", Template, "is a Helm template: "+render)
	}
	if syntax := new(json.SyntaxError); c.json && errors.As(json.Unmarshal(c.text, new(any)), &syntax) {
		return nil, unread("", Syntax, "line %d: %v", c.line+bytes.Count(c.text[:syntax.Offset], []byte("\n")), syntax)
	}
	message := inFile(strings.TrimPrefix(err.Error(), "yaml: "), c.line)
	if strings.Contains(message, "cannot start any token") && bytes.Contains(c.text, []byte("\t")) {
		message += ": indent with spaces, not with tabs"
	}
	return nil, unread("", Syntax, "%s", message)
}

// headline returns the apiVersion and kind of a YAML document that can't be parsed, as far as each stands once at the
// beginning of a line and no other document seems to be in the text.
func (c chunk) headline() (version, kind string) {
	said := map[string][]string{}
	for line := range strings.Lines(string(c.text)) {
		name, val, _ := strings.Cut(strings.TrimRight(line, "\n"), ":")
		val, _, _ = strings.Cut(val, " #")
		val = strings.Trim(val, " \t\"'")
		said[name] = append(said[name], val)
		name = strings.TrimLeft(name, " \t-")
		if name == "" || name == "kind" && kinds[val].make != nil {
			return "", ""
		}
	}
	if len(said["apiVersion"]) != 1 || len(said["kind"]) != 1 {
		return "", ""
	}
	return said["apiVersion"][0], said["kind"][0]
}

var yamlLine = regexp.MustCompile(`\bline (\d+)`)

// inFile turns the line in an error of the YAML library into the line in the file.
func inFile(message string, first int) string {
	return yamlLine.ReplaceAllStringFunc(message, func(s string) string {
		n, _ := strconv.Atoi(s[len("line "):])
		return fmt.Sprintf("line %d", first+n-1)
	})
}

// list returns the items of a List, or of a list of one kind, whose items need not repeat it.
func list(j []byte, version, kind, of string, old *cache, words *strip.Words) []item {
	raw, bad := listed(j, version, kind, of)
	if bad != nil {
		return []item{{bad: bad}}
	}
	raws := elements(raw)
	out := make([][]item, len(raws))
	parallel(len(raws), func(i int) {
		hash := digest(raws[i])
		if it, ok := old.consume(hash); ok {
			out[i] = []item{it}
			return
		}
		version, kind := peek(raws[i])
		if of != "" && kind == "" && version == "" {
			version, kind = kinds[of].version, of
		}
		out[i] = items(raws[i], version, kind, old, words)
		for n := range out[i] {
			it := &out[i][n]
			if it.hash == 0 && len(out[i]) == 1 {
				it.hash = hash
			}
			if it.bad == nil {
				continue
			}
			for n, p := range it.bad.problems {
				it.bad.problems[n].Field = strings.TrimSuffix(fmt.Sprintf("items[%d].%s", i, p.Field), ".")
			}
		}
	})
	return slices.Concat(out...)
}

// listed returns the JSON array of a list's items, nil for none, or why the list is not read.
func listed(j []byte, version, kind, of string) (raw []byte, bad *rejection) {
	seen := map[string]bool{}
	for name, val := range members(j) {
		n := text(name)
		switch {
		case seen[n]:
			return nil, unread(n, DuplicateField, "stands twice in the %s: keep one", kind)
		case n == "items":
			raw = val
		case n != "apiVersion" && n != "kind" && n != "metadata":
			return nil, unread(n, UnknownField, "a %s has no such field%s", kind, didYouMean(n, "items", "metadata"))
		}
		seen[n] = true
	}
	switch {
	case of == "" && version != "v1" || of != "" && current(version) != kinds[of].version:
		want := "v1"
		if of != "" {
			want = kinds[of].version
		}
		return nil, unread("apiVersion", WrongVersion, "a %s of %s is not read: write %s", kind, orNone(version), want)
	case raw != nil && string(raw) != "null" && raw[0] != '[':
		return nil, unread("items", WrongType, "must be a list of objects")
	case raw == nil || raw[0] != '[':
		return nil, nil
	}
	return raw, nil
}

// object returns what the JSON object j says.
func object(j []byte, version, kind string, words *strip.Words) item {
	if j[0] != '{' {
		return item{bad: unread("", WrongType, "must be an object with apiVersion, kind and metadata")}
	}
	k, ok := kinds[kind]
	if !ok || current(version) != k.version {
		return item{bad: notRead(j, version, kind)}
	}
	o := k.make()
	if bad := unmarshal(j, o, kind); bad != nil {
		return item{bad: bad}
	}
	setDefaults(o)
	if problems := validate(o); problems != nil {
		return item{bad: refuse(source.KeyOf(o), problems)}
	}
	words.Strip(o)
	if words.Templates {
		mark(o)
	}
	return item{obj: o}
}

// unmarshal reads the JSON object j into o, strictly.
func unmarshal(j []byte, o source.Object, kind string) *rejection {
	if strict, err := kjson.UnmarshalStrict(j, o); err != nil || strict != nil {
		return explain(j, o, kind, strict, err)
	}
	return nil
}

// refuse makes the rejection of an item: if its name is a good one, of that object.
func refuse(key source.Key, problems []source.Problem) *rejection {
	bad := &rejection{fate: refused, key: key, problems: problems}
	if nameProblem(key.Kind, key.Name) != "" || key.Namespace != "" && labelProblem(key.Namespace) != "" {
		bad.fate = unreadable
	}
	if key.Name == "" {
		bad.key = source.Key{}
	}
	return bad
}

// identity returns the key that an object's metadata says, with an empty name where it says none that is text.
func identity(j []byte, kind string) source.Key {
	var o struct {
		Metadata struct {
			Name      any `json:"name"`
			Namespace any `json:"namespace"`
		} `json:"metadata"`
	}
	_ = kjson.UnmarshalCaseSensitivePreserveInts(j, &o) // what can't be read stays empty
	key := source.Key{Kind: source.Kind(kind)}
	switch ns := o.Metadata.Namespace.(type) {
	case string:
		key.Namespace = ns
	case nil:
	default:
		return key
	}
	if key.Namespace == "" && kinds[kind].make != nil && key.Kind.Namespaced() {
		key.Namespace = "default"
	}
	key.Name, _ = o.Metadata.Name.(string)
	return key
}

// foreign reports whether an apiVersion is of a group that is not Kubernetes' own.
func foreign(version string) bool {
	group, _, ok := strings.Cut(version, "/")
	return ok && strings.Contains(group, ".") && !strings.HasSuffix(group, ".k8s.io")
}

// ignores reports whether an apiVersion and a kind are plainly of something that Fairlead has no use for.
func ignores(version, kind string) bool {
	if foreign(version) {
		return true
	}
	of := strings.TrimSuffix(kind, "List")
	return of != "" && kinds[of].make == nil && Nearest(of, kindNames()) == ""
}

// notRead reports what is wrong with an apiVersion and a kind that are not read.
func notRead(j []byte, version, kind string) *rejection {
	key := identity(j, kind)
	problem := func(field, reason, message string, args ...any) []source.Problem {
		return []source.Problem{{Field: field, Reason: reason, Message: fmt.Sprintf(message, args...)}}
	}
	k, ok := kinds[kind]
	twice := repeated(j, "apiVersion", "kind")
	other, isOther := source.OtherPolicyKind(version, strings.TrimSuffix(kind, "List"))
	switch {
	case twice != "":
		return unread(twice, DuplicateField, "stands twice: keep one")
	case isOther:
		p := other.Problem(key)
		return &rejection{fate: ignored, key: p.Object, problems: []source.Problem{p}}
	case ok && foreign(version):
		group, _, _ := strings.Cut(version, "/")
		key.Kind = source.Kind(kind + "." + group)
		return &rejection{fate: ignored, key: key, problems: problem("", KindNotRead,
			"%s %s is not the %s of %s: Fairlead has no use for it and ignores it", version, kind, kind, k.version)}
	case ok:
		return refuse(key, problem("apiVersion", WrongVersion, "%s of %s is not read: write apiVersion %s", kind,
			orNone(version), k.version))
	case ignores(version, kind):
		return &rejection{fate: ignored, key: key, problems: problem("", KindNotRead,
			"Fairlead has no use for %s %s and ignores it%s", orNone(version), kind, instead[kind])}
	case kind == "":
		return unread("kind", UnknownKind, "names no kind: write one of %s", strings.Join(kindNames(), ", "))
	}
	near := Nearest(strings.TrimSuffix(kind, "List"), kindNames())
	return unread("kind", UnknownKind, "there is no kind %s: did you mean %s (apiVersion %s)?", kind, near,
		kinds[near].version)
}

// render reports how the objects of a Helm chart are made.
const render = "render the chart with helm template NAME CHART > FILE, and read FILE"

// instead reports what to write for kinds that people may expect to count.
var instead = map[string]string{
	"Endpoints":     ": write an EndpointSlice (discovery.k8s.io/v1)",
	"Ingress":       ": it is for an ingress controller, behind a Service",
	"Kustomization": ": build the objects with kubectl kustomize FOLDER > FILE, and read FILE",
}

func orNone(version string) string {
	if version == "" {
		return "no apiVersion"
	}
	return version
}
