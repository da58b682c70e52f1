// Package iptables runs the save and restore commands of iptables and ip6tables in one network namespace, in either of
// their variants: legacy (the kernel's xtables) and nft (nf_tables told in xtables' words). It reads what save prints,
// finds out which variant a host uses, and tells when others write.
//
// It knows no meaning of a rule, and never changes one rule at a time: a change is one restore. Where another owner has
// put rules into a table of the variant nft that save can't print, our chains are listed by themselves; rules of chains
// that can't be listed are known by where they lead, and removed by nf_tables' handles.
package iptables
