package apiserver

import (
	"bufio"
	"net/http"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// bookmarkEvery is how often a watch that asked for bookmarks hears how far it has come, as with an API server.
const bookmarkEvery = time.Minute

// stream writes a watch's events.
type stream struct {
	*bufio.Writer
	*format
	*http.ResponseController
	collection *collection
}

// flush sends what was written.
func (s stream) flush() error {
	if err := s.Writer.Flush(); err != nil {
		return err
	}
	return s.ResponseController.Flush()
}

// send writes an event.
func (s stream) send(t watch.EventType, object []byte) { s.Write(s.event(t, object)) }

// bookmark returns how far the watch has come, and perhaps that it has seen all there was (KEP-3157).
func (s stream) bookmark(number uint64, end bool) {
	b := &metav1.PartialObjectMetadata{TypeMeta: s.collection.typeMeta(""),
		ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.FormatUint(number, 10)}}
	if end {
		b.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	// every kind's message has its metadata in field 1, as this one
	s.send(watch.Bookmark, encode(s.format, b.TypeMeta, b))
}

// watch reports of changes as they come, until the client goes or the time that it gave is over.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, f *format, c *collection, q query) {
	s.watchers.Add(1)
	defer s.watchers.Add(-1)
	out := stream{bufio.NewWriterSize(w, 64<<10), f, http.NewResponseController(w), c}
	w.Header().Set("Content-Type", f.stream)
	number := q.from
	if q.initial {
		number = s.initial(out, q)
	}
	var over, mark <-chan time.Time
	if q.timeout > 0 {
		over = time.After(q.timeout)
	}
	if q.bookmarks {
		t := time.NewTicker(bookmarkEvery)
		defer t.Stop()
		mark = t.C
	}
	for {
		changes, reached, next, ok := s.since(c, number)
		if !ok {
			e := status(apierrors.NewResourceExpired("too old or unknown resource version: " + strconv.FormatUint(number, 10)))
			out.send(watch.Error, encode(f, e.TypeMeta, e))
			out.flush()
			return
		}
		number = reached
		for _, n := range changes {
			if t := n.event(q.sees); t != "" {
				out.send(t, n.now.whole(f))
			}
		}
		if out.flush() != nil {
			return
		}
		select {
		case <-next:
		case <-mark:
			out.bookmark(number, false)
		case <-over:
			return
		case <-r.Context().Done():
			return
		}
	}
}

// initial reports of what is there, and returns the resource version from which to go on.
func (s *Server) initial(out stream, q query) uint64 {
	l, number := s.list(out.collection, q.sees)
	for _, v := range l {
		out.send(watch.Added, v.whole(out.format))
	}
	if q.end {
		out.bookmark(number, true)
	}
	return number
}
