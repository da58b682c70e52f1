package reachability

import (
	"encoding/xml"
	"io"
	"strings"
)

// The elements of JUnit's format that the common CI systems read.
type (
	junitSuites struct {
		XMLName  xml.Name     `xml:"testsuites"`
		Tests    int          `xml:"tests,attr"`
		Failures int          `xml:"failures,attr"`
		Errors   int          `xml:"errors,attr"`
		Suites   []junitSuite `xml:"testsuite"`
	}
	junitSuite struct {
		Name     string      `xml:"name,attr"`
		Tests    int         `xml:"tests,attr"`
		Failures int         `xml:"failures,attr"`
		Errors   int         `xml:"errors,attr"`
		Cases    []junitCase `xml:"testcase"`
	}
	junitCase struct {
		Name      string        `xml:"name,attr"`
		ClassName string        `xml:"classname,attr"`
		File      string        `xml:"file,attr"`
		Line      int           `xml:"line,attr"`
		Failure   *junitFailure `xml:"failure"`
		Error     *junitFailure `xml:"error"`
	}
	junitFailure struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
)

// WriteJUnit writes results in JUnit's XML format, a test suite for each file.
func WriteJUnit(w io.Writer, results []Result) error {
	var all junitSuites
	for _, r := range results {
		if n := len(all.Suites); n == 0 || all.Suites[n-1].Name != r.File {
			all.Suites = append(all.Suites, junitSuite{Name: r.File})
		}
		s := &all.Suites[len(all.Suites)-1]
		c := junitCase{Name: r.String(), ClassName: r.File, File: r.File, Line: r.Line}
		lines := r.Lines()
		switch {
		case r.Error != "":
			c.Error = &junitFailure{Message: r.Error}
			s.Errors, all.Errors = s.Errors+1, all.Errors+1
		case !r.OK():
			c.Failure = &junitFailure{Message: lines[0], Text: strings.Join(lines, "\n")}
			s.Failures, all.Failures = s.Failures+1, all.Failures+1
		}
		s.Cases = append(s.Cases, c)
		s.Tests, all.Tests = s.Tests+1, all.Tests+1
	}
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	e := xml.NewEncoder(w)
	e.Indent("", "  ")
	if err := e.Encode(all); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}
