package ebpf

import (
	"context"
	"errors"
	"io/fs"

	"fairlead.dev/fairlead/bpf/service"
)

// Watch implements dataplane.Watcher: it signals when pins of hooks are removed, and when another plane writes (see
// bpf.Writers).
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	links := []string{p.linksFolder()}
	if Packets() {
		links = append(links, p.devices.links())
	}
	signals := make(chan struct{}, 1)
	ctx, end := context.WithCancel(ctx)
	ended, err := p.writers.Watch(ctx, links, func(other bool) { p.signal(signals, other) })
	if errors.Is(err, fs.ErrNotExist) { // there will be one to watch when the hooks are there again
		defer close(signals)
		end()
		p.signal(signals, false)
		return signals, nil
	}
	if err != nil {
		end()
		return nil, err
	}
	followed, err := p.watchDevices(ctx, func(other bool) { p.signal(signals, other) })
	if err != nil {
		end()
		<-ended
		return nil, err
	}
	go func() {
		defer close(signals)
		<-ended
		end()
		<-followed
	}()
	return signals, nil
}

// signal sends a signal if another plane wrote, or if the hooks or programs at devices are not as they were written
// and that is not our own doing.
func (p *Plane) signal(signals chan<- struct{}, other bool) {
	if !other && !p.devices.lost() {
		if !p.hooked.Load() {
			return
		}
		if digest, err := service.Attached(p.linksFolder(), nil); err == nil && digest == p.digest {
			return
		}
	}
	select {
	case signals <- struct{}{}:
	default:
	}
}
