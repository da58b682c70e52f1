package kubeproxy

// Mode is a way in which kube-proxy tells the kernel.
type Mode string

// The modes of kube-proxy 1.37.
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
