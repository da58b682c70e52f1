package main

import (
	"context"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/featuregate"
	"k8s.io/component-base/metrics/features"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/prometheus/feature"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // rest_client_*

	"fairlead.dev/fairlead/agent/config"
)

// processMetrics returns the metrics that Kubernetes' components have in common: of the API client, of features, of the
// build, of the Go process. It needs to be called before the first client is made: that makes the client's histograms.
func processMetrics(c *config.Config) prometheus.Gatherer {
	registerProcess()
	feature.ResetFeatureInfoMetric()
	for _, f := range c.Features() {
		feature.RecordFeatureInfo(context.Background(), f.Name, f.Stage, f.Enabled)
	}
	return legacyregistry.DefaultGatherer
}

// registerProcess has histograms be native ones too, and registers kubernetes_build_info. Kubernetes' own of that name
// has its values from the linker.
var registerProcess = sync.OnceFunc(func() {
	gates := featuregate.NewFeatureGate()
	if err := features.AddFeatureGates(gates); err != nil {
		panic(err)
	}
	features.ApplyFeatureGates(gates)
	v := buildInfo()
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kubernetes_build_info",
		Help: "1, labeled by the Kubernetes version of the kube-proxy that this replaces, and by the commit, the " +
			"Go version and the platform of this program.",
		ConstLabels: prometheus.Labels{"major": v.Major, "minor": v.Minor, "git_version": v.GitVersion,
			"git_commit": v.GitCommit, "git_tree_state": v.GitTreeState, "build_date": v.BuildDate,
			"go_version": v.GoVersion, "compiler": v.Compiler, "platform": v.Platform}})
	g.Set(1)
	legacyregistry.Registerer().MustRegister(g)
})
