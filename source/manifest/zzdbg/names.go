package manifest

import (
	"fmt"
	"strings"

	"fairlead.dev/fairlead/source"
)

// The rules for names are those of k8s.io/apimachinery/pkg/util/validation, without its regular expressions, which cost
// a microsecond a piece.

func lower(c byte) bool { return 'a' <= c && c <= 'z' }

// isLabel is RFC 1123's label in lower case: letters, digits and '-' inside, at most 63.
func isLabel(s string) bool { return len(s) <= 63 && labelled(s) }

func labelled(s string) bool {
	for i := range len(s) {
		if c := s[i]; !lower(c) && !digit(c) && (c != '-' || i == 0 || i == len(s)-1) {
			return false
		}
	}
	return s != ""
}

// isSubdomain is labels joined by dots, at most 253 characters.
func isSubdomain(s string) bool {
	for l := range strings.SplitSeq(s, ".") {
		if !labelled(l) {
			return false
		}
	}
	return len(s) <= 253
}

// isValue is a label's value: empty, or letters, digits and "-_." inside, at most 63.
func isValue(s string) bool {
	for i := range len(s) {
		if c := s[i]; !letter(c) && !digit(c) && (c != '-' && c != '_' && c != '.' || i == 0 || i == len(s)-1) {
			return false
		}
	}
	return len(s) <= 63
}

// isQualified is a label's key: a name as isValue has it, perhaps behind a subdomain and '/'.
func isQualified(s string) bool {
	if domain, name, ok := strings.Cut(s, "/"); ok {
		return isSubdomain(domain) && name != "" && isValue(name)
	}
	return s != "" && isValue(s)
}

// isPortName is an IANA service name (RFC 6335 5.1) in lower case.
func isPortName(s string) bool {
	return len(s) <= 15 && labelled(s) && !strings.Contains(s, "--") && strings.ContainsAny(s, "abcdefghijklmnopqrstuvwxyz")
}

// nameProblem says what is wrong with an object's name, "" if nothing is. A Service may begin with a digit, as
// KEP-5311 lets it.
func nameProblem(kind source.Kind, name string) string {
	if kind == source.Service || kind == source.Namespace {
		return labelProblem(name)
	}
	if isSubdomain(name) {
		return ""
	}
	return fmt.Sprintf("%q is no name: use small letters, digits, '-' and '.', begin and end with a letter or digit, at most 253", name)
}

func labelProblem(name string) string {
	if isLabel(name) {
		return ""
	}
	return fmt.Sprintf("%q is no name: use small letters, digits and '-', begin and end with a letter or digit, at most 63", name)
}
