// Package progress tells a person at a terminal how far a long run is: percent, steps done of all, time left, and what
// is being done. It draws only when it is told something, never from a timer, so that it can't disturb what is
// measured.
package progress

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
)

// Bar is a run's progress. It is for one goroutine.
type Bar struct {
	w       io.Writer
	tty     bool
	width   int // columns of the terminal
	total   int
	work    time.Duration // planned for all steps
	done    int
	worked  time.Duration // planned for those that are done
	step    string
	planned time.Duration // for the present step
	now     func() time.Time
	begun   time.Time
	drawn   time.Time // when plain text was last written
	shown   int       // percent that plain text last said
}

// New begins a run of so many steps that are planned to take so much time together. On a terminal the bar keeps to
// one line; anything else gets a line at the beginning, about every tenth and at least every minute that something
// happens.
func New(w io.Writer, steps int, work time.Duration) *Bar {
	b := &Bar{w: w, total: steps, work: work, now: time.Now, shown: -1}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		b.tty = true
		if width, _, err := term.GetSize(int(f.Fd())); err == nil {
			b.width = width
		}
	}
	b.begun = b.now()
	return b
}

// Step begins a step that is planned to take so long. The step before has ended.
func (b *Bar) Step(what string, planned time.Duration) {
	b.end()
	b.step, b.planned = what, planned
	b.draw()
}

// Print writes a line of text without breaking the bar.
func (b *Bar) Print(format string, a ...any) {
	b.clear()
	fmt.Fprintf(b.w, strings.TrimSuffix(format, "\n")+"\n", a...)
	if b.tty {
		b.draw()
	}
}

// Finish ends the last step and leaves a line that says how long all took.
func (b *Bar) Finish() {
	b.end()
	b.clear()
	fmt.Fprintf(b.w, "%d of %d steps in %s\n", b.done, b.total, clock(b.now().Sub(b.begun)))
}

// Stop leaves a line that says why the run goes no further, and how far it came.
func (b *Bar) Stop(why string) {
	b.clear()
	fmt.Fprintf(b.w, "%s, after %d of %d steps and %s\n", why, b.done, b.total, clock(b.now().Sub(b.begun)))
	b.step = ""
}

func (b *Bar) end() {
	if b.step == "" {
		return
	}
	b.done, b.worked, b.step = b.done+1, b.worked+b.planned, ""
}

// share is how much of the planned time is done, from 0 to 1.
func (b *Bar) share() float64 {
	switch {
	case b.work > 0:
		return min(1, float64(b.worked)/float64(b.work))
	case b.total > 0:
		return min(1, float64(b.done)/float64(b.total))
	}
	return 0
}

// left is how long the rest takes if plan and time go on as so far: the plan alone, before the first step's end.
func (b *Bar) left() time.Duration {
	rest := max(0, b.work-b.worked)
	if s := b.share(); s > 0 {
		return time.Duration(float64(b.now().Sub(b.begun)) * (1 - s) / s)
	}
	return rest
}

func (b *Bar) text() string {
	return fmt.Sprintf("%3d %%  %d/%d  %s left  %s", int(100*b.share()), b.done, b.total, clock(b.left()), b.step)
}

// Cells of the bar itself.
const cells = 20

func (b *Bar) draw() {
	if b.tty {
		full := int(b.share()*cells + 0.5)
		line := "[" + strings.Repeat("#", full) + strings.Repeat("·", cells-full) + "] " + b.text()
		fmt.Fprint(b.w, "\r\x1b[K", cut(line, b.width-1))
		return
	}
	percent := int(100 * b.share())
	if b.shown >= 0 && percent/10 == b.shown/10 && b.now().Sub(b.drawn) < time.Minute {
		return
	}
	b.shown, b.drawn = percent, b.now()
	fmt.Fprintln(b.w, b.text())
}

func (b *Bar) clear() {
	if b.tty {
		fmt.Fprint(b.w, "\r\x1b[K")
	}
}

// cut shortens a line to so many columns, all of it if that is not known.
func cut(s string, width int) string {
	if width <= 0 || utf8.RuneCountInString(s) <= width {
		return s
	}
	return string([]rune(s)[:width-1]) + "…"
}

// clock returns "0:07", "12:30", "1:02:03".
func clock(d time.Duration) string {
	s := int(d.Round(time.Second) / time.Second)
	if s >= 3600 {
		return fmt.Sprintf("%d:%02d:%02d", s/3600, s/60%60, s%60)
	}
	return fmt.Sprintf("%d:%02d", s/60, s%60)
}
