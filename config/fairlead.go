package config

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The API of our own configuration.
const (
	APIVersion = "fairlead.dev/v1alpha1"
	Kind       = "FairleadConfiguration"
)

// FairleadConfiguration is what only Fairlead has. Unknown fields are errors.
type FairleadConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// source is a folder or file of Kubernetes YAML or JSON to read in place of the API server. Default: the API server.
	Source string `json:"source,omitempty"`
	// mode is the data plane for Services, one of those that `fairlead modes` lists, or "auto": the best that this kernel can.
	// Default: what KubeProxyConfiguration's mode says; "auto" where a file says nothing; "nftables" without a file.
	Mode string `json:"mode,omitempty"`
	// scheduler is how Services that don't say choose an endpoint. Default: ipvs.scheduler in mode ipvs, "random" elsewhere.
	Scheduler string `json:"scheduler,omitempty"`
	// serviceProxyName has only Services with this label service.kubernetes.io/service-proxy-name served. Default: those without.
	ServiceProxyName string `json:"serviceProxyName,omitempty"`
	// takeOver says what becomes of a kube-proxy's rules: "Leave" lets them stand, and says so; "Remove" removes them once
	// Fairlead serves and no kube-proxy runs any more. Default: "Leave".
	TakeOver TakeOver `json:"takeOver,omitempty"`
}

// TakeOver says what becomes of a kube-proxy's rules.
type TakeOver string

// The ways.
const (
	Leave  TakeOver = "Leave"
	Remove TakeOver = "Remove"
)
