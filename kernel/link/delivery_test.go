package link

import "testing"

func TestDeliveryIsMadeReadAndDeleted(t *testing.T) {
	_, c := space(t)
	const owner, table = 199, 5000
	for _, six := range []bool{false, true} {
		d := Delivery{Owner: owner, Six: six, Priority: 77, Table: table, Mark: 0x12, Mask: 0xff}
		is := func(want string) {
			t.Helper()
			if got, err := c.Deliveries(owner, six, table); got != want || err != nil {
				t.Errorf("IPv6 %t: %q, %v, want %q", six, got, err, want)
			}
		}
		is("")
		check(t, c.PutDelivery(d), c.PutDelivery(d))
		is(d.String())
		other := d
		other.Mark = 0x13
		check(t, c.PutDelivery(other))
		is("2 rules, 1 routes")
		check(t, c.DeleteDeliveries(owner, six, table), c.DeleteDeliveries(owner, six, table))
		is("")
		other.Owner++
		check(t, c.PutDelivery(other))
		is("") // another's
		check(t, c.DeleteDeliveries(owner+1, six, table))
	}
}
