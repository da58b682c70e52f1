package model

import "slices"

// FairShare returns how much each of several may take of what all share: those that demand no more have all that they
// demand, and the others the same each. It is more than any demand where all together are within the total.
func FairShare(total int, demands []int) int {
	l := slices.Sorted(slices.Values(demands))
	for i, d := range l {
		if left := len(l) - i; d > total/left {
			return max(total/left, 0)
		}
		total -= d
	}
	return int(^uint(0) >> 1)
}
