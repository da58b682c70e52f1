package result

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Metric names a number: of a block, as a Measure has it, or of a cell, as an Aim has it. Beside the constants there
// are all quantiles, such as "p99.9", and what Rate, Spent, Counter and CPUOf return.
type Metric string

// The metrics of blocks; Value and the quantiles are also of cells.
const (
	// of a block that is one number; of a cell: the median of its blocks' figures, or their mean
	Value     Metric = "value"
	Mean      Metric = "mean"
	Min       Metric = "min"
	Max       Metric = "max"
	P50       Metric = "p50"
	P99       Metric = "p99"
	CPU       Metric = "cpu"       // processor time per time: of client, server and agent
	StdDev    Metric = "stddev"    // the standard deviation of a block's operations
	Imbalance Metric = "imbalance" // the greatest number of answers from one server over the mean, less 1
)

// The metrics of cells.
const (
	Ratio  Metric = "ratio"  // to the baseline of the same round
	More   Metric = "more"   // than the baseline of the same round
	Failed Metric = "failed" // operations
	Fit    Metric = "p"      // of the answers to equal shares
)

// The kinds of metrics that are of a counter or a part, which follows a colon.
const (
	KindCounter Metric = "counter"
	KindRate    Metric = "rate"
	KindSpent   Metric = "spent"
)

// Counter returns the metric of a counter per operation.
func Counter(name string) Metric { return KindCounter + ":" + Metric(name) }

// Rate returns the metric of a counter per second.
func Rate(counter string) Metric { return KindRate + ":" + Metric(counter) }

// Spent returns the metric of the processor time of client, server and agent per counter.
func Spent(counter string) Metric { return KindSpent + ":" + Metric(counter) }

// CPUOf returns the metric of the processor time per time of a part: client, server, agent, or softirq, which is part
// of these.
func CPUOf(part string) Metric { return CPU + ":" + Metric(part) }

// Split returns a metric's kind and the counter or part that it is of, "" where it is of none.
func (m Metric) Split() (kind Metric, of string) {
	k, of, _ := strings.Cut(string(m), ":")
	return Metric(k), of
}

// IsQuantile reports whether m is named as a quantile is.
func (m Metric) IsQuantile() bool { return len(m) > 1 && m[0] == 'p' }

// Percent returns 99 for "p99".
func (m Metric) Percent() (float64, error) {
	p, err := strconv.ParseFloat(strings.TrimPrefix(string(m), "p"), 64)
	if err != nil || !m.IsQuantile() || p <= 0 || p >= 100 {
		return 0, fmt.Errorf("%q is no quantile between p0 and p100", string(m))
	}
	return p, nil
}

// Params are what sets a block apart from others of its measure and arm, such as the number of Services.
type Params map[string]string

// String returns "keepalive=0 services=10", sorted.
func (p Params) String() string {
	var l []string
	for _, k := range slices.Sorted(maps.Keys(p)) {
		l = append(l, k+"="+p[k])
	}
	return strings.Join(l, " ")
}

// With returns p with another parameter.
func (p Params) With(name, value string) Params {
	q := Params{name: value}
	for k, v := range p {
		if k != name {
			q[k] = v
		}
	}
	return q
}
