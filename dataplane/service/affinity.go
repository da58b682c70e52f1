package service

// AffinityUse is how many session affinity entries a plane holds of those of one family that it has capacity for.
// Beyond the limit clients are served, but not remembered.
type AffinityUse struct {
	Family         string // "IPv4" or "IPv6"
	Entries, Limit int
}
