package kubeproxy

import (
	"fmt"
	"os"
	"strings"
)

// Mode is a way in which kube-proxy tells the kernel.
type Mode string

// The modes of kube-proxy 1.36.
const (
	IPTables Mode = "iptables"
	NFTables Mode = "nftables"
	IPVS     Mode = "ipvs"
)

// Variant is which of iptables' two programs the mode iptables runs.
type Variant string

// The variants. Nft's time grows faster than the number of chains: at 5,000 Services it needs minutes.
const (
	Found  Variant = ""       // whatever is first in PATH
	Legacy Variant = "legacy" // xtables-legacy-multi
	Nft    Variant = "nft"    // xtables-nft-multi
)

// ParseSubject reads kube-proxy=PATH, the value of a --subject flag, and gives the path of a program.
func ParseSubject(value string) (binary string, err error) {
	name, path, ok := strings.Cut(value, "=")
	if !ok || name != "kube-proxy" || path == "" {
		return "", fmt.Errorf("subject %q: want kube-proxy=PATH, the path of a kube-proxy program", value)
	}
	switch info, err := os.Stat(path); {
	case err != nil:
		return "", fmt.Errorf("subject %q: %w; `make -C test/kubeproxy build` builds one and says where", value, err)
	case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
		return "", fmt.Errorf("subject %q: %s is no program that can be run", value, path)
	}
	return path, nil
}
