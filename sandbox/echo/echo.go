// Package echo answers packets with the pod that got them and their source, and asks for such answers.
//
// A server stands for a pod: on each of its ports it says the pod's name and the client address that it saw. TCP (and
// SCTP where the kernel has SCTP sockets) answers line by line, and speaks HTTP/1.1 to clients that do; UDP answers
// each datagram. An answer is as long as its question at least, both padded with blanks. Where the kernel has no SCTP
// sockets, a raw socket answers an INIT chunk with an INIT ACK whose State Cookie carries the answer: enough for one
// packet each way, no association (RFC 9260, section 5.1).
//
// Sockets are made in the calling thread's network namespace, of exactly the family of their address, and stay there;
// nothing is looked up by name. The package measures nothing and is no load generator.
package echo

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/model"
)

// Port is a port to serve.
type Port struct {
	Number   uint16
	Protocol model.Protocol
}

// String returns "80/tcp".
func (p Port) String() string { return fmt.Sprintf("%d/%s", p.Number, p.Protocol) }

// Reply is what a server says: one line of JSON.
type Reply struct {
	Pod    string         `json:"pod"`    // who answers, "namespace/name"
	Client netip.AddrPort `json:"client"` // the client as the server saw it
	Server netip.AddrPort `json:"server"` // which of its own addresses it was seen at
	Proto  string         `json:"proto"`  // tcp, udp, sctp or http
	// the line or datagram that is answered, up to 64 bytes, without blanks at its end
	Said string `json:"said,omitempty"`
}

// The ways in which a question goes unanswered; Ask's and Hold's errors are one of these where errors.Is says so.
var (
	// Refused reports a rejection: a TCP reset, an SCTP ABORT, an ICMP error, or the sending kernel (EPERM).
	//
	//lint:ignore ST1012 echo.Refused says it
	Refused = errors.New("refused")
	// Timeout reports that no answer came until the context's deadline.
	//
	//lint:ignore ST1012 echo.Timeout says it
	Timeout = errors.New("no answer")
)

const maxSaid = 64

// MaxSize is the length of the longest question.
const MaxSize = 60000

// replyLine is the line for a question that came from client to server.
func replyLine(pod, proto string, client, server netip.AddrPort, message []byte) []byte {
	said := bytes.TrimRight(message, " \r\n")
	line, err := json.Marshal(Reply{pod, client, server, proto, string(said[:min(len(said), maxSaid)])})
	if err != nil {
		panic(err) // strings and addresses always marshal
	}
	return padded(line, len(message))
}

// padded makes a line of a text, with blanks up to a size.
func padded(text []byte, size int) []byte {
	if blanks := size - 1 - len(text); blanks > 0 {
		text = append(text, bytes.Repeat([]byte{' '}, blanks)...)
	}
	return append(text, '\n')
}

// parseReply reads a server's line.
func parseReply(line []byte) (a Reply, err error) {
	if err := json.Unmarshal(line, &a); err != nil {
		return a, fmt.Errorf("answer %.80q: %w", line, err)
	}
	return a, nil
}
