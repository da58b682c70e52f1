package config

import (
	"net"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"

	resolve "fairlead.dev/fairlead/resolve/service"
)

// The ports of kube-proxy's servers.
const (
	healthPort  = 10256
	metricsPort = 10249
)

// complete sets what was left open as kube-proxy does (pkg/proxy/apis/config/v1alpha1/defaults.go).
func complete(c *v1alpha1.KubeProxyConfiguration) {
	c.APIVersion, c.Kind = v1alpha1.SchemeGroupVersion.String(), "KubeProxyConfiguration"
	orText(&c.BindAddress, "0.0.0.0")
	health, metrics := "0.0.0.0", "127.0.0.1"
	if a, err := resolve.ParseAddr(c.BindAddress); err == nil && a.Is6() {
		health, metrics = "::", "::1"
	}
	orText(&c.HealthzBindAddress, health)
	orText(&c.MetricsBindAddress, metrics)
	c.HealthzBindAddress = withPort(c.HealthzBindAddress, healthPort)
	c.MetricsBindAddress = withPort(c.MetricsBindAddress, metricsPort)
	orNumber(&c.OOMScoreAdj, -999)
	for _, p := range []*metav1.Duration{&c.IPTables.SyncPeriod, &c.IPVS.SyncPeriod, &c.NFTables.SyncPeriod} {
		orTime(p, 30*time.Second)
	}
	for _, p := range []*metav1.Duration{&c.IPTables.MinSyncPeriod, &c.NFTables.MinSyncPeriod} {
		orTime(p, time.Second)
	}
	if c.IPTables.LocalhostNodePorts == nil {
		yes := true
		c.IPTables.LocalhostNodePorts = &yes
	}
	orNumber(&c.IPTables.MasqueradeBit, 14)
	orNumber(&c.NFTables.MasqueradeBit, 14)
	orNumber(&c.Conntrack.MaxPerCore, 32<<10)
	orNumber(&c.Conntrack.Min, 128<<10)
	if c.Conntrack.TCPEstablishedTimeout == nil {
		c.Conntrack.TCPEstablishedTimeout = &metav1.Duration{Duration: 24 * time.Hour}
	}
	if c.Conntrack.TCPCloseWaitTimeout == nil {
		c.Conntrack.TCPCloseWaitTimeout = &metav1.Duration{Duration: time.Hour}
	}
	orTime(&c.ConfigSyncPeriod, 15*time.Minute)
	orText(&c.ClientConnection.ContentType, "application/vnd.kubernetes.protobuf")
	if c.ClientConnection.QPS == 0 {
		c.ClientConnection.QPS = 5
	}
	if c.ClientConnection.Burst == 0 {
		c.ClientConnection.Burst = 10
	}
	if c.FeatureGates == nil {
		c.FeatureGates = map[string]bool{}
	}
	logsapi.SetRecommendedLoggingConfiguration(&c.Logging)
}

// defaults is a configuration that says nothing.
func defaults() *v1alpha1.KubeProxyConfiguration {
	c := &v1alpha1.KubeProxyConfiguration{}
	complete(c)
	return c
}

func orText(s *string, v string) {
	if *s == "" {
		*s = v
	}
}

func orTime(d *metav1.Duration, v time.Duration) {
	if d.Duration == 0 {
		d.Duration = v
	}
}

func orNumber(p **int32, v int32) {
	if *p == nil {
		*p = &v
	}
}

// withPort returns an address with the port if it is a plain IP address; anything else is left for validation.
func withPort(s string, port int) string {
	if host, of, err := net.SplitHostPort(s); err == nil {
		if a, err := resolve.ParseAddr(host); err == nil {
			return net.JoinHostPort(a.String(), of)
		}
	}
	a, err := resolve.ParseAddr(s)
	if err != nil && len(s) > 2 && s[0] == '[' && s[len(s)-1] == ']' {
		a, err = resolve.ParseAddr(s[1 : len(s)-1])
	}
	if err != nil {
		return s
	}
	if a.Is6() {
		return "[" + a.String() + "]:" + strconv.Itoa(port)
	}
	return a.String() + ":" + strconv.Itoa(port)
}
