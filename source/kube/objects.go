package kube

import (
	"iter"
	"math"
)

// objects describes the objects of one kind in one namespace. A cluster has many of which each has few.
type objects struct {
	list  []object
	index map[string]int32 // of names in the list; nil while that is short
}

// object is what held says, in less.
type object struct {
	name            string
	version         uint64
	created, weight uint32
}

// short is how many objects are found without an index.
const short = 64

func (l *objects) len() int { return len(l.list) }

// find returns where the object of a name is, -1 if there is none.
func (l *objects) find(name string) int {
	if l.index != nil {
		if i, there := l.index[name]; there {
			return int(i)
		}
		return -1
	}
	for i := range l.list {
		if l.list[i].name == name {
			return i
		}
	}
	return -1
}

func (l *objects) get(name string) (h held, there bool) {
	i := l.find(name)
	if i < 0 {
		return held{}, false
	}
	return l.list[i].held(), true
}

func (o *object) held() held { return held{o.version, int64(o.created), int(o.weight)} }

// set adds or replaces an object.
func (l *objects) set(name string, h held) {
	o := object{name, h.version, uint32(h.created), uint32(min(h.weight, math.MaxUint32))}
	if i := l.find(name); i >= 0 {
		o.name = l.list[i].name
		l.list[i] = o
		return
	}
	if l.list = append(l.list, o); l.index != nil {
		l.index[name] = int32(len(l.list) - 1)
	} else if len(l.list) > short {
		l.index = make(map[string]int32, 2*short)
		for i := range l.list {
			l.index[l.list[i].name] = int32(i)
		}
	}
}

// remove removes an object: the last takes its position.
func (l *objects) remove(name string) (h held, there bool) {
	i := l.find(name)
	if i < 0 {
		return held{}, false
	}
	h, last := l.list[i].held(), len(l.list)-1
	if l.list[i] = l.list[last]; l.index != nil {
		l.index[l.list[i].name] = int32(i)
		delete(l.index, name)
	}
	l.list[last] = object{}
	if l.list = l.list[:last]; last == 0 {
		*l = objects{}
	}
	return h, true
}

// all returns the objects, in no order. None may be added or removed meanwhile.
func (l *objects) all() iter.Seq2[string, held] {
	return func(yield func(string, held) bool) {
		for i := range l.list {
			if !yield(l.list[i].name, l.list[i].held()) {
				return
			}
		}
	}
}
