package experiment

import (
	"context"
	"errors"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/classic"
)

// Track has nodes track connections, for one rule that accepts what is established.
func Track(ctx context.Context, nodes ...*netns.Namespace) (err error) {
	for _, n := range nodes {
		err = errors.Join(err, n.Do(func() error { return classic.PolicyList{}.Install(ctx, classic.NFT) }))
	}
	return err
}
