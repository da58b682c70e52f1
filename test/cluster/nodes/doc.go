// Package nodes tests a real cluster, as `fairlead cluster up` makes it, with real kubelets and containers.
package nodes
