package vm

// What goes over the serial port, as gob streams: orders to the guest, reports back. The guest's first report is ready
// or failed, in answer to its first order, which is setup.

type order struct {
	Setup *setup
	Run   *run
	Kill  bool // the running command and its process group
}

type setup struct {
	Release string   // of the kernel
	Modules string   // the host's directory of its modules
	Shared  []string // paths; the file system of number i has the tag "shared<i>"
}

type run struct {
	Args, Env []string
	Dir       string
	OneOutput bool // stderr goes where stdout goes
}

type reportKind int

const (
	ready  reportKind = iota + 1 // Text: the kernel's release
	failed                       // Text: what
	stdout                       // Data
	stderr                       // Data
	ended                        // Code; or Text: why there is none
)

type report struct {
	Kind reportKind
	Data []byte
	Text string
	Code int
}
