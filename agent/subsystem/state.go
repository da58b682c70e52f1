package subsystem

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// State is the status page. Each key is always there; fastPath and policies alone may be null.
type State struct {
	Node     string                      `json:"node"`
	Leaving  string                      `json:"leaving"` // why load balancers should send nothing new here
	Mode     string                      `json:"mode"`
	Why      string                      `json:"why"` // that mode
	Ready    bool                        `json:"ready"`
	Batches  int                         `json:"batches"`  // of changes, from the source
	Loops    map[string]reconcile.Status `json:"loops"`    // by data plane
	FastPath *service.FastPath           `json:"fastPath"` // of packets for pods; null but in mode ebpf
	Policies *PolicyState                `json:"policies"` // null where they are off
	Problems []source.Problem            `json:"problems"`

	About []any `json:"-"` // attributes of the log line of a start
}

// PolicyState is the status page's section of policies.
type PolicyState struct {
	Engine   string              `json:"engine"`
	Why      string              `json:"why"` // that engine
	Audit    bool                `json:"audit"`
	Sources  bool                `json:"sourceCheck"` // packets with a source that isn't their device's pod's are dropped
	Enforced bool                `json:"enforced"`    // what all policies need is in the kernel
	Parts    inspect.PolicyParts `json:"parts"`
	Cuts     *Cuts               `json:"cuts,omitempty"`
}

// Cuts is what was done and found about open connections that policies no longer allow.
type Cuts struct {
	Cut      uint64        `json:"cut"`      // connections that were denied after they had begun
	Restored uint64        `json:"restored"` // of those, how many were allowed again
	Marked   int           `json:"marked"`   // connections that are being cut
	Passes   uint64        `json:"passes"`   // how often connection tracking was read
	LastPass time.Duration `json:"lastPassNanoseconds"`
	Problem  string        `json:"problem"` // why denied connections are not cut; "": they are
}

// Latency returns the histogram fairlead_NAME of how long changes of something took.
func Latency(name, of string) prometheus.Histogram {
	return prometheus.NewHistogram(Native(prometheus.HistogramOpts{Name: "fairlead_" + name,
		Help:    fmt.Sprintf("Time from receiving a change%s until it is in the kernel.", of),
		Buckets: prometheus.ExponentialBucketsRange(100e-6, 10, 41)}))
}

// Native returns a histogram's options with native buckets beside the classic ones, of the size that Kubernetes' have.
func Native(o prometheus.HistogramOpts) prometheus.HistogramOpts {
	o.NativeHistogramBucketFactor, o.NativeHistogramMaxBucketNumber = 1.1, 160
	return o
}
