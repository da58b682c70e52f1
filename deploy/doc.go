// Package deploy renders the Helm chart in ./chart, for those without Helm and for the chart's tests. It is a module of
// its own, so that the product needs neither Helm nor an image library. `make test-deploy` in the root tests it.
package deploy
