// Package memory has a process that is at rest use little of it, and no processor to collect it.
package memory

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"

	"fairlead.dev/fairlead/kernel/cgroup"
)

// Start has a process that reads a whole cluster collect garbage often enough that it needs little more meanwhile than
// after, and bounds its memory by what its container may use, where it sees that, and by GOMEMLIMIT.
func Start() {
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(bound())
}

// bound returns what memory may come to.
var bound = sync.OnceValue(func() int64 { return boundOf(debug.SetMemoryLimit(-1), cgroup.MemoryLimit()) })

// boundOf returns what memory may come to by GOMEMLIMIT and by a container's limit, of which a quarter is left to the
// kernel's memory for what the process writes there.
func boundOf(environment, container int64) int64 { return min(environment, container/4*3) }

// Rest returns what a start has needed to the system, memory and pages of the program, and has the process collect
// garbage only when it makes some. Go collects every two minutes whatever happens (forcegcperiod in runtime/proc.go),
// which at 100,000 endpoints is most of what an agent at rest costs; with GOGC off it doesn't, and collects when memory
// comes to its limit. So the limit is set after each collection to where the next is to begin (headroom), or to what
// Start found if that is less. What still works off the last of the start's changes needs much of its memory until it
// has: so memory and pages are returned once more when that is over (settled), since the runtime itself returns no more
// than keeps it below its limit.
func Rest() {
	debug.SetGCPercent(-1)
	limit()
	watchCollections()
	release()
	time.AfterFunc(settled, release)
}

// settled is after how long at rest nothing of a start is under way.
var settled = 5 * time.Second

// release returns to the system what is not in use.
func release() {
	debug.FreeOSMemory()
	pageOut()
}

// watchCollections sets the limit anew after each collection: an object that nothing refers to is finalized by the
// next.
func watchCollections() {
	runtime.SetFinalizer(&struct{ _ [16]byte }{}, func(any) {
		limit()
		watchCollections()
	})
}

// limit sets the memory limit to what the process needs when its living heap has grown by its headroom.
func limit() {
	s := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/live:bytes"},
	}
	metrics.Read(s)
	v := func(i int) int64 { return int64(s[i].Value.Uint64()) }
	around := v(0) - v(1) - v(2) - v(3)
	goal := v(4) + headroom(v(4))
	// the runtime begins a thirty-second and 1 MiB before the limit (mgcpacer.go)
	debug.SetMemoryLimit(min(around+goal+goal/32+1<<20, bound()))
}

// headroom returns by how much a living heap may grow before the next collection: by a quarter, a small one by 4 MiB.
func headroom(live int64) int64 { return max(live/4, 4<<20) }
