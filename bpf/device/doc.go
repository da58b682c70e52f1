// Package device is the Go side of the program at a network device (device.c): the maps that it has besides Services'
// (device.h), typed, its attachments, and what it finds of the fast path.
//
// The program serves Services by their maps, and calls that of network policies: so this package has the whole set of
// Services' maps (Maps), and joins both programs (Folders). Neither bpf/service nor bpf/policy knows it.
package device

//go:generate sh ../generate.sh
