package conformance

import "testing"

// Clients' ports are none that a server of the cast, a node port or a host port may have, and come again only when all
// have been there.
func TestClientPorts(t *testing.T) {
	w, seen := &testbed{}, map[uint16]bool{}
	for _, p := range hostPorts {
		seen[uint16(p.HostPort)] = true
	}
	for range 20000 + 27232 - len(seen) {
		p := w.port()
		if p < 10000 || p >= 30000 && p < 32768 || p >= 60000 || seen[p] {
			t.Fatalf("port %d after %d others, seen: %t", p, len(seen), seen[p])
		}
		seen[p] = true
	}
	if p := w.port(); !seen[p] {
		t.Errorf("port %d comes after all", p)
	}
}
