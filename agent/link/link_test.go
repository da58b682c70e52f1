package link

import (
	"testing"

	"fairlead.dev/fairlead/model"
)

// Devices that come and go are changes, one each, and what stays as it is none.
func TestChangesOfDevices(t *testing.T) {
	s := Source{held: map[int]*model.Link{}}
	lo, a, b := model.Link{Index: 1, Loopback: true}, model.Link{Index: 2, Name: "a"}, model.Link{Index: 3, Name: "b"}
	renamed := b
	renamed.Name = "c"
	for i, c := range []struct {
		now      []model.Link
		put, del int
	}{
		{[]model.Link{lo, a}, 2, 0},
		{[]model.Link{lo, a}, 0, 0},
		{[]model.Link{lo, a, b}, 1, 0},
		{[]model.Link{lo, renamed}, 1, 2},
		{nil, 0, 2},
	} {
		if put, del := s.update(c.now); len(put) != c.put || len(del) != c.del {
			t.Errorf("change %d: put %v, del %v", i, put, del)
		}
	}
}
