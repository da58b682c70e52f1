package main

import (
	"errors"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/event"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// openSource opens where a node's objects come from, and where Events about them go, nil where nobody takes any. A folder wins
// over the API server of c.Proxy.ClientConnection and c.Server.
func openSource(c *config.Config) (source.Source, event.Recorder, error) {
	if c.Own.Source != "" {
		return manifest.New(c.Own.Source), nil, nil
	}
	return nil, nil, errors.New("--source is missing: name a folder of Kubernetes YAML, such as examples/shop")
}
