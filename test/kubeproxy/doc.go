// Package kubeproxy tries lab/kubeproxy and sandbox/apiserver with a real kube-proxy, which the module in ./kube-proxy
// builds, and measures it beside Fairlead. `make` here lists how.
package kubeproxy
