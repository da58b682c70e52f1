package experiment

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/rules"
)

// Ruleset is the rules of one node, by the interfaces that they came through.
type Ruleset struct {
	parts []rules.Ruleset
	via   []rules.Interface
}

// ReadRules reads what stands in a node's kernel. Rules of iptables' nft variant stand in nf_tables, where their text
// alone can be followed: then all of nf_tables is that text.
func ReadRules(ctx context.Context, ns *netns.Namespace) (set Ruleset, err error) {
	err = ns.Do(func() error {
		for _, variant := range []rules.Interface{rules.Legacy, rules.NFT} {
			text, err := output(ctx, "iptables-"+string(variant)+"-save")
			if err != nil && !errors.Is(err, exec.ErrNotFound) {
				return err
			}
			if !strings.Contains(text, "\n-A ") {
				continue
			}
			sets, err := output(ctx, "ipset", "save")
			if err != nil && !errors.Is(err, exec.ErrNotFound) {
				return err
			}
			t, err := rules.ParseIPTables(text, sets)
			if err != nil {
				return err
			}
			set.parts, set.via = append(set.parts, t), append(set.via, variant)
			if variant == rules.NFT {
				return nil
			}
		}
		t, err := rules.ReadNFTables()
		if err == nil {
			set.parts, set.via = append(set.parts, t), append(set.via, rules.NFT)
		}
		return err
	})
	if err != nil {
		return set, fmt.Errorf("read the rules of %s: %w", ns.Name, err)
	}
	return set, nil
}

func output(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var says strings.Builder
	cmd.Stderr = &says
	b, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(says.String()))
	}
	return string(b), nil
}

// Count returns how many rules a packet is tested against, of all interfaces together.
func (s Ruleset) Count(p rules.Packet) (sum rules.Spread, err error) {
	for _, part := range s.parts {
		c, err := rules.Static(part, p)
		if err != nil {
			return sum, err
		}
		sum.Mean += c.Rules.Mean
		sum.Min, sum.Max = sum.Min+c.Rules.Min, sum.Max+c.Rules.Max
	}
	return sum, nil
}

// trace has the kernel count the rules that a packet meets in a node, interface by interface, while a client connects
// once for each.
func (s Ruleset) trace(ctx context.Context, node *netns.Namespace, packet rules.Packet,
	c load.Client) (sum int, err error) {
	c.Targets, c.Warm, c.Most, c.Timeout = []netip.AddrPort{packet.Dst}, 0, 1, 2*time.Second
	for _, via := range s.via {
		n, err := rules.Trace(ctx, node, via, packet, func() error {
			s, err := c.Run(ctx, load.CRR, 10*time.Second)
			if err == nil && s.Ops != 1 {
				err = fmt.Errorf("connect to %s: %v", packet.Dst, s.Errors)
			}
			return err
		})
		if err != nil {
			return sum, err
		}
		sum += n
	}
	return sum, nil
}

// Agree has the kernel trace a packet, which must meet as many rules as on paper.
func (s Ruleset) Agree(ctx context.Context, node *netns.Namespace, packet rules.Packet, paper rules.Spread,
	c load.Client) error {
	traced, err := s.trace(ctx, node, packet, c)
	if err == nil && (traced < paper.Min || traced > paper.Max) {
		err = fmt.Errorf("from %s to %s: on paper %d to %d rules, the kernel's trace has %d", packet.Src, packet.Dst,
			paper.Min, paper.Max, traced)
	}
	return err
}
