package manifest

import (
	"fmt"

	"k8s.io/apimachinery/pkg/util/validation"

	"fairlead.dev/fairlead/source"
)

func isLabel(s string) bool     { return len(validation.IsDNS1123Label(s)) == 0 }
func isSubdomain(s string) bool { return len(validation.IsDNS1123Subdomain(s)) == 0 }
func isValue(s string) bool     { return len(validation.IsValidLabelValue(s)) == 0 }
func isQualified(s string) bool { return len(validation.IsQualifiedName(s)) == 0 }
func isPortName(s string) bool  { return len(validation.IsValidPortName(s)) == 0 }

// nameProblem returns what is wrong with an object's name, "" if nothing is. A Service may begin with a digit, as
// KEP-5311 lets it.
func nameProblem(kind source.Kind, name string) string {
	if kind == source.Service || kind == source.Namespace {
		return labelProblem(name)
	}
	if isSubdomain(name) {
		return ""
	}
	return fmt.Sprintf("%q is no name: use small letters, digits, '-' and '.', begin and end with a letter or digit, "+
		"at most 253", name)
}

func labelProblem(name string) string {
	if isLabel(name) {
		return ""
	}
	return fmt.Sprintf("%q is no name: use small letters, digits and '-', begin and end with a letter or digit, "+
		"at most 63", name)
}
