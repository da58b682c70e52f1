package kube

import "time"

// RefetchAfter has namespaces of which objects are left out listed again after d.
func (s *Source) RefetchAfter(d time.Duration) { s.pause = d }

// RetryAfter has a server asked again after d, at most, for a kind that it doesn't serve.
func (s *Source) RetryAfter(d time.Duration) { s.retry = d }

// Patience is patience.
const Patience = patience
