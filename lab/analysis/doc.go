// Package analysis computes what follows from a run's directory: ratios to the baseline of the same round, intervals,
// what the run can't distinguish from nothing, and the verdict on each aim and claim. It is a pure function of package
// result's manifest and blocks, and draws nothing.
package analysis
