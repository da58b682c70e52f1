// Package httpserver makes the HTTP servers of an agent: those that probes, load balancers and scrapers ask. None of
// them can hold an agent's file descriptors or memory for long, whoever connects.
package httpserver

import (
	"container/list"
	"net"
	"net/http"
	"sync"
	"time"
)

// MaxConnections is how many connections a server holds at once.
const MaxConnections = 256

// New returns a server of h for one listener, with timeouts for each step of a connection. With MaxConnections it
// closes for each new one the connection that has done nothing for the longest time, so that a probe is answered while
// others hold idle connections.
func New(h http.Handler) *http.Server {
	c := &connections{held: map[net.Conn]*list.Element{}}
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      10 * time.Second, // net/http/pprof adds what a profile takes
		IdleTimeout:       30 * time.Second,
		MaxHeaderBytes:    16 << 10,
		ConnState:         c.follow,
	}
}

// connections are those of a server.
type connections struct {
	mu    sync.Mutex
	held  map[net.Conn]*list.Element
	order list.List // of net.Conn, by their last change of state, the oldest first
}

// follow implements http.Server.ConnState.
func (c *connections) follow(conn net.Conn, s http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch e := c.held[conn]; {
	case s == http.StateNew:
		if c.order.Len() >= MaxConnections {
			c.order.Remove(c.order.Front()).(net.Conn).Close() // its goroutine sees that
		}
		c.held[conn] = c.order.PushBack(conn)
	case s == http.StateClosed || s == http.StateHijacked:
		if e != nil {
			c.order.Remove(e) // without effect where it was removed above
			delete(c.held, conn)
		}
	case e != nil:
		c.order.MoveToBack(e) // likewise
	}
}
