// Package config is what a node's agent is told when it starts: kube-proxy's own configuration file
// (KubeProxyConfiguration, v1alpha1) and flags, taken as they are, and beside them what only Fairlead has
// (FairleadConfiguration, v1alpha1), in the same file or as flags.
//
// Every field of kube-proxy's stands in one table (Fields): it is honoured, or a warning says what happens instead.
// That table makes the documentation too. Precedence is kube-proxy's: a file replaces all flags but those of logging
// and the node's name; flags of Fairlead's own win over the file.
//
// It reads and checks, and decides nothing about packets.
package config
