// Package experiment is what all experiments are made of. An Experiment prepares a Trial on a testbed: a design, which
// says in words and numbers all that a reader must know to judge the raw blocks, and steps, which measure. Perform runs
// one and leaves a folder of raw results.
//
// Here are also the arms that experiments share (modes, kube-proxy's rules, a real kube-proxy), the grid of these by
// number of Services, and aims that two experiments test. Each experiment is a package below this one, and imports no
// other.
package experiment
