package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// shellWords returns the words of a shell's line, by command: pipes, redirections, "&&" and comments end one.
func shellWords(line string) (commands [][]string) {
	commands = [][]string{nil}
	for rest := strings.TrimSpace(line); rest != ""; rest = strings.TrimLeft(rest, " \t") {
		word, quoted := "", false
		for end := false; !end && rest != ""; {
			c := rest[:1]
			switch {
			case c == "'" || c == `"`:
				var ok bool
				var part string
				if part, rest, ok = strings.Cut(rest[1:], c); !ok {
					return commands
				}
				word, quoted = word+part, true
			case c == " " || c == "\t":
				end = true
			default:
				word, rest = word+c, rest[1:]
			}
		}
		last := len(commands) - 1
		switch {
		case !quoted && strings.HasPrefix(word, "#"):
			return commands
		case !quoted && (slices.Contains([]string{"|", "&&", ";"}, word) || strings.HasPrefix(word, ">")):
			commands = append(commands, nil)
		case !quoted && slices.Contains([]string{"…", `\`}, word): // what the page leaves out
		default:
			commands[last] = append(commands[last], word)
		}
	}
	return commands
}

// invocations returns the arguments of each call of fairlead in a command's words: the command itself, by sudo, or one
// that another command runs. Go's tools read its file.
func invocations(words []string) (l [][]string) {
	if len(words) > 0 && words[0] == "go" {
		return nil
	}
	for i, w := range words {
		first := i == 0 || i == 1 && words[0] == "sudo"
		if first && w == "fairlead" || strings.HasSuffix(w, "bin/fairlead") {
			l = append(l, words[i+1:])
		}
	}
	return l
}

// parses returns why arguments are no call of fairlead.
func parses(args []string) error {
	c, rest, err := rootCommand().Find(args)
	if err != nil {
		return err
	}
	if err := c.ParseFlags(rest); errors.Is(err, pflag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	if left := c.Flags().Args(); c.DisableFlagsInUseLine && len(left) > 0 { // cli.Holds made it: it has commands alone
		return fmt.Errorf("fairlead %s has no command %q", c.Name(), left[0])
	}
	return c.ValidateArgs(c.Flags().Args())
}

var (
	codeBlocks   = regexp.MustCompile("(?ms)^ *```([a-z]*)\n(.*?)^ *```$")
	codeSpans    = regexp.MustCompile("`([^`]+)`")
	continuation = regexp.MustCompile(`\\\n *`)
)

// documentedCommands returns the calls of fairlead in a document: in blocks of a shell, with a prompt where they are
// of a console, and in the text. Those in the text may leave arguments out.
func documentedCommands(text string) (whole, partial [][]string) {
	for _, m := range codeBlocks.FindAllStringSubmatch(text, -1) {
		if m[1] != "" && m[1] != "console" && m[1] != "sh" {
			continue
		}
		for line := range strings.Lines(continuation.ReplaceAllString(m[2], " ")) {
			command, prompt := strings.CutPrefix(line, "# ")
			if !prompt {
				command, prompt = strings.CutPrefix(line, "$ ")
			}
			if !prompt && m[1] == "console" {
				continue
			}
			for _, words := range shellWords(command) {
				whole = append(whole, invocations(words)...)
			}
		}
	}
	for _, m := range codeSpans.FindAllStringSubmatch(codeBlocks.ReplaceAllString(text, ""), -1) {
		for _, words := range shellWords(strings.Join(strings.Fields(m[1]), " ")) {
			partial = append(partial, invocations(words)...)
		}
	}
	return whole, partial
}

// Every call of fairlead in a document is one that this program has, with flags and arguments that it accepts.
func TestCommandsOfDocumentsParse(t *testing.T) {
	root, found := "../..", 0
	files := []string{"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"}
	err := fs.WalkDir(os.DirFS(root), "docs", func(name string, _ fs.DirEntry, err error) error {
		if filepath.Ext(name) == ".md" {
			files = append(files, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		whole, partial := documentedCommands(string(text))
		for _, args := range whole {
			if err := parses(args); err != nil {
				t.Errorf("%s: fairlead %s: %v", name, strings.Join(args, " "), err)
			}
		}
		for _, args := range partial {
			if err := parses(args); err != nil && !lacksArguments(err) {
				t.Errorf("%s: fairlead %s: %v", name, strings.Join(args, " "), err)
			}
		}
		found += len(whole) + len(partial)
	}
	if found < 150 {
		t.Errorf("the documents have only %d commands", found)
	}
}

// lacksArguments reports whether a call is wrong for too few arguments alone.
func lacksArguments(err error) bool {
	return strings.Contains(err.Error(), "arg(s)")
}

// The check above finds commands that are no longer there, flags that aren't, and values that flags don't accept.
func TestCommandsOfDocumentsAreFound(t *testing.T) {
	whole, partial := documentedCommands("# A\n```console\n# fairlead show \\\n    --nonsense | fairlead vanish\n" +
		"fairlead printed\n$ sudo bin/fairlead explain a 'b c' # why\n# helm install fairlead x\n```\n" +
		"```yaml\n# fairlead comment\n```\n```\nfairlead lab lose\n```\n" +
		"Use `fairlead flows record\n--for never` and `fairlead`.\n")
	want := []string{"show --nonsense", "vanish", "explain a b c", "lab lose", "flows record --for never", ""}
	var got []string
	for i, args := range slices.Concat(whole, partial) {
		got = append(got, strings.Join(args, " "))
		if wrong := i != 2 && i != 5; wrong != (parses(args) != nil) {
			t.Errorf("fairlead %q: %v", args, parses(args))
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
}
