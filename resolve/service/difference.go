package service

import (
	"slices"

	"fairlead.dev/fairlead/model"
)

// difference gathers what a Delta is made of, each kind for itself: pools come before the frontends that use them, and
// go after.
type difference struct {
	putNode, putPools, putFronts []model.ServicePart
	delFronts, delPools, delNode []model.ServicePart
	putClusterIPs, delClusterIPs []model.ServicePart
	putHealth, delHealth         []*model.HealthCheck
}

// node records a new node. There is no old one at first.
func (d *difference) node(old, now *model.ServiceNode) {
	d.putNode = []model.ServicePart{now}
	if old != nil {
		d.delNode = []model.ServicePart{old}
	}
}

// between records what is in one and not in the other.
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
	model.ServicePart
}](parts []model.ServicePart, a, b []P) []model.ServicePart {
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
		Services: model.Change[model.ServicePart]{
			Put: slices.Concat(d.putNode, d.putPools, d.putFronts, d.putClusterIPs),
			Del: slices.Concat(d.delClusterIPs, d.delFronts, d.delPools, d.delNode),
		},
		Health: model.Change[*model.HealthCheck]{Put: d.putHealth, Del: d.delHealth},
	}
}
