package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/migrate"
)

// migrateCommand returns the command that removes a kube-proxy's rules once Fairlead serves in its place.
func migrateCommand() *cobra.Command {
	var n nodeFlags
	var idle bool
	c := &cobra.Command{
		Use:   "migrate [--config FILE]",
		Short: "Remove kube-proxy's rules once Fairlead serves in its place",
		Long: `Wait until no kube-proxy runs in this network namespace and Fairlead's agent is ready, then remove kube-proxy's rules.
It is what run --migrate-from-kube-proxy Remove does, as a command that ends: the agent needs neither the host's processes nor CAP_SYS_PTRACE then.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if idle {
				<-c.Context().Done()
				return nil
			}
			loaded, err := n.Load()
			if err != nil {
				return err
			}
			return leaveKubeProxy(c.Context(), loaded, logger(c.ErrOrStderr(), loaded))
		},
	}
	n.add(c)
	c.Flags().BoolVar(&idle, "idle", false, "do nothing until ended: for a DaemonSet whose init container has "+
		"migrated the node")
	return c
}

// leaveKubeProxy removes kube-proxy's rules once no kube-proxy runs and the agent that c configures is ready.
func leaveKubeProxy(ctx context.Context, c *config.Config, log *slog.Logger) error {
	if err := migrate.Gone(ctx, log); err != nil {
		return err
	}
	if err := awaitReady(ctx, cmp.Or(c.Proxy.MetricsBindAddress, "127.0.0.1:10249"), log); err != nil {
		return err
	}
	if err := migrate.Run(ctx, log, migrate.Options{Remove: true, Exclude: c.ExcludedCIDRs()}); err != nil {
		return err
	}
	log.Info("nothing of kube-proxy is left in this network namespace")
	return nil
}

// awaitReady waits until the agent that serves metrics at an address is ready.
func awaitReady(ctx context.Context, address string, log *slog.Logger) error {
	web := http.Client{Timeout: 5 * time.Second}
	for logged := false; ; logged = true {
		err := ready(ctx, &web, address)
		if err == nil {
			return nil
		}
		if !logged {
			log.Info("waiting until Fairlead is ready; kube-proxy's rules are kept", "error", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// ready returns why the agent isn't ready, nil if it is.
func ready(ctx context.Context, web *http.Client, address string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", nil)
	if err != nil {
		return err
	}
	r, err := web.Do(request)
	if err != nil {
		return err
	}
	r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", request.URL, r.Status)
	}
	return nil
}
