package agent

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/conformance"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/model"
)

// judged is the service side as a conformance.Runner.
type judged struct {
	*Services
	parts   map[model.Part]bool
	repairs uint64 // that there must be before the kernel is as told
}

func subject() conformance.Subject {
	return conformance.Subject{Name: "nftables", Start: func() (conformance.Runner, error) {
		log := slog.New(slog.DiscardHandler)
		if testing.Verbose() && os.Getenv("FAIRLEAD_TEST_LOG") != "" {
			log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
		}
		s, err := OpenServices(log)
		return &judged{Services: s, parts: map[model.Part]bool{}}, err
	}}
}

// Change also keeps what is wanted, to disturb some of it.
func (j *judged) Change(put, del []model.Part) {
	for _, p := range del {
		delete(j.parts, p)
	}
	for _, p := range put {
		j.parts[p] = true
	}
	j.Services.Change(put, del)
}

// Disturb implements conformance.Disturber: like a stranger with the nft command, it removes elements and a chain's rules.
func (j *judged) Disturb(ctx context.Context) error {
	j.repairs = j.loop.Status().Repairs + 1
	stranger, err := nftables.New()
	if err != nil {
		return err
	}
	defer stranger.Close()
	var gone []nftables.Fact
	for p := range j.parts {
		for _, f := range stranger.Render(p) {
			if f.Key.Kind == nftables.KindElement && f.Key.Rank() >= 5 {
				gone = append(gone, f)
			}
		}
	}
	if err := stranger.Write(ctx, nil, distinct(gone)); err != nil {
		return err
	}
	out, err := exec.Command("nft", "flush", "chain", "inet", nftables.Table, "enter4").CombinedOutput()
	if err != nil {
		return fmt.Errorf("nft flush chain: %w: %s", err, out)
	}
	return nil
}

// distinct gives each fact once.
func distinct(facts []nftables.Fact) (l []nftables.Fact) {
	seen := map[nftables.Key]bool{}
	for _, f := range facts {
		if !seen[f.Key] {
			seen[f.Key] = true
			l = append(l, f)
		}
	}
	return l
}

// Sync also waits for what Disturb did to be seen and repaired.
func (j *judged) Sync(ctx context.Context) error {
	for j.loop.Status().Repairs < j.repairs {
		select {
		case <-ctx.Done():
			return fmt.Errorf("drift was not repaired: %w", ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
	return j.Services.Sync(ctx)
}

// Dump implements conformance.Dumper.
func (j *judged) Dump() string {
	out, err := exec.Command("nft", "list", "table", "inet", nftables.Table).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("nft list: %v: %s", err, out)
	}
	return string(out)
}

func TestConformance(t *testing.T) { conformance.Run(t, subject()) }
