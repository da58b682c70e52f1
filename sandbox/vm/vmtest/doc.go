// Package vmtest runs the tests of a Go package under the second kernel and brings each result back as a subtest. It's
// for tests only; package vm boots the machine.
package vmtest
