package service

import "log/slog"

// Previous holds the planes of a mode whose connections run through this process after its agent has ended, so that
// they serve until another agent of the process does. The zero value holds none. It serves one agent at a time.
type Previous struct{ planes *Planes }

// holds reports whether planes are held.
func (p *Previous) holds() bool { return p != nil && p.planes != nil }

// Close ends the planes that are held.
func (p *Previous) Close() error {
	if !p.holds() {
		return nil
	}
	planes := p.planes
	p.planes = nil
	return planes.Close()
}

// hold ends what is held and holds planes.
func (p *Previous) hold(planes *Planes) error {
	err := p.Close()
	p.planes = planes
	return err
}

// end ends what served before and logs what fails.
func (p *Previous) end(log *slog.Logger) {
	if err := p.Close(); err != nil {
		log.Warn("stopping the servers of the previous configuration failed", "error", err)
	}
}
