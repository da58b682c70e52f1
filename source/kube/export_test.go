package kube

import "time"

// RefetchAfter has namespaces of which objects are left out listed again after d.
func (s *Source) RefetchAfter(d time.Duration) { s.pause = d }

// Patience is patience.
const Patience = patience
