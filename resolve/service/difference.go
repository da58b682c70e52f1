package service

import (
	"slices"

	"fairlead.dev/fairlead/model"
)

// difference gathers what a Delta is made of, each kind for itself: pools come before the frontends that use them, and
// go after.
type difference struct {
	putNode, putPools, putFronts []model.Part
	delFronts, delPools, delNode []model.Part
	putClusterIPs, delClusterIPs []model.Part
	putHealth, delHealth         []*model.HealthCheck
}

// node notes a new node. There is no old one at first.
func (d *difference) node(old, now *model.Node) {
	d.putNode = []model.Part{now}
	if old != nil {
		d.delNode = []model.Part{old}
	}
}

// between notes what is in one and not in the other.
func (d *difference) between(old, now *decision) {
	d.putPools = missing(d.putPools, now.pools, old.pools)
	d.delPools = missing(d.delPools, old.pools, now.pools)
	d.putFronts = missing(d.putFronts, now.fronts, old.fronts)
	d.delFronts = missing(d.delFronts, old.fronts, now.fronts)
	if old.health == now.health {
		return
	}
	if old.health != nil {
		d.delHealth = append(d.delHealth, old.health)
	}
	if now.health != nil {
		d.putHealth = append(d.putHealth, now.health)
	}
}

// missing adds to parts those of a, but nil, that are not in b.
func missing[P interface {
	comparable
	model.Part
}](parts []model.Part, a, b []P) []model.Part {
	var none P
	for i, p := range a {
		if p != none && (i >= len(b) || b[i] != p) && !slices.Contains(b, p) {
			parts = append(parts, p)
		}
	}
	return parts
}

func (d *difference) delta() model.Delta {
	return model.Delta{
		Put:       slices.Concat(d.putNode, d.putPools, d.putFronts, d.putClusterIPs),
		Del:       slices.Concat(d.delClusterIPs, d.delFronts, d.delPools, d.delNode),
		PutHealth: d.putHealth,
		DelHealth: d.delHealth,
	}
}
